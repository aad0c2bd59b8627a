"""The leader's bill: counts collected and written, prices, metrics, and the answer of /bill."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import asynccontextmanager
from dataclasses import dataclass
from logging import Logger
from operator import attrgetter
from typing import Annotated, Any, Self

from fastapi import APIRouter, Query
from msgspec import Meta, Struct, json
from pydantic import BeforeValidator

from cache_manager.model.ids import GpuId, ModelId, tenant_of
from common import numerals
from common.numerals import natural
from common.tasks import BackgroundTasks
from common.telemetry.metrics import Metric, MetricKind
from scheduler.features.billing.charges import (
    CHARGES,
    COLUMNS,
    GPU_TIME,
    IN_USE,
    KEPT,
    KEPT_FROM_OTHERS,
    LOADING,
    STAGES,
    computing_us,
)
from scheduler.features.billing.use_buckets import (
    DAY_S,
    HOUR_S,
    Collected,
    Period,
    UseBucket,
    UseBuckets,
    UseKey,
)
from scheduler.features.billing.use_meter import UseMeter
from scheduler.features.hooks import TermFeature, TermParts, UseShown
from scheduler.model.actions import Dispatch
from scheduler.model.errors import (
    BadValue,
    DatastoreError,
    Fenced,
    MalformedRequest,
    StoreUnavailable,
)
from scheduler.settings import Billing
from scheduler.store.datastore import Fence, Store
from scheduler.wire.codec import encoded, read


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


def is_priced(billing: Billing) -> bool:
    return any(_prices(billing))


def cost(billing: Billing, amounts: Sequence[int], gpu_type: str) -> float:
    """What these amounts cost; a slot that was kept from nobody costs nothing."""
    factor = billing.gpu_types.get(gpu_type, 1.0)
    paid = list(amounts)
    free_us = amounts[KEPT] - amounts[KEPT_FROM_OTHERS]
    paid[GPU_TIME] = max(0, paid[GPU_TIME] - free_us)
    return factor * sum(
        price * paid[charge] / _MICROSECONDS / (1 if charge == GPU_TIME else _GIB)
        for charge, price in enumerate(_prices(billing))
    )


def _prices(billing: Billing) -> list[float]:
    """By charge, from GPU time to bytes on the disk; what comes behind them costs nothing."""
    return [
        *(billing.gpu_second, billing.used_gib_second, billing.idle_gib_second),
        *(billing.context_gib_second, billing.host_gib_second, billing.disk_gib_second),
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
            costs[name] = costs.get(name, 0.0) + cost(billing, amounts, key.gpu_type)
        for amounts in bucket.gpus.values():
            gpus = [had + amount for had, amount in zip(gpus, amounts, strict=True)]
    priced = is_priced(billing)
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


def _counter(name: str, help_text: str, *labels: str) -> Metric:
    return Metric(f"gpufaas_scheduler_{name}_total", MetricKind.COUNTER, help_text, labels)


BILLS = "bills/"
_ALL_FAIL = (Fenced, StoreUnavailable)
_KINDS = {"hour": HOUR_S, "day": DAY_S}
_DIGITS = 12  # of seconds since 1970
_NAMES = {length_s: kind for kind, length_s in _KINDS.items()}


async def read_use(store: Store, buckets: UseBuckets, log: Logger) -> None:
    """Read what earlier leaders counted; a bad record is logged and left out."""
    for key, value in (await store.list(BILLS)).values.items():
        try:
            buckets.of[_period(key)] = use_bucket(value)
            await asyncio.sleep(0)  # each may take milliseconds
        except BadValue as error:
            log.warning("ignoring %s in the datastore: %s", key, error)


async def write_use(store: Store, buckets: UseBuckets, fence: Fence) -> int:
    """Write the changed hours and days, and delete those that are gone; returns the bytes.

    What could not be written stays changed. A day and the hours that became part of it are written
    together, so that nothing is counted twice or lost; each other hour by itself, as a datastore
    takes so many bytes at once. What it refuses does not hold up the rest.
    """
    written, tried = 0, set[Period]()
    refused: DatastoreError | None = None
    while batch := _next_batch(buckets, tried):
        tried.update(batch)
        puts = {
            use_key(period): encoded(use_record(buckets.of[period]))
            for period in batch
            if period in buckets.of
        }
        deletes = [use_key(period) for period in batch if period not in buckets.of]
        for period in batch:
            del buckets.changed[period]  # what changes while it is written is written again
        try:
            await store.write(puts, deletes, fence)
        except BaseException as error:
            buckets.changed.update(dict.fromkeys(batch))
            if not isinstance(error, DatastoreError) or isinstance(error, _ALL_FAIL):
                raise
            refused = error
        else:
            written += sum(map(len, puts.values()))
    if refused is not None:
        raise refused
    return written


async def mark_lost(store: Store, buckets: UseBuckets) -> None:
    """Have all that the datastore does not have any more written again."""
    there = (await store.list(BILLS)).values
    buckets.changed.update(
        dict.fromkeys(period for period in buckets.of if use_key(period) not in there)
    )


def _next_batch(buckets: UseBuckets, tried: AbstractSet[Period]) -> Sequence[Period]:
    """What is written at once with the first changed period that was not tried yet."""
    first = min((period for period in buckets.changed if period not in tried), default=None)
    if first is None:
        return ()
    mine = _together(buckets, first)
    return [period for period in buckets.changed if _together(buckets, period) == mine]


def _together(buckets: UseBuckets, period: Period) -> Period:
    """The day, for a day and the hours that became part of it; the hour, for one that is kept."""
    if period.length_s == HOUR_S and period in buckets.of:
        return period
    return Period(DAY_S, period.begin_unix_s // DAY_S * DAY_S)


def use_key(period: Period) -> str:
    return f"{BILLS}{_NAMES[period.length_s]}/{period.begin_unix_s}"


_Whole = Annotated[int, Meta(ge=0)]
_Four = tuple[_Whole, _Whole, _Whole, _Whole]


class UseRecord(Struct, frozen=True):
    """An hour or a day: microseconds, and bytes times microseconds, in whole numbers.

    A row begins with a function, a model and a type of GPU; `parts` has the rest of each row.
    """

    rows: tuple[tuple[str, ModelId, str, _Whole, _Whole, _Whole, _Whole, _Whole, _Whole], ...]
    parts: tuple[_Four, ...]
    gpus: tuple[tuple[str, _Whole, _Whole, _Whole, _Whole], ...]


_RECORDS = json.Decoder(UseRecord)


def use_record(bucket: UseBucket) -> Mapping[str, object]:
    """What a UseRecord is read from."""
    return {
        "rows": [[*key, *amounts[:LOADING]] for key, amounts in bucket.rows.items()],
        "parts": [amounts[LOADING:] for amounts in bucket.rows.values()],
        "gpus": [[gpu_type, *amounts] for gpu_type, amounts in bucket.gpus.items()],
    }


def use_bucket(value: bytes) -> UseBucket:
    record = read(_RECORDS, value)
    if len(record.rows) != len(record.parts):
        raise BadValue(f"{len(record.rows)} rows and {len(record.parts)} parts")
    bucket = UseBucket()
    for (function, model, gpu_type, *amounts), rest in zip(record.rows, record.parts, strict=True):
        bucket.rows[UseKey(function, model, gpu_type)] = [*amounts, *rest]
    for gpu_type, *amounts in record.gpus:
        bucket.gpus[gpu_type] = amounts
    return bucket


def _period(key: str) -> Period:
    kind, _, begin = key.removeprefix(BILLS).partition("/")
    begin_unix_s = natural(begin, _DIGITS)
    if kind not in _KINDS or begin_unix_s is None:
        raise BadValue("neither an hour nor a day")
    return Period(_KINDS[kind], begin_unix_s)


_GPU_SECONDS = _counter(
    "function_gpu_seconds",
    "GPU time of a function: seconds in which its models were loaded or computed, kept ones not",
    "function",
)
BILLED_GPU = _counter(
    "billed_gpu_seconds",
    "Seconds of slots, kept ones too, by the function that pays for them (docs/billing.md)",
    "function",
)
_BILLED_BYTES = _counter(
    "billed_byte_seconds",
    "Bytes held, times seconds, by who pays: used, idle, context (on GPUs), host, disk",
    "function",
    "stage",
)
_BILLED_COST = _counter(
    "billed_cost", "What a function's GPU time and memory cost, by the settings' prices", "function"
)
_IDLE_GPU = _counter("idle_gpu_seconds", "Seconds of slots that nobody pays for")
_UNUSED_MEMORY = _counter(
    "unused_gpu_byte_seconds", "Bytes of GPUs, times seconds, that nobody pays for"
)

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
_LONGEST_GROUP = 100
# The stages of a model whose bytes are a GPU's.
_ON_GPUS = frozenset({"used", "idle", "context"})


class Bill(TermFeature):
    """Moves the meter's counts to the buckets and to the datastore, for one term."""

    counters = (_GPU_SECONDS, BILLED_GPU, _BILLED_BYTES, _BILLED_COST, _IDLE_GPU, _UNUSED_MEMORY)

    def __init__(self, term: TermParts) -> None:
        self.term = term
        self.settings = term.settings.billing
        self._meter = term.core.add(UseMeter(term.core.lifecycle, term.now_s()))
        self.buckets = UseBuckets(keep_days=self.settings.keep_days)
        self._written_under = term.fence()
        self._behind = False
        self._collected_s = -_FRESH_S

    @classmethod
    def add_routes(cls, reads: APIRouter, orders: APIRouter, serving: Callable[[], Self]) -> None:
        del orders  # nobody changes a bill

        @reads.get("/bill", tags=["cluster"], summary="Who used what, and its cost")
        async def show_bill(
            by: Annotated[str, Query(max_length=_LONGEST_GROUP)] = "function",
            last_s: Annotated[float, BeforeValidator(numerals.number), Query(ge=0)] = DAY_S,
        ) -> BillShown:
            own = serving()
            if by not in GROUPS:
                raise MalformedRequest(f"by: one of {', '.join(GROUPS)}")
            await own.refresh()
            now_unix_s = time.time()
            return bill(own.buckets, own.settings, by, now_unix_s - last_s, now_unix_s)

    def collect(self, gpus: Sequence[GpuId] | None = None) -> None:
        """Count up to now what these GPUs were used for (none: the stores; by default all)."""
        rows, spans = self._meter.collect(self.term.now_s(), gpus)
        self.buckets.add(rows, spans, time.time())
        self._count(rows)
        idle_us = sum(span.idle_slot_us for span in spans)
        unused_byte_us = sum(span.unused_byte_us for span in spans)
        self.term.counts[_IDLE_GPU].add((), idle_us / 1e6)
        self.term.counts[_UNUSED_MEMORY].add((), unused_byte_us / 1e6)

    async def refresh(self) -> None:
        """Count everything up to about now; requests are served meanwhile."""
        now_s = self.term.now_s()
        if now_s - self._collected_s < _FRESH_S:
            return
        self._collected_s = now_s
        gpus = self._meter.gpus()
        for begin in range(0, len(gpus), _GPUS_AT_ONCE):
            self.collect(gpus[begin : begin + _GPUS_AT_ONCE])
            await asyncio.sleep(0)
        self.collect(())

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Read the bill; collect and write every few seconds, and once more at the end."""
        await read_use(self.term.store, self.buckets, self.term.log)
        self._meter.remember(self.buckets.latest_users(), self.term.now_s())
        tasks = BackgroundTasks(self.term.log, "keeping the bill")
        tasks.start(self._run())
        try:
            yield
        finally:
            await tasks.close()
            self.collect()
            await self._write()

    async def _run(self) -> None:
        pause_s = self.settings.write_s
        while True:
            await asyncio.sleep(pause_s)
            began_s = self.term.now_s()
            await self.refresh()
            took_s = self.term.now_s() - began_s
            size_bytes = await self._write()
            slower_s = max(took_s / _SHARE, size_bytes / _BYTES_A_SECOND)
            pause_s = max(self.settings.write_s, min(slower_s, _LONGEST_PAUSE_S))

    async def _write(self) -> int:
        """Write what has changed, as long as this scheduler leads; returns the bytes.

        What the datastore does not take now is written later.
        """
        fence, store = self.term.fence(), self.term.store
        if fence is None:
            return 0
        try:
            if fence != self._written_under:  # a new term, or the datastore has lost its data
                await mark_lost(store, self.buckets)
                self._written_under = fence
            size_bytes = await write_use(store, self.buckets, fence)
        except DatastoreError as error:
            if not self._behind:
                self.term.log.warning("the bill is not written: %s", error)
            self._behind = True
            return 0
        self._behind = False
        return size_bytes

    def _count(self, rows: list[Collected]) -> None:
        counts, priced = self.term.counts, is_priced(self.settings)
        for row in rows:
            function = (self.term.functions.of(row.function or "nobody"),)
            for stage, charge in STAGES.items():
                amount = row.amounts[charge]
                if amount:
                    counts[_BILLED_BYTES].add((*function, stage), amount / 1e6)
            if row.amounts[GPU_TIME]:
                counts[BILLED_GPU].add(function, row.amounts[GPU_TIME] / 1e6)
            used_us = max(0, row.amounts[GPU_TIME] - row.amounts[KEPT])
            if used_us:  # perhaps of time that was collected as kept before
                counts[_GPU_SECONDS].add(function, used_us / 1e6)
            if priced:
                counts[_BILLED_COST].add(function, cost(self.settings, row.amounts, row.gpu_type))

    # -- what is shown ----------------------------------------------------------------------------

    def by_function(self) -> Mapping[str, Mapping[str, Any]]:
        return {"gpu_seconds": self.gpu_seconds(), "billed": self._billed()}

    def gpu_seconds(self) -> Mapping[str, float]:
        """The seconds in which each function's models were loaded or computed."""
        used = self.term.counts[_GPU_SECONDS].values
        return {function: round(used_s, 3) for (function,), used_s in used.items()}

    def _billed(self) -> Mapping[str, tuple[float, str | None]]:
        """GiB-seconds of GPU memory; what everything costs, if there are prices."""
        costs = self.term.counts[_BILLED_COST].values
        byte_seconds = {function: 0.0 for (function,) in costs}
        for (function, stage), byte_s in self.term.counts[_BILLED_BYTES].values.items():
            if stage in _ON_GPUS:
                byte_seconds[function] = byte_seconds.get(function, 0.0) + byte_s
        priced, currency = is_priced(self.settings), self.settings.currency
        return {
            function: (
                round(byte_s / _GIB, 1),
                f"{costs.get((function,), 0.0):.4f} {currency}".strip() if priced else None,
            )
            for function, byte_s in byte_seconds.items()
        }

    def users(self, model: ModelId) -> list[str]:
        return self._meter.users(model)[:_MOST_USERS]

    def used(self, uses: Iterable[tuple[Dispatch, float]]) -> UseShown:
        """At the present sizes of its models."""
        gpu_us = byte_us = 0
        paid = 0.0
        cluster = self.term.core.cluster
        profiles = cluster.profiles.known
        for lease, used_s in uses:
            used_us = int(used_s * 1e6)
            size_bytes = sum(
                profiles[model].memory_bytes for model in lease.models if model in profiles
            )
            amounts = [0] * CHARGES
            amounts[GPU_TIME] = used_us * (1 + len(lease.more_slots))
            amounts[IN_USE] = used_us * size_bytes
            gpu_us += amounts[GPU_TIME]
            byte_us += amounts[IN_USE]
            gpu = cluster.gpus.get(lease.gpu)
            paid += cost(self.settings, amounts, "" if gpu is None else gpu.spec.gpu_type)
        return UseShown(gpu_us / 1e6, byte_us / 1e6, paid if is_priced(self.settings) else None)
