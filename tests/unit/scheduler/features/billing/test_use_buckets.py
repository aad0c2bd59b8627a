"""Hours become days, days are dropped, and no amount is lost before."""

from cache_manager.model.ids import GpuId, ModelId
from scheduler.features.billing.charges import CHARGES, GPU_TIME, KEPT
from scheduler.features.billing.use_buckets import (
    DAY_S,
    HOUR_S,
    MOST_ROWS,
    OTHERS,
    Collected,
    GpuSpan,
    Period,
    UseBuckets,
)

BEGIN_S = 100 * DAY_S


def row(function: str, gpu_us: int, model: str = "bert") -> Collected:
    amounts = [gpu_us, *[0] * (CHARGES - 1)]
    return Collected(GpuId("g0"), "H200", function, ModelId(model), amounts)


def gpu_time(buckets: UseBuckets) -> int:
    return sum(
        amounts[GPU_TIME] for bucket in buckets.of.values() for amounts in bucket.rows.values()
    )


def test_hours_become_days_when_they_are_old_and_the_sum_stays() -> None:
    buckets = UseBuckets(keep_hours=2, keep_days=30)
    for hour in range(30):
        span = GpuSpan(GpuId("g0"), "H200", 10, 1, 20, 2)
        buckets.add([row("f", hour + 1)], [span], BEGIN_S + hour * HOUR_S)
    assert gpu_time(buckets) == sum(range(1, 31))
    lengths = [period.length_s for period, _ in buckets.since(0)]
    assert lengths == [DAY_S, DAY_S, HOUR_S, HOUR_S, HOUR_S]
    totals = [bucket.gpus["H200"] for bucket in buckets.of.values()]
    assert [sum(column) for column in zip(*totals, strict=True)] == [300, 30, 600, 60]


def test_oldest_day_is_dropped_when_there_are_more_and_its_key_is_deleted() -> None:
    buckets = UseBuckets(keep_hours=1, keep_days=3)
    for day in range(3):
        buckets.add([row("f", 1)], [], BEGIN_S + day * DAY_S)
    buckets.age(BEGIN_S + 4 * DAY_S)
    days = [Period(DAY_S, BEGIN_S + day * DAY_S) for day in range(4)]
    assert sorted(buckets.of) == days[:3]
    buckets.add([row("f", 1)], [], BEGIN_S + 3 * DAY_S)
    buckets.changed.clear()
    buckets.age(BEGIN_S + 5 * DAY_S)
    assert sorted(buckets.of) == days[1:]
    assert days[0] in buckets.changed


def test_kept_time_is_not_below_zero_when_it_was_collected_in_the_hour_before() -> None:
    buckets = UseBuckets()
    for hour, kept_us in ((0, 5), (1, -3), (1, 4)):
        of_f = row("f", 10)
        of_f.amounts[KEPT] = kept_us
        buckets.add([of_f], [], BEGIN_S + hour * HOUR_S)
    sums = [amounts[KEPT] for bucket in buckets.of.values() for amounts in bucket.rows.values()]
    assert sums == [5, 4]


def test_no_day_is_dropped_when_the_clock_is_years_ahead_for_a_moment() -> None:
    buckets = UseBuckets()
    for hour in range(100):
        buckets.add([row("f", 1)], [], BEGIN_S + hour * HOUR_S)
    buckets.add([row("f", 1)], [], BEGIN_S + 4_000 * DAY_S)
    buckets.add([row("f", 1)], [], BEGIN_S + 100 * HOUR_S)
    assert gpu_time(buckets) == 102


def test_further_functions_are_charged_together_when_an_hour_is_full() -> None:
    buckets = UseBuckets()
    rows = [row(f"f{number}", 1) for number in range(MOST_ROWS + 5)]
    buckets.add([*rows, row("x" * 500, 1)], [], BEGIN_S)
    ((_, bucket),) = buckets.since(0)
    assert len(bucket.rows) == MOST_ROWS + 1
    assert gpu_time(buckets) == MOST_ROWS + 6
    others = [amounts for key, amounts in bucket.rows.items() if key.function == OTHERS]
    assert [amounts[GPU_TIME] for amounts in others] == [6]


def test_since_includes_the_period_that_contains_the_time() -> None:
    buckets = UseBuckets()
    for hour in range(3):
        buckets.add([row("f", 1)], [], BEGIN_S + hour * HOUR_S)
    found = [period.begin_unix_s for period, _ in buckets.since(BEGIN_S + HOUR_S + 5)]
    assert found == [BEGIN_S + HOUR_S, BEGIN_S + 2 * HOUR_S]


def test_latest_users_are_those_of_the_latest_period() -> None:
    buckets = UseBuckets()
    buckets.add([row("old", 1)], [], BEGIN_S)
    buckets.add([row("f", 1), row("", 1), row("g", 1)], [], BEGIN_S + HOUR_S)
    assert buckets.latest_users() == {"bert": ["f", "g"]}
