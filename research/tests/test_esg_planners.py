"""How each scheduler of ESG's comparison chooses: configurations, nodes, and when."""

from collections.abc import Sequence
from dataclasses import replace
from math import sqrt

import pytest

from research.esg.adaptive_planners import (
    EsgPlanner,
    EsgReading,
    FastGSharePlanner,
    InflessPlanner,
    distribution,
    largest_batch,
    mean_time_shares,
)
from research.esg.applications import BRANCHING, Application
from research.esg.cost_to_go_planner import CostToGoPlanner
from research.esg.fitted_profiles import (
    BATCHES,
    LEAST,
    EsgAssumptions,
    GpuScaling,
    fitted_profiles,
    seconds_of,
)
from research.esg.lane_plans import StageCall, WorkflowCall
from research.esg.node_choice import NodeRoom
from research.esg.path_search import path_curve
from research.esg.preplanned import AquatopePlanner, OrionPlanner, best_first, learned
from research.esg.printed import esg_paper
from research.esg.search_costs import brute_force, search_study
from scheduler.model.values import Configuration

PAPER = esg_paper()
BOTH = [EsgAssumptions(scaling=scaling) for scaling in GpuScaling]
CHOSEN = BOTH[0]
CLASSIFY, *_, EXPANDED = PAPER.applications
EMPTY = NodeRoom(PAPER.vcpus, PAPER.vgpus, True)


def waiting(
    many: int = 1, slo: float = 1.0, application: Application = CLASSIFY, stage: int = 0
) -> list[StageCall]:
    slo_s = slo * PAPER.alone_s(application)
    return [
        StageCall(WorkflowCall(application, number, 0.0, slo_s), stage) for number in range(many)
    ]


def times_of(stages: Sequence[str], plan: Sequence[Configuration]) -> list[float]:
    profiles = fitted_profiles(CHOSEN)
    return [seconds_of(profiles[each])[one] for each, one in zip(stages, plan, strict=True)]


@pytest.mark.parametrize("assumed", BOTH)
def test_profiles_go_through_table_3(assumed: EsgAssumptions) -> None:
    for name, profile in fitted_profiles(assumed).items():
        assert len(profile.choices) == 256
        assert seconds_of(profile)[LEAST] == pytest.approx(PAPER.table3[name].run_ms / 1e3)


def test_one_call_gains_from_a_second_vgpu_only_where_work_divides() -> None:
    portions, divided = (seconds_of(fitted_profiles(each)["deblur"]) for each in BOTH)
    two = Configuration(1, 1, 2)

    assert portions[two] == portions[LEAST]
    assert divided[two] < divided[LEAST]


@pytest.mark.parametrize("assumed", BOTH)
def test_every_deadline_can_be_met_alone(assumed: EsgAssumptions) -> None:
    profiles = fitted_profiles(assumed)
    for application in PAPER.applications:
        fastest = path_curve([profiles[stage] for stage in application.stages], 1).fastest
        assert fastest.time_s < 0.8 * PAPER.alone_s(application)


def test_largest_batch_is_the_largest_option_that_the_calls_fill() -> None:
    assert [largest_batch(many) for many in (1, 5, 16, 99)] == [1, 4, 16, BATCHES[-1]]


def test_expanded_application_is_cut_into_two_groups() -> None:
    groups = distribution(EXPANDED, CHOSEN).groups

    assert [len(each.stages) for each in groups] == [3, 2]
    assert sum(each.share for each in groups) == pytest.approx(1.0)


def test_esg_spends_more_when_less_time_is_left() -> None:
    planner, profile = EsgPlanner(CHOSEN), fitted_profiles(CHOSEN)[CLASSIFY.stages[-1]]
    calls = waiting(stage=2)

    early, late = (planner.plan(calls, now).options[0] for now in (0.0, calls[0].due_s - 0.13))

    cost = {each.configuration: each.cost for each in profile.choices}
    assert cost[late] > cost[early]
    assert seconds_of(profile)[late] < seconds_of(profile)[early]


