"""What happened in one run, in order: for the digest of the run, and for people."""

import hashlib
import logging
from collections import deque
from collections.abc import Callable

from tests.kit.simulation.simulated_loop import PROGRAM, SimulatedLoop

_LAST = 60


class EventJournal:
    """Notes events with their time; `violations` are what must never be."""

    def __init__(self, loop: SimulatedLoop, show: Callable[[str], None] | None = None) -> None:
        """`show` takes every line as it comes."""
        self.violations: list[str] = []
        self.last: deque[str] = deque(maxlen=_LAST)
        self.count = 0
        self._loop = loop
        self._show = show
        self._digest = hashlib.sha256()

    def note(self, text: str) -> None:
        """An event of the run."""
        line = f"{self._loop.passed_s:10.6f} {text}"
        self.count += 1
        self._digest.update(line.encode() + b"\n")
        self.show(line)

    def show(self, line: str) -> None:
        """For people only."""
        self.last.append(line)
        if self._show is not None:
            self._show(line)

    def violated(self, text: str) -> None:
        """Something that must never be."""
        self.violations.append(f"{self._loop.passed_s:.6f} {text}")
        self.note(f"VIOLATION {text}")

    def digest(self, end: str) -> str:
        """Equal for two runs that did the same; `end` is the state of their chance."""
        self._digest.update(end.encode())
        return self._digest.hexdigest()


class JournalLogs(logging.Handler):
    """Takes what the programs log: a traceback, or worse than an error, is a violation."""

    def __init__(self, journal: EventJournal) -> None:
        super().__init__()
        self._journal = journal

    def emit(self, record: logging.LogRecord) -> None:
        program = PROGRAM.get()
        who = "" if program is None else program.name
        text = f"{who} {record.name}: {record.getMessage()}"
        error = record.exc_info[1] if record.exc_info else None
        if error is not None or record.levelno > logging.ERROR:
            self._journal.violated(f"log of {text}: {error!r}")
        else:
            self._journal.show(f"           [{text}]")
