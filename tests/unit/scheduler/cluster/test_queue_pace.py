"""How fast a queue moves, as its placements show while requests wait."""

import pytest

from scheduler.cluster.request_queue import QueuePace


def paced(*times: float, count: int = 1) -> QueuePace:
    """Placements at these times, others waiting all the while."""
    pace = QueuePace()
    for now in times:
        pace.placed(count, now)
    return pace


def test_nothing_is_expected_before_two_placements() -> None:
    assert paced().wait_s(100) == 0.0
    assert paced(5.0).wait_s(100) == 0.0


def test_wait_is_the_time_between_placements_for_each_request_before() -> None:
    assert paced(1.0, 3.0, 5.0).wait_s(4) == pytest.approx(8.0)
    assert paced(1.0, 3.0, 5.0).wait_s(0) == 0.0


def test_requests_that_are_placed_together_count_each() -> None:
    assert paced(1.0, 3.0, 5.0, count=4).wait_s(4) == pytest.approx(2.0)


def test_slots_that_come_free_together_share_the_time() -> None:
    pace = paced(*(second + 0.0 for second in range(20) for _ in range(4)))
    assert pace.wait_s(4) == pytest.approx(1.0, rel=0.15)


def test_time_without_waiting_requests_is_left_out() -> None:
    pace = paced(1.0, 2.0)
    pace.pause()
    pace.placed(1, 1000.0)
    pace.placed(1, 1001.0)
    assert pace.wait_s(1) == pytest.approx(1.0)


def test_late_placements_outweigh_early_ones() -> None:
    pace = paced(*(second / 10 for second in range(1000)))
    for step in range(1, 4):
        pace.placed(1, 100.0 + 10 * step)
    assert pace.wait_s(1) > 1.0
