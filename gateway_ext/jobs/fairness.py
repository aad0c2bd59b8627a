"""Which lanes the next jobs are taken from, so that no slow one blocks the others; pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace

from gateway_ext.jobs.model import Head, Lane


@dataclass(frozen=True, slots=True)
class Limits:
    """How many jobs run at once, of all lanes and of one."""

    overall: int = 64
    per_lane: int = 16

    @property
    def reserve(self) -> int:
        """Places that only lanes in which nothing runs may take."""
        return self.overall // 4


def choose(
    heads: Sequence[Head], running: Mapping[Lane, int], limits: Limits, now_s: float
) -> list[Lane]:
    """The lanes to take jobs from, one for each job; a lane may be named more than once.

    The next place goes to the lane that has the fewest, among equals to the one whose first job
    has waited longest. A lane may be named more often than it has jobs.
    """
    free = limits.overall - sum(running.values())
    chosen: list[Lane] = []
    waiting = [(running.get(h.lane, 0), h.due_at_s, h.lane) for h in heads if h.due_at_s <= now_s]
    heapify(waiting)
    while waiting and free > 0:
        has, due_at_s, lane = waiting[0]
        if has >= limits.per_lane or (has and free <= limits.reserve):
            heappop(waiting)
            continue
        chosen.append(lane)
        free -= 1
        heapreplace(waiting, (has + 1, due_at_s, lane))
    return chosen
