"""Reports measured runs: many calls of one kind in a short time become one report."""

import asyncio
from dataclasses import dataclass

from cache_manager.model.ids import ModelId
from scheduler.api import NodeReports, RunFinished, SlotId

_FLUSH_S = 0.1


@dataclass(slots=True)
class _Runs:
    number: int = 0
    total_s: float = 0.0
    peak_bytes: int = 0


class RunReports:
    """Reports the means of gathered runs to the scheduler, a moment after the first run."""

    def __init__(self, reports: NodeReports) -> None:
        self._reports = reports
        self._runs: dict[tuple[SlotId, ModelId, int], _Runs] = {}
        self._timer: asyncio.TimerHandle | None = None

    def ran(self, slot: SlotId, model: ModelId, batch: int, run_s: float, peak_bytes: int) -> None:
        """Add a measured call."""
        runs = self._runs.setdefault((slot, model, batch), _Runs())
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
        for (slot, model, batch), runs in gathered.items():
            mean_s = runs.total_s / runs.number
            self._reports.report(RunFinished(slot, model, batch, mean_s, runs.peak_bytes or None))
