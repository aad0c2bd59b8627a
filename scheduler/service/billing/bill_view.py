"""The answer of /bill: who used what since when, and what it costs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cache_manager.model.ids import ModelId, tenant_of
from scheduler.core.billing.charges import CHARGES, COLUMNS, GPU_TIME, computing_us
from scheduler.core.billing.use_buckets import UseBuckets, UseKey
from scheduler.service.billing.prices import Billing


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
    return tenant_of(_model_of(key)) if not key.function else key.function.partition("/")[0]


def _model_of(key: UseKey) -> ModelId:
    return key.model


def _function_of(key: UseKey) -> str:
    return key.function


# What `by` may be.
GROUPS: Mapping[str, Callable[[UseKey], str]] = {
    "function": _function_of,
    "namespace": namespace_of,
    "model": _model_of,
}


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
            found = sums.setdefault(name, [0] * CHARGES)
            for charge, amount in enumerate(amounts):
                found[charge] += amount
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
    """Amounts by their names."""
    named = dict(zip(COLUMNS, amounts, strict=True))
    return AmountsShown(**named, computing_us=computing_us(amounts), cost=cost)
