"""The timers of a driver, on the real clock over virtual time."""

import asyncio

from scheduler.model.actions import SetTimer
from scheduler.model.events import DeadlinePassed, Event, TimerFired
from scheduler.model.values import RequestId
from scheduler.service.driver import Timers
from tests.kit.virtual_time import until, virtually
from tests.kit.worlds.driver_stage import CountedClock

R0 = RequestId("r0")
DEADLINE = SetTimer(2.0, DeadlinePassed(R0, 2.0))


def some_timers() -> tuple[Timers, CountedClock, list[tuple[float, Event]]]:
    """Timers, their clock, and what they report."""
    loop = asyncio.get_running_loop()
    reported: list[tuple[float, Event]] = []
    clock = CountedClock(loop)
    return Timers(clock, lambda event: reported.append((loop.time(), event))), clock, reported


@virtually
async def test_event_comes_back_once_when_it_is_set_twice_for_one_time() -> None:
    timers, _, reported = some_timers()
    for at_s in (2.0, 1.0, 2.0):
        timers.set(SetTimer(at_s, TimerFired()))
    await until(5.0)
    assert reported == [(1.0, TimerFired()), (2.0, TimerFired())]


@virtually
async def test_event_can_be_set_again_when_it_has_come() -> None:
    timers, _, reported = some_timers()
    timers.set(SetTimer(1.0, TimerFired()))
    await until(2.0)
    timers.set(SetTimer(1.0, TimerFired()))  # a time that has passed: at once
    await until(2.0)
    assert [at_s for at_s, _ in reported] == [1.0, 2.0]


@virtually
async def test_deadline_does_not_come_when_its_request_has_ended() -> None:
    timers, clock, reported = some_timers()
    timers.set(DEADLINE)
    timers.ended(R0)
    assert clock.pending == 0
    await until(5.0)
    assert reported == []


@virtually
async def test_request_ends_without_harm_when_its_deadline_has_come() -> None:
    timers, _, reported = some_timers()
    timers.set(DEADLINE)
    await until(3.0)
    timers.ended(R0)
    assert reported == [(2.0, DEADLINE.event)]


@virtually
async def test_nothing_comes_when_timers_are_closed() -> None:
    timers, clock, reported = some_timers()
    timers.set(DEADLINE)
    timers.set(SetTimer(1.0, TimerFired()))
    timers.close()
    assert clock.pending == 0
    await until(5.0)
    assert reported == []
