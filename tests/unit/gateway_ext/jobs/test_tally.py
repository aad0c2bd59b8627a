"""The counts and limits of a queue."""

from contextlib import ExitStack

import pytest

from gateway_ext.errors import Busy
from gateway_ext.jobs.queue import JobTally, QueueLimits
from gateway_ext.jobs.values import JobKind
from gateway_ext.model import FunctionId
from tests.kit.worlds.job_world import ECHO

OTHER = FunctionId("team", "other")


def keep(tally: JobTally, number: int, function: FunctionId = ECHO, size: int = 1) -> None:
    tally.add(number, function, JobKind.CALL, size, float(number))


def test_call_that_became_a_callback_is_counted_as_one() -> None:
    tally = JobTally(QueueLimits())
    keep(tally, 1, size=10)
    tally.add(1, ECHO, JobKind.CALLBACK, 30, 1.0)
    assert (tally.calls, tally.callbacks, tally.alive_bytes) == ({}, 1, 30)
    tally.remove(1)
    tally.remove(1)
    assert (tally.callbacks, tally.alive_bytes) == (0, 0)


def test_buried_job_is_not_alive_and_a_replayed_one_is_not_dead() -> None:
    tally = JobTally(QueueLimits())
    keep(tally, 1, size=10)
    for _ in range(2):
        tally.add_dead(1, 10, 5.0)
    assert (tally.calls, tally.dead, tally.dead_bytes) == ({}, 1, 10)
    tally.remove_dead(1)
    keep(tally, 1, size=10)
    assert (tally.calls, tally.dead, tally.dead_bytes) == ({ECHO: 1}, 0, 0)


def test_room_counts_those_that_are_being_kept() -> None:
    tally = JobTally(QueueLimits(waiting_per_function=2))
    keep(tally, 1)
    with tally.reserve(ECHO, 1):
        with pytest.raises(Busy), tally.reserve(ECHO, 1):
            pytest.fail("there was room")
        with tally.reserve(OTHER, 1):
            pass
    with tally.reserve(ECHO, 1):
        pass


def test_room_ends_for_all_functions_together() -> None:
    tally = JobTally(QueueLimits(waiting=2))
    keep(tally, 1)
    keep(tally, 2, OTHER)
    with pytest.raises(Busy), tally.reserve(FunctionId("team", "third"), 1):
        pytest.fail("there was room")


@pytest.mark.parametrize(("function", "granted"), [(ECHO, 5), (OTHER, 10)])
def test_room_counts_the_bytes_of_those_that_come(function: FunctionId, granted: int) -> None:
    tally = JobTally(QueueLimits(waiting_bytes=1_000))
    with ExitStack() as coming:
        for _ in range(5):
            coming.enter_context(tally.reserve(ECHO, 100))
        for _ in range(granted - 5):
            coming.enter_context(tally.reserve(function, 100))
        with pytest.raises(Busy):
            coming.enter_context(tally.reserve(function, 1))
    with tally.reserve(ECHO, 500):
        pass


def test_room_grows_with_what_comes_and_is_given_back() -> None:
    tally = JobTally(QueueLimits(waiting_bytes=1_000))
    with tally.reserve(ECHO, 100) as grow_to:
        for size_bytes in (50, 300, 300):
            grow_to(size_bytes)
        with pytest.raises(Busy), tally.reserve(ECHO, 201):
            pytest.fail("there was room")
        with tally.reserve(ECHO, 200), pytest.raises(Busy):
            grow_to(301)
    with tally.reserve(ECHO, 500):
        pass


def test_store_that_is_smaller_than_the_limits_bounds_them() -> None:
    tally = JobTally(QueueLimits(waiting_bytes=1_000, dead_bytes=1_000))
    tally.limit_to(-1)
    tally.limit_to(400)
    with tally.reserve(ECHO, 100):
        pass
    with pytest.raises(Busy), tally.reserve(ECHO, 101):  # one function has half of half
        pytest.fail("there was room")
    tally.add_dead(1, 101, 1.0)
    assert tally.expired(2.0) == [1]


def test_oldest_is_known_after_many_came_and_went() -> None:
    tally = JobTally(QueueLimits())
    keep(tally, 0)
    for number in range(1, 10_000):
        keep(tally, number)
        tally.remove(number)
    keep(tally, 10_000)
    assert tally.oldest_queued_at_s == 0.0
    tally.remove(0)
    assert tally.oldest_queued_at_s == 10_000.0
    tally.remove(10_000)
    assert tally.oldest_queued_at_s is None
