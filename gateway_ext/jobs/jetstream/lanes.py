"""Jobs that may be claimed, by lane, in the order in which they are due; pure."""

from collections.abc import Callable
from heapq import heappop, heappush
from typing import NamedTuple

from gateway_ext.jobs.model import Head, JobNumber, Kind, Lane


class Candidate(NamedTuple):
    """A job as it stood when it came in here; it may have changed since."""

    due_at_s: float
    number: JobNumber
    subject: str
    seq: int


class Lanes:
    """Candidates; `is_open` says of one whether it may still be claimed."""

    def __init__(self, is_open: Callable[[Candidate], bool]) -> None:
        self._is_open = is_open
        self._lanes: dict[Lane, list[Candidate]] = {}

    def add(self, lane: Lane, candidate: Candidate) -> None:
        """One more waits there."""
        heappush(self._lanes.setdefault(lane, []), candidate)

    def heads(self, kind: Kind) -> list[Head]:
        """The lanes of a kind in which something waits, and when its first is due."""
        found = []
        for lane in [one for one in self._lanes if one.kind == kind]:
            first = self._first(lane)
            if first is not None:
                found.append(Head(lane, first.due_at_s))
        return found

    def take(self, lane: Lane, now_s: float) -> Candidate | None:
        """The first of a lane, if it is due; it is in here no more."""
        first = self._first(lane)
        if first is None or first.due_at_s > now_s:
            return None
        return heappop(self._lanes[lane])

    def _first(self, lane: Lane) -> Candidate | None:
        waiting = self._lanes.get(lane)
        while waiting and not self._is_open(waiting[0]):
            heappop(waiting)
        if not waiting:
            self._lanes.pop(lane, None)
            return None
        return waiting[0]
