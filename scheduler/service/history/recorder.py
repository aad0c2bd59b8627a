"""Writes a live run to a file, to be replayed."""

from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from scheduler.core.recording import Beginning, beginning_line, step_line
from scheduler.model.actions import Action
from scheduler.model.errors import BadRecording
from scheduler.model.events import Event


class RunRecorder:
    """Appends terms and events; data that was not flushed is lost with the process."""

    def __init__(self, path: Path) -> None:
        try:
            self._file: TextIO = path.open("a", encoding="utf-8")
        except OSError as error:
            raise BadRecording(f"{path}: {error.strerror}") from error

    def begins(self, beginning: Beginning) -> None:
        """A term begins."""
        self._write(beginning_line(beginning))

    def __call__(self, now: float, event: Event, actions: Sequence[Action]) -> None:
        """One event was handled; the observer of a driver."""
        self._write(step_line(now, event, actions))

    def flush(self) -> None:
        """Make everything so far visible to readers of the file."""
        self._file.flush()

    def close(self) -> None:
        """End the recording."""
        self._file.close()

    def _write(self, line: str) -> None:
        self._file.write(line + "\n")
