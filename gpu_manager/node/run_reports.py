"""Reports measured runs: many calls of one kind in a short time become one report.

And what models use of a GPU while they run, which changes rarely.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cache_manager.model.ids import ModelId
from common.latest import Latest
from gpu_manager.devices.gpu_device import GpuDevice
from scheduler.api import (
    METRICS,
    Configuration,
    ModelRegistered,
    ModelSpec,
    NodeReports,
    RunFinished,
    SlotId,
)

_FLUSH_S = 0.1
_MOST_MODELS = 10_000


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
        # What was counted while a model had its GPU to itself is not replaced by what was counted
        # beside others.
        self._alone = Latest[ModelId, bool](_MOST_MODELS)

    def ran(self, kind: RunKind, run_s: float, peak_bytes: int) -> None:
        """Add a measured call, or its part of the calls with which it ran as one."""
        runs = self._runs.setdefault(kind, _Runs())
        runs.number += 1
        runs.total_s += run_s
        runs.peak_bytes = max(runs.peak_bytes, peak_bytes)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_FLUSH_S, self.flush)

    def used(
        self, device: GpuDevice, model: ModelId, metrics: Sequence[float], *, alone: bool
    ) -> None:
        """Report a model's use of its GPU as features of its profile; the GPU knows some better."""
        if len(metrics) != len(METRICS) or (self._alone.get(model, False) and not alone):
            return
        self._alone[model] = alone
        features = dict(zip(METRICS, metrics, strict=True))
        busy, memory = device.utilisation(), device.memory_utilisation()
        if busy is not None:
            features["gpu_utilization"] = busy
        if memory is not None:
            features["memory_utilization"] = memory
        self._reports.report(ModelRegistered(ModelSpec(model, features=features)))

    def flush(self) -> None:
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
