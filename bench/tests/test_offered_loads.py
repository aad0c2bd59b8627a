"""Figures of a load that may be refused: rates, shares, and what a refusal costs."""

import math
from array import array

import pytest

from bench.load.load_run import LoadOutcome
from bench.load.statistics import CallTally
from bench.overload.offered_loads import (
    CallKind,
    OfferedAt,
    OfferedLoad,
    arrivals_of,
    figures,
    refusal_cost_s,
)


def a_load(factor: float, answered: float, refused: float = 0.0) -> OfferedLoad:
    return OfferedLoad(
        factor=factor,
        offered=100 * factor,
        answered=answered,
        refused=refused,
        others={},
        p50_s=0.1,
        p95_s=0.2,
        p99_s=0.3,
        last_s=4.0,
        refusal_s=0.01,
        hopeless=0,
        late_s=0.001,
        generator=0.1,
        most_in_flight=10,
    )


def test_figures_are_of_the_answered_calls_and_rates_of_the_whole_time() -> None:
    outcome = LoadOutcome(CallTally(("f", "g")), elapsed_s=2.0, cpu_s=0.5)
    ended = (
        (0, 0.0, 0.1, 200),
        (0, 0.5, 1.5, 200),
        (0, 1.0, 0.001, 429),
        (1, 1.0, 0.003, 503),
        (1, 1.0, 9.0, 504),
    )
    for function, due_s, took_s, status in ended:
        outcome.tally.add(function, due_s, took_s, status, "")
    outcome.late_s = array("d", [0.001, 0.2])

    found = figures(outcome, 1.5, 1.0, most_in_flight=7, hopeless=1)

    assert (found.answered, found.refused, found.others) == (1.0, 1.0, {"504": 1})
    assert found.offered == 5.0
    assert found.p50_s == pytest.approx(0.8)
    assert found.last_s == 2.0
    assert found.refusal_s == pytest.approx(0.003, abs=1e-4)
    assert found.hopeless == 1
    assert found.generator == 0.25
    assert not found.generator_kept_up
    f, g = found.kinds
    assert (f.name, f.offered, f.answered, f.refused, f.longest_s) == ("f", 3, 2, 1, 1.5)
    assert (g.name, g.offered, g.answered, g.refused, g.longest_s) == ("g", 2, 0, 1, 0.0)


def test_kinds_come_by_their_shares_and_steady_ones_at_any_load_alike() -> None:
    kinds = (
        CallKind("most", "/m", share=3.0),
        CallKind("few", "/f"),
        CallKind("s", "/s", steady=0.5),
    )
    how = OfferedAt(seconds=60.0, seed=7)

    once, four = arrivals_of(kinds, 10.0, 1.0, how), arrivals_of(kinds, 10.0, 4.0, how)

    counts = [
        [sum(kind == number for _, kind in found) for number in range(3)] for found in (once, four)
    ]
    assert counts == [[450, 150, 300], [1800, 600, 300]]
    assert once == sorted(once) == arrivals_of(kinds, 10.0, 1.0, how)
    assert once != arrivals_of(kinds, 10.0, 1.0, OfferedAt(60.0, 8))


def test_refusals_cost_what_answers_do_not_explain() -> None:
    loads = [a_load(0.5, 50), a_load(1, 100), a_load(3, 100, refused=200)]

    answer_s, refusal_s = refusal_cost_s(loads, [0.05, 0.1, 0.12])

    assert answer_s == pytest.approx(0.001)
    assert refusal_s == pytest.approx(0.0001)
    assert all(math.isnan(cost_s) for cost_s in refusal_cost_s(loads[:2], [0.05, 0.1]))
