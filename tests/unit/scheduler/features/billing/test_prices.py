"""What amounts cost."""

import pytest

from cache_manager.model.ids import ModelId
from scheduler.features.billing.bill import bill, cost
from scheduler.features.billing.charges import (
    CHARGES,
    GPU_TIME,
    HOST,
    IDLE,
    KEPT,
    KEPT_FROM_OTHERS,
)
from scheduler.features.billing.use_buckets import HOUR_S, Period, UseBucket, UseBuckets, UseKey
from scheduler.settings import Billing

GIB_SECOND = (1 << 30) * 1_000_000


def amounts(gpu_s: int, idle_gib_s: int = 0, host_gib_s: int = 0) -> list[int]:
    made = [0] * CHARGES
    made[GPU_TIME] = gpu_s * 1_000_000
    made[IDLE] = idle_gib_s * GIB_SECOND
    made[HOST] = host_gib_s * GIB_SECOND
    return made


def two_functions() -> UseBuckets:
    buckets = UseBuckets()
    bucket = UseBucket()
    bucket.charge(UseKey("team/f", ModelId("team/bert"), "H200"), amounts(10, 4))
    bucket.charge(UseKey("team/g", ModelId("team/bert"), "L4"), amounts(20))
    bucket.charge(UseKey("", ModelId("other/gpt"), ""), amounts(0, 0, 5))
    bucket.count("H200", [3, 1, 7, 2])
    bucket.count("L4", [30, 10, 70, 20])
    buckets.of[Period(HOUR_S, 7200)] = bucket
    return buckets


def test_cost_is_by_second_and_gib_second_and_gpu_type() -> None:
    billing = Billing(gpu_second=0.5, idle_gib_second=0.25, gpu_types={"H200": 2.0})
    assert cost(billing, amounts(10, 4, 100), "H200") == pytest.approx(2 * (5 + 1))
    assert cost(billing, amounts(10, 4, 100), "L4") == pytest.approx(6)


def test_slot_that_was_kept_from_nobody_costs_nothing() -> None:
    kept = amounts(10)
    kept[KEPT], kept[KEPT_FROM_OTHERS] = 6_000_000, 1_000_000
    assert cost(Billing(gpu_second=0.5), kept, "L4") == pytest.approx(0.5 * (10 - 6 + 1))


def test_hour_costs_nothing_when_more_was_kept_than_it_has_gpu_time() -> None:
    kept = amounts(1)
    kept[KEPT] = 6_000_000
    assert cost(Billing(gpu_second=0.5), kept, "L4") == 0.0


def test_bill_adds_up_by_function_namespace_and_model() -> None:
    billing = Billing(gpu_second=1.0, host_gib_second=2.0, currency="EUR")
    found = {
        by: bill(two_functions(), billing, by, 0, 10_000)
        for by in ("function", "namespace", "model")
    }
    names = {by: [row.name for row in shown.rows] for by, shown in found.items()}
    assert names == {
        "function": ["team/g", "team/f", ""],
        "namespace": ["team", "other"],
        "model": ["team/bert", "other/gpt"],
    }
    for shown in found.values():
        assert shown.total.gpu_us == 30_000_000
        assert shown.total.cost == pytest.approx(40)
        assert sum(row.used.cost or 0 for row in shown.rows) == pytest.approx(40)
        assert (shown.gpus.gpu_us, shown.gpus.unused_byte_us) == (33, 22)
        assert (shown.from_unix_s, shown.currency) == (7200, "EUR")


def test_bill_has_no_cost_without_prices() -> None:
    shown = bill(two_functions(), Billing(), "function", 0, 10_000)
    assert [row.used.cost for row in shown.rows] == [None] * 3
    assert shown.total.cost is None


def test_bill_is_empty_when_nothing_was_used_since() -> None:
    shown = bill(two_functions(), Billing(), "function", 20_000, 30_000)
    assert (shown.rows, shown.total.gpu_us, shown.gpus.gpu_us) == ([], 0, 0)
