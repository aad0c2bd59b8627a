"""Claimable jobs by lane, in the order in which they are due; pure."""

from collections.abc import Callable
from heapq import heappop, heappush
from typing import NamedTuple

from gateway_ext.jobs.queue.job_values import JobKind, JobLane, JobNumber, LaneHead


class LaneCandidate(NamedTuple):
    """A job as it was when it was added; its record may have changed since."""

    due_at_s: float
    number: JobNumber
    subject: str
    seq: int


class LaneHeaps:
    """Candidates by lane; `is_open` tells whether one may still be claimed."""

    def __init__(self, is_open: Callable[[LaneCandidate], bool]) -> None:
        self._is_open = is_open
        self._lanes: dict[JobLane, list[LaneCandidate]] = {}

    def add(self, lane: JobLane, candidate: LaneCandidate) -> None:
        """Add a candidate to a lane."""
        heappush(self._lanes.setdefault(lane, []), candidate)

    def heads(self, kind: JobKind) -> list[LaneHead]:
        """The lanes of a kind with candidates, and when the first of each is due."""
        found = []
        for lane in [one for one in self._lanes if one.kind == kind]:
            first = self._first(lane)
            if first is not None:
                found.append(LaneHead(lane, first.due_at_s))
        return found

    def take(self, lane: JobLane, now_s: float) -> LaneCandidate | None:
        """Remove and return the first candidate of a lane, if it is due."""
        first = self._first(lane)
        if first is None or first.due_at_s > now_s:
            return None
        return heappop(self._lanes[lane])

    def _first(self, lane: JobLane) -> LaneCandidate | None:
        waiting = self._lanes.get(lane)
        while waiting and not self._is_open(waiting[0]):
            heappop(waiting)
        if not waiting:
            self._lanes.pop(lane, None)
            return None
        return waiting[0]
