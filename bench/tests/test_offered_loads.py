"""Figures of a load that may be refused: rates, shares, and what a refusal costs."""

import math
from array import array

import pytest

from bench.gateway.overload.offered_loads import (
    OfferedLoad,
    figures,
    least_goodput,
    refusal_cost_s,
)
from gpufaas.load.load_run import LoadOutcome
from gpufaas.load.statistics import CallTally


def a_load(factor: float, answered: float, refused: float = 0.0) -> OfferedLoad:
    return OfferedLoad(
        factor, 100 * factor, answered, refused, {}, 0.1, 0.2, 0.3, 4.0, 0.001, 0.1, 10
    )


def test_figures_are_of_the_answered_calls_and_rates_of_the_whole_time() -> None:
    outcome = LoadOutcome(CallTally(("f",)), elapsed_s=2.0, cpu_s=0.5)
    for due_s, took_s, status in ((0.0, 0.1, 200), (0.5, 1.5, 200), (1.0, 0.001, 429), (1, 9, 504)):
        outcome.tally.add(0, due_s, took_s, status, "")
    outcome.late_s = array("d", [0.001, 0.2])

    found = figures(outcome, 1.5, 2.0, most_in_flight=7)

    assert (found.answered, found.refused, found.others) == (1.0, 0.5, {"504": 1})
    assert found.p50_s == pytest.approx(0.8)
    assert found.last_s == 2.0
    assert found.generator == 0.25
    assert not found.generator_kept_up


def test_goodput_counts_from_the_capacity_on_against_the_highest() -> None:
    loads = [a_load(0.5, 50), a_load(1, 100), a_load(2, 95), a_load(3, 80)]

    assert least_goodput(loads) == 0.8
    assert least_goodput([]) == 0.0


def test_refusals_cost_what_answers_do_not_explain() -> None:
    loads = [a_load(0.5, 50), a_load(1, 100), a_load(3, 100, refused=200)]

    answer_s, refusal_s = refusal_cost_s(loads, [0.05, 0.1, 0.12])

    assert answer_s == pytest.approx(0.001)
    assert refusal_s == pytest.approx(0.0001)
    assert all(math.isnan(cost_s) for cost_s in refusal_cost_s(loads[:2], [0.05, 0.1]))
