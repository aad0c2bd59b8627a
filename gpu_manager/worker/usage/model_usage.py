"""The 13 metrics of one model, summed up over its runs, and when they are worth a report.

On an emulated GPU the processor's time and the operators' counts stand for what a GPU's counters
say; docs/decisions/0047-neighbours.md has the list. The node replaces what its GPU measures.
"""

import os
import resource
from collections.abc import Sequence
from typing import NamedTuple

from gpu_manager.worker.usage.counted_operators import OperatorCounts

# The first report is due after so many runs, each further one after this many times as many.
_FIRST_RUNS, _TIMES_AS_MANY = 4, 4
# A report is worth sending where some metric has changed by more than this part of it.
_NEWS = 0.2
_LEAST = 1e-9


class RunBegin(NamedTuple):
    """What the process had used before a run: seconds of its own, and of the system for it."""

    user_s: float
    system_s: float


class ModelUsage:
    """Counts the runs of one model, whoever has its turn. A run adds a few numbers."""

    def __init__(self, *, emulated: bool) -> None:
        self._emulated = emulated
        self._runs = 0
        self._due = _FIRST_RUNS
        self._wall_s = self._computed_s = self._user_s = self._system_s = 0.0
        self._in_bytes = self._out_bytes = 0
        self._sums = OperatorCounts()
        self._told: list[float] = []

    @staticmethod
    def begin() -> RunBegin:
        """A run begins; other models of the process count too."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        return RunBegin(used.ru_utime, used.ru_stime)

    def ran(
        self,
        begun: RunBegin,
        counts: OperatorCounts | None,
        times: tuple[float, float],
        moved: tuple[int, int],
    ) -> None:
        """A run computed for some seconds and took some; so much came to it and went from it.

        A run whose operators were not counted is left out.
        """
        if counts is None or not counts.operators:
            return
        ended = self.begin()
        computed_s, wall_s = times
        self._runs += 1
        self._computed_s += computed_s
        self._wall_s += wall_s
        self._user_s += ended.user_s - begun.user_s
        self._system_s += ended.system_s - begun.system_s
        self._in_bytes += moved[0]
        self._out_bytes += moved[1]
        sums = self._sums
        sums.operators += counts.operators
        sums.read_bytes += counts.read_bytes
        sums.written_bytes += counts.written_bytes
        sums.far_bytes += counts.far_bytes
        sums.arithmetic += counts.arithmetic

    def news(self, peak_bytes: int, held_bytes: int) -> list[float]:
        """The metrics, if a report is due and they have changed; else nothing."""
        if self._runs < self._due:
            return []
        self._due *= _TIMES_AS_MANY
        found = self._metrics(peak_bytes, held_bytes)
        if self._told and not _differ(self._told, found):
            return []
        self._told = found
        return found

    def _metrics(self, peak_bytes: int, held_bytes: int) -> list[float]:
        """In the order of their names (`METRICS`)."""
        wall_s, sums = max(self._wall_s, _LEAST), self._sums
        processor_s = self._user_s + self._system_s
        busy = user = 0.0
        arithmetic_s = wall_s
        if self._emulated:
            busy = min(1.0, processor_s / (wall_s * len(os.sched_getaffinity(0))))
            user = self._user_s / max(processor_s, _LEAST)
            arithmetic_s = max(processor_s, _LEAST)
        moved_bytes = sums.read_bytes + sums.written_bytes
        return [
            min(1.0, self._computed_s / wall_s),
            busy,
            user,
            sums.arithmetic / arithmetic_s,
            sums.operators / wall_s,
            float(peak_bytes),
            float(held_bytes),
            sums.far_bytes / max(1, moved_bytes),
            self._out_bytes / wall_s,
            self._in_bytes / wall_s,
            sums.read_bytes / wall_s,
            sums.written_bytes / wall_s,
            wall_s / self._runs,
        ]


def _differ(before: Sequence[float], now: Sequence[float]) -> bool:
    return any(
        abs(new - old) > _NEWS * max(old, _LEAST) for old, new in zip(before, now, strict=True)
    )
