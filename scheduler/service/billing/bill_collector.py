"""Collects what the core's meter counted, every few seconds, and has it written."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from logging import Logger

from cache_manager.model.ids import GpuId, ModelId
from common.tasks import BackgroundTasks
from scheduler.core.billing.charges import GPU_TIME, KEPT, STAGES
from scheduler.core.billing.collected import Collected
from scheduler.core.billing.use_buckets import UseBuckets
from scheduler.core.billing.use_meter import UseMeter
from scheduler.model.errors import DatastoreError
from scheduler.service.billing.prices import Billing
from scheduler.service.metrics.counters import SchedulerCounters

# Collecting takes at most this share of a core: a large bill is written less often.
_SHARE = 0.01
# The datastore is given at most so many bytes of bills a second.
_BYTES_A_SECOND = 40_000
_LONGEST_PAUSE_S = 60.0
# A step of the event loop settles so many.
_GPUS_AT_ONCE = 100
# Who asks for the bill gets one that is at most this old.
_FRESH_S = 1.0
_MOST_USERS = 100

WriteBills = Callable[[UseBuckets], Awaitable[int]]


class BillCollector:
    """Moves the meter's counts to the buckets, for one term."""

    def __init__(
        self,
        meter: UseMeter,
        buckets: UseBuckets,
        now_s: Callable[[], float],
        settings: Billing,
        meters: SchedulerCounters,
        log: Logger,
    ) -> None:
        self._meter = meter
        self.buckets = buckets
        self._now_s = now_s
        self.settings = settings
        self._meters = meters
        self._log = log
        self._behind = False
        self._collected_s = -_FRESH_S
        meter.remember(buckets.latest_users(), now_s())

    def collect(self, gpus: Sequence[GpuId] | None = None) -> None:
        """Count up to now what these GPUs were used for (none: the stores; by default all)."""
        rows, spans = self._meter.collect(self._now_s(), gpus)
        self.buckets.add(rows, spans, time.time())
        self._count(rows)
        self._meters.idle_gpu.add((), sum(span.idle_slot_us for span in spans) / 1e6)
        self._meters.unused_memory.add((), sum(span.unused_byte_us for span in spans) / 1e6)

    def users(self, model: ModelId) -> list[str]:
        """The functions that use a model; the first ones, where there are many."""
        return self._meter.users(model)[:_MOST_USERS]

    async def refresh(self) -> None:
        """Count everything up to about now; requests are served meanwhile."""
        if self._now_s() - self._collected_s < _FRESH_S:
            return
        self._collected_s = self._now_s()
        gpus = self._meter.gpus()
        for begin in range(0, len(gpus), _GPUS_AT_ONCE):
            self.collect(gpus[begin : begin + _GPUS_AT_ONCE])
            await asyncio.sleep(0)
        self.collect(())

    @asynccontextmanager
    async def running(self, write: WriteBills) -> AsyncIterator[None]:
        """Collect and write every few seconds, and once more at the end."""
        tasks = BackgroundTasks(self._log, "keeping the bill")
        tasks.start(self._run(write))
        try:
            yield
        finally:
            await tasks.close()
            self.collect()
            await self._write(write)

    async def _run(self, write: WriteBills) -> None:
        pause_s = self.settings.write_s
        while True:
            await asyncio.sleep(pause_s)
            began_s = self._now_s()
            await self.refresh()
            took_s = self._now_s() - began_s
            size_bytes = await self._write(write)
            slower_s = max(took_s / _SHARE, size_bytes / _BYTES_A_SECOND)
            pause_s = max(self.settings.write_s, min(slower_s, _LONGEST_PAUSE_S))

    async def _write(self, write: WriteBills) -> int:
        """Write what has changed; what the datastore does not take now is written later."""
        try:
            size_bytes = await write(self.buckets)
        except DatastoreError as error:
            if not self._behind:
                self._log.warning("the bill is not written: %s", error)
            self._behind = True
            return 0
        self._behind = False
        return size_bytes

    def _count(self, rows: list[Collected]) -> None:
        for row in rows:
            function = (self._meters.functions.of(row.function or "nobody"),)
            for stage, charge in STAGES.items():
                amount = row.amounts[charge]
                if amount:
                    self._meters.billed_bytes.add((*function, stage), amount / 1e6)
            if row.amounts[GPU_TIME]:
                self._meters.billed_gpu.add(function, row.amounts[GPU_TIME] / 1e6)
            used_us = max(0, row.amounts[GPU_TIME] - row.amounts[KEPT])
            if used_us:  # perhaps of time that was collected as kept before
                self._meters.function_gpu.add(function, used_us / 1e6)
            if self.settings.priced:
                cost = self.settings.cost(row.amounts, row.gpu_type)
                self._meters.billed_cost.add(function, cost)
