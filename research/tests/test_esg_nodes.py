"""Who is tried again, and when instances are started ahead."""

import pytest

from research.esg.workflow_run import IntervalForecast, RecheckList, warms_another


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
