"""Tells users, once for each place in their code, what stays in the function, and a remedy.

The lines go to the log, and with the function's answers to its gateway, whose page shows them.
"""

import logging
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch_shim
from torch_shim.advice.break_reasons import NO_REMEDY, Advice

log = logging.getLogger("gpufaas")

_MOST_TOLD = 30
_MOST_CHARACTERS = 240  # of one line on its way to a gateway
_MOST_SENT = 4  # with one answer: all have to fit into one header
_TIMES_SENT = 3  # an answer may not arrive
_BETWEEN = "|"  # lines in a header
_PYTHON = f"{Path(os.__file__).parent}{os.sep}"
_TORCH = f"{os.sep}torch{os.sep}"
_LIBRARIES = ("site-packages", "dist-packages")


class CodePlace(NamedTuple):
    """A line of a program."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.file else "?"


class ToldPlaces:
    """What this process has told; a place and a reason are told once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._told: dict[tuple[CodePlace, str], None] = {}
        self._unsent: dict[str, int] = {}

    def tell(self, place: CodePlace, what: str, advice: Advice) -> None:
        """Log it, and keep it for the gateway, unless it was told or there is nothing to do."""
        if advice.remedy.startswith(NO_REMEDY):
            return
        key = (place, advice.why)
        with self._lock:
            if key in self._told or len(self._told) > _MOST_TOLD:
                return
            self._told[key] = None
            full = len(self._told) > _MOST_TOLD
            if not full:
                self._unsent[_shortened(place, advice)] = _TIMES_SENT
        if full:
            log.warning("more of the program stays in the function: see `gpufaas check`")
        else:
            log.warning("%s: %s: %s (%s)", _as_imported(place), what, advice.why, advice.remedy)

    def to_send(self) -> list[str]:
        """Return lines for the gateway, each a few times, as text for a header."""
        if not self._unsent:
            return []
        with self._lock:
            chosen = list(self._unsent)[:_MOST_SENT]
            for line in chosen:
                self._unsent[line] -= 1
                if not self._unsent[line]:
                    del self._unsent[line]
        return chosen

    def after_fork(self) -> None:
        """Keep what the parent has told, with a lock of the child's own."""
        self._lock = threading.Lock()


def users_line() -> CodePlace:
    """Return the innermost line of the program's own code, else of a library of its."""
    places = list(_callers())
    own = [place for place in places if not any(name in place.file for name in _LIBRARIES)]
    return next(iter(own or places), CodePlace("", 0))


def is_outside(file: str) -> bool:
    """Whether code is neither PyTorch's, nor of Python's library, nor the shim's."""
    of_python = file.startswith(_PYTHON) and not any(name in file for name in _LIBRARIES)
    ours = ("<", *(f"{folder}{os.sep}" for folder in torch_shim.__path__))
    return not (of_python or file.startswith(ours) or _TORCH in file)


def _callers() -> Iterator[CodePlace]:
    """The lines outside of PyTorch, Python's library and the shim, the innermost first."""
    frame: FrameType | None = sys._getframe(2)  # noqa: SLF001 - there is no other way to it
    while frame is not None:
        if is_outside(frame.f_code.co_filename):
            yield CodePlace(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back


def _shortened(place: CodePlace, advice: Advice) -> str:
    """One line for a header: the file as it was imported, the reason and the remedy."""
    line = f"{_as_imported(place)}: {advice.why}; {advice.remedy}"[:_MOST_CHARACTERS]
    return "".join(
        character if " " <= character <= "~" and character != _BETWEEN else "?"
        for character in line
    )


def _as_imported(place: CodePlace) -> CodePlace:
    """The file below the folder that Python found it in, else its last parts."""
    file = place.file
    folders = [folder for folder in sys.path if folder and file.startswith(f"{folder}{os.sep}")]
    if folders:
        return place._replace(file=file[len(max(folders, key=len)) + 1 :])
    return place._replace(file="/".join(Path(file).parts[-3:]))


told_places = ToldPlaces()
