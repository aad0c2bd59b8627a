"""How long somebody has waited, until now and until some time ago."""

import pytest

from scheduler.core.state.queues.wait_clock import WaitClock


def waited(*waits: tuple[float, float]) -> WaitClock:
    clock = WaitClock()
    for begun_s, ended_s in waits:
        clock.note(1, begun_s)
        clock.note(0, ended_s)
    return clock


@pytest.mark.parametrize(
    ("at_s", "read_s"),
    [(0.0, 0.0), (2.0, 1.0), (4.0, 2.0), (6.0, 3.0), (9.0, 5.0), (11.0, 5.0), (12.5, 5.5)],
)
def test_reading_is_that_of_the_time_when_it_is_past(at_s: float, read_s: float) -> None:
    clock = waited((1.0, 3.0), (5.0, 8.0))
    clock.note(2, 12.0)
    assert clock.read_s(at_s) == read_s


def test_reading_is_the_least_that_it_was_when_it_is_before_what_is_remembered() -> None:
    clock = waited(*((float(number), number + 0.5) for number in range(1000)))
    assert clock.read_s(2000.0) == 500.0
    assert clock.read_s(900.25) <= 450.25
    assert clock.read_s(998.25) == 499.25
