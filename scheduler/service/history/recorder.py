"""Writes a live run to a file, to be replayed."""

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from scheduler.model.actions import Action
from scheduler.model.errors import BadRecording
from scheduler.model.events import Event
from scheduler.recording import Beginning, beginning_line, step_line

log = logging.getLogger(__name__)


class RunRecorder:
    """Appends terms and events; data that was not flushed is lost with the process.

    It ends, with one error in the log, where the file cannot be written any more: requests are
    served all the same.
    """

    def __init__(self, path: Path) -> None:
        self._broken = False
        try:
            self._file: TextIO = path.open("a", encoding="utf-8")
        except OSError as error:
            raise BadRecording(f"{path}: {error.strerror}") from error

    def begins(self, beginning: Beginning) -> None:
        self._write(beginning_line(beginning))

    def __call__(self, now: float, event: Event, actions: Sequence[Action]) -> None:
        self._write(step_line(now, event, actions))

    def flush(self) -> None:
        self._try(self._file.flush)

    def close(self) -> None:
        self._try(self._file.close)

    def _write(self, line: str) -> None:
        self._try(lambda: self._file.write(line + "\n"))

    def _try(self, work: Callable[[], object]) -> None:
        if self._broken:
            return
        try:
            work()
        except OSError as error:
            self._broken = True
            log.error("the recording %s ends: %s", self._file.name, error)
            with suppress(OSError):  # it cannot write what it still has
                self._file.close()
