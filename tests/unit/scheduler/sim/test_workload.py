"""Popularity, counts and arrivals of the thesis's workload."""

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.model.errors import BadWorkload
from scheduler.sim.workload import (
    MOST_USED_SHARES,
    Arrivals,
    Pattern,
    apportion,
    popularity,
    spread,
    thesis,
)

UNIFORM = Pattern()
POISSON = Pattern(Arrivals.POISSON)


@pytest.mark.parametrize("size", [1, 3, 5, 15, 35, 500])
def test_popularity_sums_to_one_and_never_rises(size: int) -> None:
    shares = popularity(size)

    assert len(shares) == size
    assert sum(shares) == pytest.approx(1.0)
    assert shares == sorted(shares, reverse=True)


def test_popularity_keeps_the_reported_proportions_of_the_most_used() -> None:
    shares = popularity(35)

    for share, reported in zip(shares, MOST_USED_SHARES, strict=False):
        assert share / shares[0] == pytest.approx(reported / MOST_USED_SHARES[0])


def test_popularity_gives_the_fifteen_most_used_56_percent_of_the_trace() -> None:
    shares = popularity(15)
    trace_percent = MOST_USED_SHARES[0] / shares[0]

    assert trace_percent == pytest.approx(56.0, abs=0.01)


def test_popularity_refuses_an_empty_working_set() -> None:
    with pytest.raises(BadWorkload, match="at least 1 function, not 0"):
        popularity(0)


@given(
    weights=st.lists(st.floats(0.001, 1e6), min_size=1, max_size=40),
    total=st.integers(0, 5000),
)
def test_apportion_sums_to_the_total_and_stays_within_one_of_the_share(
    weights: list[float], total: int
) -> None:
    counts = apportion(weights, total)

    assert sum(counts) == total
    for count, weight in zip(counts, weights, strict=True):
        assert abs(count - total * weight / sum(weights)) < 1 + 1e-6


def test_apportion_gives_the_odd_one_to_the_largest_remainder() -> None:
    assert apportion([10, 7, 3], 10) == [5, 4, 1]
    assert apportion([1, 1, 1], 4) == [2, 1, 1]


def test_apportion_gives_nothing_when_nothing_weighs() -> None:
    assert apportion([0, 0], 10) == [0, 0]


@pytest.mark.parametrize(
    ("pattern", "last_s"),
    [(UNIFORM, 119.0), (Pattern(Arrivals.BUNCHED, 30.0), 89.5), (Pattern(Arrivals.BUNCHED), 60.0)],
)
def test_times_are_spaced_evenly_over_the_pattern_width(pattern: Pattern, last_s: float) -> None:
    times = pattern.times(1, 60, Random(0))

    assert times[0] == 60.0
    assert times[-1] == last_s
    assert times == sorted(times)


def test_times_stay_within_their_minute_when_poisson() -> None:
    times = POISSON.times(3, 1000, Random(0))

    assert times == sorted(times)
    assert 180.0 <= times[0] < times[-1] < 240.0


@pytest.mark.parametrize("bunch_s", [-1.0, 60.5])
def test_pattern_refuses_a_bunch_outside_the_minute(bunch_s: float) -> None:
    with pytest.raises(BadWorkload, match="from 0 to 60 seconds"):
        Pattern(Arrivals.BUNCHED, bunch_s)


def test_thesis_has_the_same_counts_every_minute() -> None:
    workload = thesis(35, 325, 6, UNIFORM, seed=1)
    minutes = [
        Counter(model for at_s, model in workload.arrivals if at_s // 60 == minute)
        for minute in range(6)
    ]

    assert len(workload.arrivals) == 6 * 325
    assert all(minute == minutes[0] for minute in minutes)
    assert minutes[0].most_common(1)[0][0] == "vgg19"


def test_thesis_is_the_same_for_the_same_seed_and_another_for_another() -> None:
    first, again, other = (thesis(15, 100, 2, POISSON, seed=seed) for seed in (7, 7, 8))

    assert first == again
    assert first != other


@pytest.mark.parametrize(("rate", "minutes"), [(0, 6), (325, 0), (-1, 6)])
def test_thesis_refuses_a_rate_or_length_below_one(rate: int, minutes: int) -> None:
    with pytest.raises(BadWorkload, match="must be at least 1"):
        thesis(15, rate, minutes, UNIFORM, seed=1)


def test_spread_asks_for_each_function_as_often_as_counted() -> None:
    workload = spread([[3, 1], [0, 2]], UNIFORM, seed=1)

    assert Counter(model for _, model in workload.arrivals) == {"vgg19": 3, "densenet161": 3}
    assert [at_s for at_s, _ in workload.arrivals] == [0.0, 15.0, 30.0, 45.0, 60.0, 90.0]
