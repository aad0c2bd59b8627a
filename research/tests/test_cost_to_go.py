"""Our rule: what it weighs, when it waits, and what is worth more than its price."""

from collections.abc import Mapping
from math import inf

import pytest

from research.esg.cost_to_go import (
    SCARCITY,
    BatchChoices,
    CostToGo,
    WaitingCall,
    batch_choices,
    cost_to_go,
    decide,
    scarcity_prices,
)
from scheduler.model.values import Configuration
from scheduler.policies.weighing import Prices, StageProfile, profile

PRICES = Prices(vcpu_hour=0.0, vgpu_hour=3600.0)  # a second of a vGPU costs 1
LAST = cost_to_go([])
ONE, FAST, FOUR = Configuration(1, 1, 1), Configuration(1, 1, 4), Configuration(4, 1, 1)
TIMES_S = {ONE: 1.0, FAST: 0.5, FOUR: 2.0}


def stage(times_s: Mapping[Configuration, float] = TIMES_S) -> StageProfile:
    return profile(times_s, PRICES)


def choices() -> BatchChoices:
    return batch_choices(stage())


def first(*waiting: WaitingCall, interval_s: float | None = None) -> Configuration | None:
    decision = decide(choices(), waiting, interval_s)
    return None if decision.waits else decision.options[0].configuration


def test_cost_to_go_is_the_least_cost_within_the_time_left() -> None:
    found = cost_to_go([stage(), stage()])

    assert found.within(1.0) == inf
    assert found.within(1.1) == pytest.approx(4.0)  # twice FAST
    assert found.within(2.1) == pytest.approx(2.0)  # twice ONE
    assert found.least == pytest.approx(1.0)  # twice FOUR
    assert LAST.within(0.1) == 0.0


def test_cheapest_batch_is_chosen_when_all_have_time() -> None:
    assert first(*[WaitingCall(10.0, LAST)] * 4) == FOUR


def test_smaller_batch_is_chosen_when_the_large_one_makes_a_member_late() -> None:
    calls = [WaitingCall(1.5, LAST), *[WaitingCall(10.0, LAST)] * 3]

    assert first(*calls) == ONE


def test_more_is_paid_when_only_the_fastest_is_in_time() -> None:
    assert first(WaitingCall(0.7, LAST)) == FAST


def test_time_is_kept_for_later_stages() -> None:
    ahead = cost_to_go([stage({ONE: 1.0})])

    assert first(WaitingCall(1.8, ahead)) == FAST
    assert first(WaitingCall(2.1, ahead)) == ONE


def test_fastest_is_chosen_when_every_choice_is_late() -> None:
    assert first(WaitingCall(0.4, LAST)) == FAST


def test_local_node_comes_first_when_inputs_take_time_elsewhere() -> None:
    decision = decide(choices(), [WaitingCall(10.0, LAST, 0.0, 0.5)], None)

    assert decision.options[0].is_local
    costs = [(each.configuration, each.is_local) for each in decision.options]
    assert costs.index((ONE, True)) < costs.index((ONE, False))


def test_other_node_is_avoided_when_the_transfer_makes_the_call_late() -> None:
    options = decide(choices(), [WaitingCall(1.2, LAST, 0.0, 0.5)], None).options

    assert [(each.configuration, each.is_local) for each in options[:2]] == [
        (ONE, True),
        (FAST, True),
    ]


def test_it_waits_when_more_calls_come_soon_and_there_is_time() -> None:
    assert first(WaitingCall(10.0, LAST), interval_s=0.1) is None


@pytest.mark.parametrize(("left_s", "interval_s"), [(2.1, 0.1), (10.0, 4.0)])
def test_it_does_not_wait_when_the_batch_would_be_late(left_s: float, interval_s: float) -> None:
    assert first(WaitingCall(left_s, LAST), interval_s=interval_s) == ONE


def test_it_never_waits_when_no_interval_is_given() -> None:
    assert first(WaitingCall(100.0, LAST)) == ONE


def test_scarce_resource_counts_more_the_more_of_it_is_used() -> None:
    worth = [scarcity_prices(Prices(1.0, 1.0), used, 0.0).vcpu_hour for used in (0.0, 0.9, 1.0)]

    assert worth == sorted(set(worth))
    assert worth[0] == 1.0
    assert worth[-1] == SCARCITY[0][1]
    assert scarcity_prices(Prices(1.0, 1.0), 1.0, 0.0).vgpu_hour == 1.0


def test_calls_with_different_futures_are_weighed_apart() -> None:
    """Two calls: the one with much ahead is late after the slow batch, the other is not."""
    both = {Configuration(2, 1, 1): 1.0, Configuration(2, 1, 2): 0.6, ONE: 1.3}
    ahead = CostToGo((0.5,), (1.0,))
    calls = [WaitingCall(10.0, LAST), WaitingCall(1.3, ahead)]

    decision = decide(batch_choices(stage(both)), calls, None)

    assert decision.options[0].configuration == Configuration(2, 1, 2)
