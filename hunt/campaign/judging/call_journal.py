"""Every call that the campaign makes: when it began, how it ended, who called back."""

import json
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from itertools import accumulate
from pathlib import Path
from typing import TextIO


class Kind(StrEnum):
    """What is asked for: each kind takes another way through the system."""

    PLAIN = "plain"
    SYNC = "sync"
    ASYNC = "async"
    STREAM = "stream"


class Ending(StrEnum):
    """How a call ended for its caller."""

    RIGHT = "right"  # the whole right answer; of an async call, that it was accepted
    WRONG = "wrong"  # an answer that says that it is good, and is not
    STATED = "stated"  # an error with a status
    UNREACHABLE = "unreachable"  # nobody took the connection, so nobody took the call
    BROKEN = "broken"  # the connection ended before the answer did
    LATE = "late"  # nothing within the caller's patience


@dataclass(frozen=True, slots=True)
class CallbackSeen:
    """One callback of an async call; `right` says that it carried the right result."""

    at_s: float
    status: int
    right: bool
    said: str


@dataclass(slots=True)
class WatchedCall:
    """One call; without an ending it is under way."""

    id: str
    kind: Kind
    began_s: float
    ended_s: float | None = None
    ending: Ending | None = None
    status: int = 0
    said: str = ""
    callbacks: list[CallbackSeen] = field(default_factory=list)

    @property
    def accepted(self) -> bool:
        """Whether an async call was promised to be made."""
        return self.kind is Kind.ASYNC and self.ending is Ending.RIGHT

    @property
    def served_s(self) -> float | None:
        """When its right result came; None if none has."""
        if self.kind is Kind.ASYNC:
            return min((seen.at_s for seen in self.callbacks if seen.right), default=None)
        return self.ended_s if self.ending is Ending.RIGHT else None

    @property
    def under_way(self) -> bool:
        """Whether something of it is still owed."""
        return self.ending is None or (self.accepted and not self.callbacks)


class CallJournal:
    """The calls of a round; what happens to them is also appended to a file as it happens."""

    def __init__(self, file: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._file = file
        self._clock = clock
        self._lock = threading.Lock()
        self._calls: dict[str, WatchedCall] = {}
        self._past: set[str] = set()
        self._out: TextIO | None = None

    def __enter__(self) -> "CallJournal":
        self._out = self._file.open("a", encoding="utf-8")
        return self

    def __exit__(self, *_: object) -> None:
        assert self._out is not None
        self._out.close()

    def begin(self, kind: Kind, call: str) -> None:
        """It is about to be sent."""
        with self._lock:
            self._calls[call] = WatchedCall(call, kind, self._clock())
            self._note("began", call)

    def end(self, call: str, ending: Ending, status: int = 0, said: str = "") -> None:
        """Its caller has what he gets; AssertionError if he got it before."""
        with self._lock:
            it = self._calls[call]
            assert it.ending is None, f"{it} ended twice for its caller"
            it.ended_s, it.ending, it.status, it.said = self._clock(), ending, status, said[:400]
            self._note("ended", call)

    def call_back(self, call: str, *, status: int, right: bool, said: str) -> bool:
        """A result was delivered; False if nobody made such a call."""
        with self._lock:
            it = self._calls.get(call)
            if it is None:
                return call in self._past  # of an earlier round, and once more: that is allowed
            it.callbacks.append(CallbackSeen(self._clock(), status, right, said[:400]))
            self._note("called back", call)
            return True

    def calls(self) -> list[WatchedCall]:
        """All of them, in the order in which they began."""
        with self._lock:
            return [*self._calls.values()]

    def forget(self) -> None:
        """Begin with the next round; calls of before must have ended."""
        with self._lock:
            self._past |= self._calls.keys()
            self._calls.clear()

    def _note(self, what: str, call: str) -> None:
        if self._out is not None:
            self._out.write(json.dumps({"what": what, **asdict(self._calls[call])}) + "\n")
            self._out.flush()


def most_at_once(calls: Iterable[WatchedCall]) -> int:
    """The most calls that were under way at a time; those without an ending still are."""
    changes = []
    for call in calls:
        changes.append((call.began_s, 1))
        if call.ended_s is not None:
            served_s = max((seen.at_s for seen in call.callbacks), default=call.ended_s)
            changes.append((max(served_s, call.ended_s), -1))
    return max(accumulate(change for _, change in sorted(changes)), default=0)
