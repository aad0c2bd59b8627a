"""Reports measured runs: many calls of one kind in a short time become one report."""

import asyncio
from dataclasses import dataclass
from typing import NamedTuple

from cache_manager.model.ids import ModelId
from scheduler.api import Configuration, NodeReports, RunFinished, SlotId

_FLUSH_S = 0.1


class RunKind(NamedTuple):
    """What runs have in common whose times make one mean; `together` of them ran as one."""

    slot: SlotId
    model: ModelId
    batch: int
    configuration: Configuration | None = None
    together: int = 1


@dataclass(slots=True)
class _Runs:
    number: int = 0
    total_s: float = 0.0
    peak_bytes: int = 0


class RunReports:
    """Reports the means of gathered runs to the scheduler, a moment after the first run."""

    def __init__(self, reports: NodeReports) -> None:
        self._reports = reports
        self._runs: dict[RunKind, _Runs] = {}
        self._timer: asyncio.TimerHandle | None = None

    def ran(self, kind: RunKind, run_s: float, peak_bytes: int) -> None:
        """Add a measured call, or its part of the calls with which it ran as one."""
        runs = self._runs.setdefault(kind, _Runs())
        runs.number += 1
        runs.total_s += run_s
        runs.peak_bytes = max(runs.peak_bytes, peak_bytes)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_FLUSH_S, self.flush)

    def flush(self) -> None:
        """Report all gathered runs now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        gathered, self._runs = self._runs, {}
        for kind, runs in gathered.items():
            mean_s, peak_bytes = runs.total_s / runs.number, runs.peak_bytes or None
            self._reports.report(
                RunFinished(
                    kind.slot,
                    kind.model,
                    kind.batch,
                    mean_s,
                    peak_bytes,
                    kind.configuration,
                    kind.together,
                )
            )
