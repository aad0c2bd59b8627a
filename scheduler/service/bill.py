"""The leader's bill: counts collected and written, prices, and the answer of /bill."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from logging import Logger
from operator import attrgetter

from cache_manager.model.ids import GpuId, ModelId, tenant_of
from common.tasks import BackgroundTasks
from scheduler.features.billing.charges import (
    CHARGES,
    COLUMNS,
    GPU_TIME,
    KEPT,
    KEPT_FROM_OTHERS,
    STAGES,
    computing_us,
)
from scheduler.features.billing.use_buckets import Collected, UseBuckets, UseKey
from scheduler.features.billing.use_meter import UseMeter
from scheduler.model.errors import DatastoreError
from scheduler.service.metrics import declared
from scheduler.service.metrics.counting import SchedulerCounters


@dataclass(frozen=True, slots=True)
class AmountsShown:
    """Microseconds of slots, and bytes times microseconds: whole numbers, whose sums are exact.

    The time of slots is that of computing, loading and keeping; `kept_from_others_us` is a part of
    the last, and waiting takes no slot.
    """

    gpu_us: int
    computing_us: int
    loading_us: int
    kept_us: int
    kept_from_others_us: int
    waiting_us: int
    used_byte_us: int
    idle_byte_us: int
    context_byte_us: int
    host_byte_us: int
    disk_byte_us: int
    cost: float | None


@dataclass(frozen=True, slots=True)
class BillRow:
    """What one function, namespace or model used; an empty function is nobody."""

    name: str
    used: AmountsShown


@dataclass(frozen=True, slots=True)
class GpusShown:
    """What there was of all GPUs, and what nobody used of it: idle slots, unused memory."""

    gpu_us: int
    idle_gpu_us: int
    byte_us: int
    unused_byte_us: int


@dataclass(frozen=True, slots=True)
class BillShown:
    """A bill; `rows` and what the GPUs did not use add up to what there was."""

    by: str
    from_unix_s: int
    to_unix_s: float
    currency: str
    rows: list[BillRow]
    total: AmountsShown
    gpus: GpusShown


def namespace_of(key: UseKey) -> str:
    """The namespace that pays: the function's, or the model's where no function is known."""
    return tenant_of(key.model) if not key.function else key.function.partition("/")[0]


# What `by` may be.
GROUPS: Mapping[str, Callable[[UseKey], str]] = {
    "function": attrgetter("function"),
    "namespace": namespace_of,
    "model": attrgetter("model"),
}


_GIB = 1 << 30
_MICROSECONDS = 1e6


@dataclass(frozen=True, slots=True)
class Billing:
    """How the bill is kept, and the prices, in `currency`; without prices no cost is shown.

    Hours are kept for two days, then their days for `keep_days`. What was counted is written
    every `write_s`; a crash loses what was counted since. Prices are for one second of a slot (not
    while it was kept and nobody waited), and
    for one GiB for one second: in GPU memory `used` by a lease or `idle`, an empty process's
    (`context`), in a node's memory (`host`) or on its `disk`. `gpu_types` has factors for the
    prices of GPUs of these types.
    """

    write_s: float = 5.0
    keep_days: float = 90.0
    currency: str = ""
    gpu_second: float = 0.0
    used_gib_second: float = 0.0
    idle_gib_second: float = 0.0
    context_gib_second: float = 0.0
    host_gib_second: float = 0.0
    disk_gib_second: float = 0.0
    gpu_types: Mapping[str, float] = field(default_factory=dict)

    @property
    def priced(self) -> bool:
        return any(self._prices())

    def cost(self, amounts: Sequence[int], gpu_type: str) -> float:
        """What these amounts cost; a slot that was kept from nobody costs nothing."""
        factor = self.gpu_types.get(gpu_type, 1.0)
        paid = list(amounts)
        free_us = amounts[KEPT] - amounts[KEPT_FROM_OTHERS]
        paid[GPU_TIME] = max(0, paid[GPU_TIME] - free_us)
        return factor * sum(
            price * paid[charge] / _MICROSECONDS / (1 if charge == GPU_TIME else _GIB)
            for charge, price in enumerate(self._prices())
        )

    def _prices(self) -> list[float]:
        """By charge, from GPU time to bytes on the disk; what comes behind them costs nothing."""
        return [
            *(self.gpu_second, self.used_gib_second, self.idle_gib_second),
            *(self.context_gib_second, self.host_gib_second, self.disk_gib_second),
        ]


def bill(
    buckets: UseBuckets, billing: Billing, by: str, since_unix_s: float, now_unix_s: float
) -> BillShown:
    """The bill of all hours and days that end after `since_unix_s`."""
    group = GROUPS[by]
    sums: dict[str, list[int]] = {}
    costs: dict[str, float] = {}
    gpus = [0, 0, 0, 0]
    begin_unix_s = int(now_unix_s)
    for period, bucket in buckets.since(since_unix_s):
        begin_unix_s = min(begin_unix_s, period.begin_unix_s)
        for key, amounts in bucket.rows.items():
            name = group(key)
            charges = sums.setdefault(name, [0] * CHARGES)
            for charge, amount in enumerate(amounts):
                charges[charge] += amount
            costs[name] = costs.get(name, 0.0) + billing.cost(amounts, key.gpu_type)
        for amounts in bucket.gpus.values():
            gpus = [had + amount for had, amount in zip(gpus, amounts, strict=True)]
    priced = billing.priced
    rows = [
        BillRow(name, shown(sums[name], costs[name] if priced else None))
        for name in sorted(sums, key=lambda name: (-sums[name][GPU_TIME], name))
    ]
    totals = [sum(column) for column in zip(*sums.values(), strict=True)] or [0] * CHARGES
    total = shown(totals, sum(costs.values()) if priced else None)
    return BillShown(by, begin_unix_s, now_unix_s, billing.currency, rows, total, GpusShown(*gpus))


def shown(amounts: list[int], cost: float | None) -> AmountsShown:
    named = dict(zip(COLUMNS, amounts, strict=True))
    return AmountsShown(**named, computing_us=computing_us(amounts), cost=cost)


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
        idle_us = sum(span.idle_slot_us for span in spans)
        unused_byte_us = sum(span.unused_byte_us for span in spans)
        self._meters.values[declared.IDLE_GPU].add((), idle_us / 1e6)
        self._meters.values[declared.UNUSED_MEMORY].add((), unused_byte_us / 1e6)

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
        counts = self._meters.values
        for row in rows:
            function = (self._meters.functions.of(row.function or "nobody"),)
            for stage, charge in STAGES.items():
                amount = row.amounts[charge]
                if amount:
                    counts[declared.BILLED_BYTES].add((*function, stage), amount / 1e6)
            if row.amounts[GPU_TIME]:
                counts[declared.BILLED_GPU].add(function, row.amounts[GPU_TIME] / 1e6)
            used_us = max(0, row.amounts[GPU_TIME] - row.amounts[KEPT])
            if used_us:  # perhaps of time that was collected as kept before
                counts[declared.FUNCTION_GPU].add(function, used_us / 1e6)
            if self.settings.priced:
                cost = self.settings.cost(row.amounts, row.gpu_type)
                counts[declared.BILLED_COST].add(function, cost)
