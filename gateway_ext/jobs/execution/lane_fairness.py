"""Chooses the lanes of the next jobs, so that a slow lane does not block others; pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace

from gateway_ext.jobs.queue.job_values import JobLane, LaneHead


@dataclass(frozen=True, slots=True)
class LaneLimits:
    """How many jobs run at once, over all lanes and in one lane."""

    overall: int = 64
    per_lane: int = 16

    @property
    def reserve(self) -> int:
        """Places reserved for lanes in which nothing runs."""
        return self.overall // 4


def choose(
    heads: Sequence[LaneHead], running: Mapping[JobLane, int], limits: LaneLimits, now_s: float
) -> list[JobLane]:
    """The lanes to claim jobs from, one entry for each job.

    The next place goes to the lane with the fewest running jobs, among equals to the lane whose
    first job has waited longest. A lane may be named more often than it has jobs.
    """
    free = limits.overall - sum(running.values())
    chosen: list[JobLane] = []
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
