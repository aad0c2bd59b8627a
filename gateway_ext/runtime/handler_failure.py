"""What is answered and logged when a handler raises."""

import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from gateway_ext.runtime.handler_module import NoHandler
from gateway_ext.runtime.handler_response import BadResponse

_FAILED = 500
_TRY_LATER = frozenset({429, 503})
_MOST_TEXT = 1000
_RUNTIME = f"{Path(__file__).absolute().parent}/"
_IMPORTS = "<frozen importlib"


class HandlerFailure(NamedTuple):
    """The status and the text of the answer, and the text of the log."""

    status: int
    why: str
    logged: str


def put_off_status(error: BaseException) -> int | None:
    """The status of an error that says that the call may come later; None of any other.

    `answer_status` is what the shim's errors carry: the runtime does not import the shim.
    """
    status = getattr(error, "answer_status", None)
    return status if status in _TRY_LATER else None


@dataclass(frozen=True, slots=True)
class HandlerErrors:
    """Describes errors of the handler in `folder`, from its author's line on.

    An error's text may hold what callers must not see: they get it only with `shows_text`.
    `log_command` shows the log to whoever may read it.
    """

    folder: str
    shows_text: bool = False
    log_command: str = ""

    def failure(self, error: BaseException, call_id: str = "") -> HandlerFailure:
        """An error of the handler is answered 500; one of the shim's may have it come later."""
        if status := put_off_status(error):
            return HandlerFailure(status, str(error), f"was put off: {error}")
        text = str(traceback.TracebackException.from_exception(error)).strip()
        if isinstance(error, BadResponse):
            what, logged = "the function returned what cannot be sent", f"failed: {text}"
        else:
            what = f"the function raised {type(error).__name__}"
            logged = f"raised\n{self.raised(error)}"
        shown = f": {text[:_MOST_TEXT]}" if self.shows_text and text else ""
        call = f", call {call_id}" if call_id else ""
        log = f"; its log: {self.log_command}{call}" if self.log_command else ""
        return HandlerFailure(_FAILED, f"{what}{shown}{log}", logged)

    def import_failure(self, error: BaseException) -> str:
        """The text of the log when the handler cannot be imported; its last line says why."""
        raised = traceback.TracebackException.from_exception(error)
        authors = [frame for frame in raised.stack if self._is_authors(frame.filename)]
        if isinstance(error, NoHandler):
            return f"its handler cannot be imported: {error}\n"
        why = " ".join(f"{type(error).__name__}: {raised}".split())[:_MOST_TEXT]
        if authors and not isinstance(error, SyntaxError):  # whose text names its place
            why += f" ({self._shown(authors[-1].filename)}, line {authors[-1].lineno})"
        return f"{self.raised(error)}\nits handler cannot be imported: {why}\n"

    def example_failure(self, error: Exception) -> str:
        """The text of the log when an example fails: its sentence, after what the author raised."""
        cause = error.__cause__
        frames = traceback.extract_tb(cause.__traceback__) if cause is not None else ()
        is_authors = any(self._is_authors(frame.filename) for frame in frames)
        before = f"{self.raised(cause)}\n" if cause is not None and is_authors else ""
        return f"{before}{error}\n"

    def raised(self, error: BaseException) -> str:
        """The traceback without the frames of those who called the handler, or wrapped torch."""
        raised = traceback.TracebackException.from_exception(error)
        hidden = (_RUNTIME, *_folders("torch_shim"))
        for link in _chain(raised):
            self._trim(link, hidden, _folders("torch"))
        return "".join(raised.format()).rstrip()

    def _trim(
        self, raised: traceback.TracebackException, hidden: tuple[str, ...], torch: tuple[str, ...]
    ) -> None:
        frames = list(raised.stack)
        first = next((n for n, f in enumerate(frames) if self._is_authors(f.filename)), 0)
        kept = [
            frame
            for number, frame in enumerate(frames)
            if number >= first
            and not frame.filename.startswith((_IMPORTS, *hidden))
            and (number == len(frames) - 1 or not frame.filename.startswith(torch))
        ]
        for frame in kept:
            frame.filename = self._shown(frame.filename)
        raised.stack = traceback.StackSummary.from_list(kept)
        if file := getattr(raised, "filename", None):  # of a SyntaxError
            raised.filename = self._shown(file)

    def _is_authors(self, file: str) -> bool:
        return file.startswith(f"{self.folder}/")

    def _shown(self, file: str) -> str:
        return file.removeprefix(f"{self.folder}/")


def _folders(package: str) -> tuple[str, ...]:
    return tuple(f"{folder}/" for folder in getattr(sys.modules.get(package), "__path__", ()))


def _chain(raised: traceback.TracebackException) -> Iterator[traceback.TracebackException]:
    waiting, seen = [raised], set()
    while waiting:
        error = waiting.pop()
        if id(error) not in seen:
            seen.add(id(error))
            yield error
            others = (error.__cause__, error.__context__, *(error.exceptions or ()))
            waiting += [other for other in others if other is not None]