def test_esg_takes_the_fastest_when_no_path_is_in_time_and_else_the_cheapest() -> None:
    calls = waiting()
    fastest = fitted_profiles(CHOSEN)[CLASSIFY.stages[0]].choices[0].configuration

    plans = [
        EsgPlanner(CHOSEN, EsgReading(cheapest_when_late=cheapest)).plan(calls, calls[0].due_s)
        for cheapest in (False, True)
    ]

    assert plans[0].options == (fastest,)
    assert plans[1].options != (fastest,)


def test_esg_without_sharing_takes_whole_gpus() -> None:
    plan = EsgPlanner(CHOSEN, EsgReading(whole_gpus=True)).plan(waiting(4), 0.0)

    assert {each.vgpus for each in plan.options} == {PAPER.vgpus}


def test_infless_takes_all_that_is_left_of_a_node() -> None:
    planner = InflessPlanner(CHOSEN)
    plan = planner.plan(waiting(slo=2.0), 0.0)
    left = NodeRoom(3, 2, True)

    choice = planner.place(plan, CLASSIFY.stages[0], [EMPTY, left], 0)

    assert choice is not None
    assert choice.node == 1
    assert choice.configuration == Configuration(1, 3, 2)


def test_fast_gshare_takes_the_node_with_the_fewest_free_vgpus() -> None:
    planner = FastGSharePlanner(CHOSEN)
    plan = planner.plan(waiting(), 0.0)

    rooms = [EMPTY, NodeRoom(16, 2, True), NodeRoom(16, 1, False), NodeRoom(0, 1, True)]
    choice = planner.place(plan, CLASSIFY.stages[0], rooms, 0)

    assert choice is not None
    assert choice.node == 1
    assert choice.configuration.vgpus == 1


def test_shares_by_mean_service_time_sum_up_to_one() -> None:
    shares = mean_time_shares(CLASSIFY, CHOSEN)

    assert sum(shares) == pytest.approx(1.0)
    assert shares[1] / shares[0] == pytest.approx(293 / 86)


@pytest.mark.parametrize("slo", [0.8, 1.0, 1.2])
def test_orion_plans_to_end_in_time_at_the_95th_percentile(slo: float) -> None:
    slo_s = slo * PAPER.alone_s(CLASSIFY)

    found = best_first(CLASSIFY.stages, slo_s, CHOSEN, 100.0)

    times = times_of(CLASSIFY.stages, found.configurations)
    p95_s = sum(times) + 1.645 * CHOSEN.noise * sqrt(sum(each**2 for each in times))
    assert 0.95 * slo_s < p95_s <= slo_s
    assert found.search_s <= 0.1


def test_orion_answers_with_the_nearest_state_when_it_is_cut_off() -> None:
    slo_s = 0.8 * PAPER.alone_s(CLASSIFY)

    found = best_first(CLASSIFY.stages, slo_s, CHOSEN, 0.05)

    assert found.configurations == (LEAST,) * 3
    assert found.search_s == pytest.approx(1 / CHOSEN.states_a_ms / 1e3)


def test_orion_by_cost_ends_at_its_first_state_when_the_deadline_is_relaxed() -> None:
    for application in PAPER.applications:
        slo_s = 1.2 * PAPER.alone_s(application)

        found = best_first(application.stages, slo_s, CHOSEN, 100.0, by_cost=True)

        assert set(found.configurations) == {LEAST}


def test_orion_thinks_before_the_first_stage_alone() -> None:
    planner = OrionPlanner(CHOSEN)

    assert planner.plan(waiting(), 0.0).search_s > 0.0
    assert planner.plan(waiting(stage=1), 0.0).search_s == 0.0
    assert OrionPlanner(CHOSEN, counts_search=False).plan(waiting(), 0.0).search_s == 0.0


def test_preplanned_configuration_is_missed_when_fewer_calls_wait_than_its_batch() -> None:
    planner = AquatopePlanner(CHOSEN)
    slo_s = 1.2 * PAPER.alone_s(CLASSIFY)
    planned = learned(CLASSIFY.stages, slo_s, CHOSEN)
    stage = max(range(3), key=lambda place: planned[place].batch)
    assert planned[stage].batch > 1

    few, enough = (
        planner.plan(waiting(many, 1.2, stage=stage), 0.0) for many in (1, planned[stage].batch)
    )

    assert few.missed
    assert few.options == (planned[stage]._replace(batch=1),)
    assert enough.missed is False
    assert enough.options == (planned[stage],)


