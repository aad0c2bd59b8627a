"""Where a configuration runs, who is tried again, and when instances are started ahead."""

import pytest

from scheduler.model.values import Configuration
from scheduler.workflows.node_choice import NodeChoice, NodeRoom, RecheckList, dispatch, home
from scheduler.workflows.prewarming import IntervalForecast, warms_another

LARGE, SMALL = Configuration(4, 4, 4), Configuration(1, 1, 1)
WARM, COLD, FULL = NodeRoom(8, 7, True), NodeRoom(8, 7, False), NodeRoom(0, 7, True)


def test_dispatch_takes_the_preferred_node_when_it_has_room_and_an_instance() -> None:
    assert dispatch([LARGE], [WARM, WARM, WARM], 1) == NodeChoice(LARGE, 1)


def test_dispatch_takes_the_next_warm_node_when_the_preferred_one_is_full_or_cold() -> None:
    assert dispatch([LARGE], [WARM, FULL, WARM], 1) == NodeChoice(LARGE, 2)
    assert dispatch([LARGE], [WARM, COLD, FULL], 1) == NodeChoice(LARGE, 0)


def test_dispatch_takes_the_cold_node_with_most_room_when_none_is_warm() -> None:
    rooms = [NodeRoom(8, 4, False), NodeRoom(8, 6, False), NodeRoom(16, 4, False)]

    assert dispatch([LARGE], rooms, 0) == NodeChoice(LARGE, 1)


def test_dispatch_tries_configurations_in_their_order() -> None:
    small = NodeRoom(1, 1, True)

    assert dispatch([LARGE, SMALL], [small], 0) == NodeChoice(SMALL, 0)
    assert dispatch([LARGE], [small], 0) is None


def test_home_is_always_the_same_and_one_of_the_nodes() -> None:
    homes = {home(f"application {number}", "stage", 16) for number in range(100)}

    assert home("a", "b", 16) == home("a", "b", 16)
    assert homes <= set(range(16))
    assert len(homes) > 8


def test_recheck_asks_for_the_least_configuration_after_three_rounds() -> None:
    recheck = RecheckList()
    recheck.enter("queue")

    assert [recheck.try_again("queue") for _ in range(4)] == [False, False, False, True]
    recheck.enter("queue")
    assert recheck.try_again("queue")


def test_recheck_starts_anew_when_a_queue_was_served_in_between() -> None:
    recheck = RecheckList(most_rounds=0)
    recheck.enter("queue")
    recheck.leave("queue")

    assert "queue" not in recheck
    recheck.enter("queue")
    assert "queue" in recheck
    assert recheck.try_again("queue")


def test_forecast_follows_the_intervals_by_its_weight() -> None:
    forecast = IntervalForecast(weight=0.5)
    for at_s in (0.0, 2.0, 6.0):
        forecast.observe(at_s)

    assert forecast.mean_s == pytest.approx(3.0)
    assert forecast.next_s == pytest.approx(9.0)


def test_another_instance_is_started_when_the_next_call_would_find_none_idle() -> None:
    forecast = IntervalForecast()
    assert not warms_another(forecast, 0, 100.0)
    for at_s in (0.0, 1.0):
        forecast.observe(at_s)

    assert warms_another(forecast, 0, 2.5)
    assert not warms_another(forecast, 1, 2.5)
    assert not warms_another(forecast, 0, 1.5)
