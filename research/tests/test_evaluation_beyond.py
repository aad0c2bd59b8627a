"""The section beyond the thesis: what it covers, and its tables."""

from dataclasses import replace

import pytest

from research.thesis import beyond as evaluation_beyond
from research.thesis.beyond import Beyond, LoadFamily, LoadGroup
from research.thesis.experiments import PolicyFigures
from scheduler.sim import study
from scheduler.sim.study import Scenario, Traffic

LOADS = (Traffic(working_set=15), Traffic(working_set=25))
BASE, SWIFT = ("lalbo3", "lru"), ("swift", "lru")
SLOW = PolicyFigures(10.0, 9.0, 11.0, 4.0, 20.0, 0.2, 0.5, 0.4, (3.0, 3.0, 3.0, 3.0, 3.0))
FAST = replace(SLOW, avg_latency_s=5.0, p99_s=30.0)


def beyond(**bounds: float) -> Beyond:
    figures = {(load, pair): SLOW for load in LOADS for pair in (BASE, SWIFT)}
    figures[LOADS[0], SWIFT] = FAST
    family = LoadFamily("Some loads", (LoadGroup("both", LOADS),))
    by_load = dict.fromkeys(LOADS, bounds["each"]) if bounds else {}
    return Beyond((family,), (BASE, SWIFT), figures, by_load)


def test_ratios_compare_with_lalbo3_load_by_load() -> None:
    made = beyond()

    assert made.ratios(made.families[0], SWIFT, "avg_latency_s") == [0.5, 1.0]


def test_section_has_average_and_worst_ratio_of_every_pair() -> None:
    text = evaluation_beyond.section(beyond())

    assert "| SWIFT | lru | 0.71 | 1.00 | 1.22 | 1.50 | 0.200 |" in text
    assert "| both | 10.00 | 7.50 |" in text


def test_section_has_a_bound_only_when_one_is_given() -> None:
    assert "bound" not in evaluation_beyond.section(beyond())

    bounded = evaluation_beyond.section(beyond(each=4.0))

    assert "| both | 10.00 | 7.50 | 4.00 |" in bounded
    assert "| LALBO3 | lru | 1.00 | 1.00 | 1.00 | 1.00 | 0.200 | 2.50 | 2.50 |" in bounded


@pytest.mark.parametrize("family", evaluation_beyond.families(), ids=lambda family: family.title)
def test_families_hold_only_loads_that_can_be_run(family: LoadFamily) -> None:
    for load in family.loads:
        study.check(Scenario("lalbo3", load=load))