def test_aquatope_learns_a_plan_in_time_and_near_the_cheapest() -> None:
    slo_s = PAPER.alone_s(CLASSIFY)
    exact = replace(CHOSEN, noise=0.0)

    plan = learned(CLASSIFY.stages, slo_s, exact)

    profiles = fitted_profiles(exact)
    costs = [
        {each.configuration: each.cost for each in profiles[stage].choices}[one]
        for stage, one in zip(CLASSIFY.stages, plan, strict=True)
    ]
    (best,) = brute_force([profiles[stage] for stage in CLASSIFY.stages[:1]], 9.0, 1)
    assert sum(times_of(CLASSIFY.stages, plan)) <= slo_s
    assert sum(costs) > best.cost
    assert sum(costs) < sum(
        each.choices[0].cost for each in map(profiles.get, CLASSIFY.stages) if each
    )


def test_our_rule_keeps_a_late_call_cheap_and_an_urgent_one_fast() -> None:
    planner = CostToGoPlanner(CHOSEN)
    times = seconds_of(fitted_profiles(CHOSEN)[CLASSIFY.stages[2]])
    calls = waiting(stage=2)
    planner.arrived(calls[0], 0.0)

    late = planner.plan(calls, calls[0].due_s + 0.01).options[0]
    urgent = planner.plan(calls, calls[0].due_s - 0.12).options[0]

    assert times[urgent] < times[late]


def test_our_rule_saves_vcpus_when_they_are_scarce() -> None:
    planner = CostToGoPlanner(CHOSEN)
    calls = waiting(slo=1.2)
    planner.arrived(calls[0], 0.0)
    before = planner.plan(calls, 0.0)

    full = [NodeRoom(0, PAPER.vgpus, True)] * PAPER.nodes
    assert planner.place(before, CLASSIFY.stages[0], full, 0) is None
    after = planner.plan(calls, 0.0)

    assert after.options[0].vcpus < before.options[0].vcpus


def test_searches_of_the_study_cost_the_same_as_brute_force() -> None:
    study = search_study(CHOSEN, many=8)

    assert study.gap < 1e-12
    assert set(study.by_level) == {level.name for level in PAPER.levels}
    assert all(list(each.times_ms) == sorted(each.times_ms) for each in study.by_level.values())


@pytest.mark.parametrize("application", BRANCHING, ids=lambda each: each.name)
def test_shares_along_every_path_are_at_most_the_whole_by_the_dominator_tree(
    application: Application,
) -> None:
    """Those of stages in a row sum up to the whole over all branches together."""
    by_tree = distribution(application, CHOSEN)
    in_a_row = distribution(application, CHOSEN, in_a_row=True)

    whole = sum(by_tree.shares[each] for each in application.heaviest_path(by_tree.shares))
    assert whole == pytest.approx(1.0)
    longest = sum(in_a_row.shares[each] for each in application.heaviest_path(in_a_row.shares))
    assert longest < 0.95
    assert sum(in_a_row.shares.values()) == pytest.approx(1.0)
    assert all(by_tree.shares[each] > in_a_row.shares[each] for each in application.stages)


def test_branch_gets_more_time_by_the_dominator_tree_than_in_a_row() -> None:
    report = BRANCHING[0]
    calls = waiting(application=report, stage=report.stages.index("segmentation"))
    in_a_row = EsgReading(in_a_row=True)

    chosen, rushed = (
        EsgPlanner(CHOSEN, reading).plan(calls, 0.3).options[0] for reading in (None, in_a_row)
    )

    times = seconds_of(fitted_profiles(CHOSEN)["segmentation"])
    assert times[chosen] > times[rushed]
    assert PAPER.prices.cost(chosen, times[chosen]) < PAPER.prices.cost(rushed, times[rushed])


def test_longest_path_counts_for_means_and_for_what_is_ahead() -> None:
    report = BRANCHING[0]
    first, segmentation, depth, last = mean_time_shares(report, CHOSEN)

    assert first + depth + last == pytest.approx(1.0)
    assert segmentation < depth
    assert PAPER.alone_s(report) == pytest.approx((86 + 828 + 147) / 1e3)
