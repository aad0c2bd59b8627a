"""Visits are those of a counter on every request, without a counter on any."""

from hypothesis import given
from hypothesis import strategies as st

from scheduler.cluster.request_queue import Visits

_places = st.integers(0, 30)
_limits = st.integers(0, 6)


@given(limit=_limits, boundaries=st.lists(_places, max_size=40))
def test_visits_are_those_of_a_counter_when_the_limit_is_constant(
    limit: int, boundaries: list[int]
) -> None:
    visits = Visits()
    counters = [0] * 31
    for boundary in boundaries:
        visits.skip(boundary, limit)
        for place in range(boundary):
            counters[place] += 1
        for place, counter in enumerate(counters):
            assert visits.reached(place, limit) == (counter >= limit)
            assert visits.count(place) == min(counter, limit)


@given(limits=st.lists(_limits, min_size=1, max_size=5), boundaries=st.lists(_places, max_size=30))
def test_visits_are_those_of_a_counter_when_the_limit_falls(
    limits: list[int], boundaries: list[int]
) -> None:
    visits = Visits()
    counters = [0] * 31
    falling = sorted(limits, reverse=True)
    for number, boundary in enumerate(boundaries):
        limit = falling[number * len(falling) // len(boundaries)]
        visits.skip(boundary, limit)
        if limit:
            counters = [count + (place < boundary) for place, count in enumerate(counters)]
        for place, counter in enumerate(counters):
            assert visits.reached(place, limit) == (counter >= limit)


def test_nothing_was_visited_when_nothing_was_skipped() -> None:
    assert not Visits().reached(0, 1)
    assert Visits().count(0) == 0


def test_everything_is_at_the_limit_when_that_is_zero() -> None:
    assert Visits().reached(0, 0)
