"""The books of ESG's testbed: every call ends once, no node gives more than it has."""

from collections.abc import Hashable, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest

from research.esg.adaptive_planners import AppFunctionLanes, EsgPlanner
from research.esg.applications import BRANCHING, Application
from research.esg.experiments import (
    ESG,
    FAST,
    HEAVY,
    INFLESS,
    OURS,
    STRICT,
    SYSTEMS,
)
from research.esg.fitted_profiles import LEAST, EsgAssumptions, GpuScaling
from research.esg.lane_plans import LanePlan, LanePlanner, StageCall, WorkflowCall
from research.esg.node_choice import NodeChoice, NodeRoom
from research.esg.printed import LoadLevel, esg_paper
from research.esg.workflow_run import WorkflowRun, calls_of
from scheduler.cluster.view import home
from scheduler.model.values import Configuration

PLAIN = EsgAssumptions(noise=0.0)
PAPER = esg_paper()
CLASSIFY = PAPER.applications[0]
OVERLOAD = LoadLevel("overload", 1.2, (2.0, 3.0))


class Watched:
    """A planner whose every look at the nodes is checked, and whose placements are kept."""

    def __init__(self, planner: LanePlanner) -> None:
        self.planner = planner
        self.choices: list[NodeChoice] = []

    name = "watched"

    @property
    def replans(self) -> bool:
        return self.planner.replans

    def lane(self, call: StageCall) -> Hashable:
        return self.planner.lane(call)

    def arrived(self, call: StageCall, now: float) -> None:
        self.planner.arrived(call, now)

    def urgency(self, waiting: Sequence[StageCall], now: float) -> float:
        return self.planner.urgency(waiting, now)

    def plan(self, waiting: Sequence[StageCall], now: float) -> LanePlan:
        assert len({(call.function, call.stage) for call in waiting}) == 1
        plan = self.planner.plan(waiting, now)
        assert all(option.batch <= len(waiting) for option in plan.options)
        return plan

    def place(
        self, plan: LanePlan, function: str, rooms: Sequence[NodeRoom], preferred: int
    ) -> NodeChoice | None:
        assert len(rooms) == PAPER.nodes
        for room in rooms:
            assert 0 <= room.vcpus <= PAPER.vcpus
            assert 0 <= room.vgpus <= PAPER.vgpus
        choice = self.planner.place(plan, function, rooms, preferred)
        if choice is not None:
            assert rooms[choice.node].fits(choice.configuration)
            self.choices.append(choice)
        return choice


class Always(AppFunctionLanes):
    """Runs what waits first in one configuration, without a search."""

    name = "always"

    def __init__(self, configuration: Configuration = LEAST) -> None:
        self.configuration = configuration

    def plan(self, waiting: Sequence[StageCall], now: float) -> LanePlan:  # noqa: ARG002
        return LanePlan((self.configuration,))


def call(
    application: Application = CLASSIFY, arrived_s: float = 0.0, number: int = 0
) -> WorkflowCall:
    return WorkflowCall(application, number, arrived_s, slo_s=10.0)


def run(planner: LanePlanner, assumed: EsgAssumptions, calls: list[WorkflowCall]) -> WorkflowRun:
    found = WorkflowRun(planner, assumed, seed=1)
    found.run(calls)
    return found


LEVELS = (PAPER.level(STRICT), PAPER.level(HEAVY), OVERLOAD)
# Every system where room is short; at every level, and where a request gains nothing from a second
# vGPU, the two that plan ahead: ESG's search and our rule. The others plan one stage at a time.
RUNS = [
    *((system, OVERLOAD, GpuScaling.DIVIDED) for system in SYSTEMS),
    *((system, level, GpuScaling.PORTIONS) for system in (ESG, OURS) for level in LEVELS),
]


@pytest.mark.parametrize(("system", "level", "scaling"), RUNS)
def test_every_call_ends_once_and_capacity_holds_under_every_system(
    system: str, level: LoadLevel, scaling: GpuScaling
) -> None:
    assumed = EsgAssumptions(scaling=scaling)
    watched = Watched(SYSTEMS[system](assumed))
    calls = calls_of(level, 60, seed=3)

    found = run(watched, assumed, calls)

    assert sorted(each.number for each in found.ended) == list(range(60))
    assert all(list(each.nodes) == list(each.application.stages) for each in found.ended)
    assert all(each.ended_s > each.arrived_s for each in found.ended)
    assert all((node.vcpus, node.vgpus) == (PAPER.vcpus, PAPER.vgpus) for node in found.nodes)
    stages = sum(len(each.application.stages) for each in calls)
    assert sum(choice.configuration.batch for choice in watched.choices) == stages
    assert sum(size * many for size, many in found.tally.batch_sizes.items()) == stages
    assert found.tally.cost == pytest.approx(sum(each.cost for each in found.ended))


def test_overload_leaves_some_lane_without_room() -> None:
    """Or the test above would not see what happens then."""
    found = run(EsgPlanner(PLAIN), PLAIN, calls_of(OVERLOAD, 120, seed=3))

    assert found.tally.least > 0


def test_run_is_the_same_when_repeated() -> None:
    first, again = (
        run(SYSTEMS["cost-to-go"](PLAIN), PLAIN, calls_of(PAPER.level(HEAVY), 50, seed=2))
        for _ in range(2)
    )

    assert [each.ended_s for each in first.ended] == [each.ended_s for each in again.ended]
    assert first.tally == again.tally


def test_call_alone_takes_its_runs_and_its_transfers() -> None:
    found = run(Always(), PLAIN, [call()])

    rows = [PAPER.table3[stage] for stage in CLASSIFY.stages]
    moved_s = sum(PLAIN.transfer_s(row.input_mb, local=True) for row in rows)
    assert found.ended[0].ended_s == pytest.approx(PAPER.alone_s(CLASSIFY) + moved_s)
    assert found.tally.local == found.tally.moved == 2
    at_home = home(CLASSIFY.name, CLASSIFY.stages[0], PAPER.nodes)
    assert found.ended[0].nodes == dict.fromkeys(CLASSIFY.stages, at_home)


def test_call_alone_costs_what_it_holds() -> None:
    found = run(Always(Configuration(1, 2, 4)), PLAIN, [call()])

    hourly = 2 * PAPER.prices.vcpu_hour + 4 * PAPER.prices.vgpu_hour
    assert found.tally.cost == pytest.approx(hourly * found.ended[0].ended_s / 3600.0)


def test_first_call_starts_cold_when_no_instance_is_warm() -> None:
    cold = replace(PLAIN, warm=0)

    found = run(Always(), cold, [call()])

    cold_s = sum(PAPER.table3[stage].cold_ms for stage in CLASSIFY.stages) / 1e3
    assert found.tally.cold == 3
    assert found.ended[0].ended_s > cold_s


def test_next_call_is_warm_when_an_instance_became_idle() -> None:
    found = run(Always(), replace(PLAIN, warm=0), [call(), call(arrived_s=100.0, number=1)])

    assert found.tally.cold == 3
    assert found.ended[1].ended_s < 102.0


def test_instance_is_gone_when_its_keep_alive_time_is_over() -> None:
    late_s = PAPER.keep_alive_s + 100.0

    found = run(Always(), replace(PLAIN, warm=0), [call(), call(arrived_s=late_s, number=1)])

    assert found.tally.cold == 6


def test_instance_is_started_ahead_when_calls_come_faster_than_they_end() -> None:
    calls = [call(arrived_s=at_s, number=place) for place, at_s in enumerate((0.0, 0.02, 0.04))]
    first = CLASSIFY.stages[0]

    found = run(Always(), replace(PLAIN, warm=1), calls)

    warmed = [len(node.instances[first].idle_until_s) - 1 for node in found.nodes]
    assert sum(warmed) == 2  # by the second call and the third, which know an interval
    assert found.tally.cold == 0


def test_batch_waits_for_room_when_every_node_is_full() -> None:
    whole = Configuration(1, PAPER.vcpus, PAPER.vgpus)
    calls = [call(number=number) for number in range(PAPER.nodes + 1)]

    found = run(Watched(Always(whole)), replace(PLAIN, rounds=1000), calls)

    first_s = min(each.ended_s for each in found.ended)
    last_s = max(each.ended_s for each in found.ended)
    assert last_s > first_s
    assert found.tally.batch_sizes == {1: 3 * (PAPER.nodes + 1)}


def test_arrivals_are_drawn_from_the_range_and_from_all_applications() -> None:
    level = PAPER.level(STRICT)

    calls = calls_of(level, 400, seed=1)

    gaps = [b.arrived_s - a.arrived_s for a, b in pairwise(calls)]
    assert min(gaps) >= 0.040
    assert max(gaps) <= 0.0672
    assert {each.application for each in calls} == set(PAPER.applications)
    assert calls[0].slo_s == pytest.approx(0.8 * PAPER.alone_s(calls[0].application))
    assert calls_of(level, 5, seed=2)[0].arrived_s != calls[0].arrived_s


FORK = Application(
    "fork",
    ("deblur", "segmentation", "depth", "classification"),
    (
        *(("deblur", "segmentation"), ("deblur", "depth")),
        *(("segmentation", "classification"), ("depth", "classification")),
    ),
    (("segmentation", 0.5), ("depth", 0.5)),
)


def forked(*unmet: str) -> WorkflowCall:
    return WorkflowCall(FORK, 0, 0.0, slo_s=10.0, unmet=frozenset(unmet))


def stage_s(stage: str, inputs: int = 1) -> float:
    row = PAPER.table3[stage]
    return row.run_ms / 1e3 + inputs * PLAIN.transfer_s(row.input_mb, local=True)


@pytest.mark.parametrize(
    ("unmet", "path"),
    [
        ((), (("deblur", 1), ("depth", 1), ("classification", 2))),
        (("depth",), (("deblur", 1), ("segmentation", 1), ("classification", 1))),
        (("segmentation",), (("deblur", 1), ("depth", 1), ("classification", 1))),
        (("segmentation", "depth"), (("deblur", 1),)),
        (("classification",), (("deblur", 1), ("depth", 1))),
    ],
)
def test_branches_run_at_once_and_join_when_all_that_are_not_skipped_have_ended(
    unmet: tuple[str, ...], path: tuple[tuple[str, int], ...]
) -> None:
    found = run(Always(), PLAIN, [forked(*unmet)])

    (ended,) = found.ended
    assert ended.ended_s == pytest.approx(sum(stage_s(*each) for each in path))
    assert set(ended.nodes) == set(FORK.stages)
    skipped = {stage for stage, node in ended.nodes.items() if node is None}
    both = {"segmentation", "depth"} <= set(unmet)
    assert skipped == ({*unmet, "classification"} if both else set(unmet))
    assert found.tally.batches == len(FORK.stages) - len(skipped)


def test_stage_begins_once_when_it_also_waits_for_one_that_was_skipped() -> None:
    edges = (("deblur", "depth"), ("depth", "segmentation"), ("deblur", "segmentation"))
    shortcut = Application("shortcut", ("deblur", "depth", "segmentation"), edges)

    found = run(Always(), PLAIN, [WorkflowCall(shortcut, 0, 0.0, 10.0, frozenset({"depth"}))])

    (ended,) = found.ended
    assert ended.nodes["depth"] is None
    assert found.tally.batches == 2
    assert ended.ended_s == pytest.approx(stage_s("deblur") + stage_s("segmentation"))


def test_input_from_another_node_than_the_first_takes_longer() -> None:
    class Spread(Always):
        """Never two batches on one node."""

        def place(
            self,
            plan: LanePlan,
            function: str,
            rooms: Sequence[NodeRoom],  # noqa: ARG002  # all have room
            preferred: int,  # noqa: ARG002  # it avoids that one
        ) -> NodeChoice | None:
            return NodeChoice(plan.options[0], list(FORK.stages).index(function))

    found = run(Spread(), PLAIN, [forked()])

    local_s = sum(stage_s(*each) for each in (("deblur", 1), ("depth", 1), ("classification", 2)))
    further_s = sum(
        many * (PLAIN.transfer_s(megabytes, local=False) - PLAIN.transfer_s(megabytes, local=True))
        for many, megabytes in (
            (1, PAPER.table3["depth"].input_mb),
            (2, PAPER.table3["classification"].input_mb),
        )
    )
    assert found.ended[0].ended_s == pytest.approx(local_s + further_s)
    assert (found.tally.moved, found.tally.local) == (4, 0)


@pytest.mark.parametrize("system", [ESG, INFLESS, FAST, OURS])
def test_calls_with_branches_end_once_and_capacity_holds(system: str) -> None:
    watched = Watched(SYSTEMS[system](PLAIN))
    calls = calls_of(OVERLOAD, 60, seed=3, applications=BRANCHING)

    found = run(watched, PLAIN, calls)

    assert sorted(each.number for each in found.ended) == list(range(60))
    assert all(set(each.nodes) == set(each.application.stages) for each in found.ended)
    assert all((node.vcpus, node.vgpus) == (PAPER.vcpus, PAPER.vgpus) for node in found.nodes)
    ran = sum(node is not None for each in calls for node in each.nodes.values())
    assert sum(choice.configuration.batch for choice in watched.choices) == ran
    skipped = {stage for each in calls for stage, node in each.nodes.items() if node is None}
    assert skipped == {"background", "classification"}


def test_conditions_are_drawn_by_the_seed_and_change_nothing_else() -> None:
    always = [replace(each, chances=()) for each in BRANCHING]
    level = PAPER.level(STRICT)

    calls = calls_of(level, 400, seed=1, applications=BRANCHING)

    again = calls_of(level, 400, seed=1, applications=BRANCHING)
    assert [each.unmet for each in again] == [each.unmet for each in calls]
    without = calls_of(level, 400, seed=1, applications=always)
    assert [each.arrived_s for each in without] == [each.arrived_s for each in calls]
    choice = [each for each in calls if each.application.name == "background if needed"]
    met = sum("background" not in each.unmet for each in choice)
    assert 0.4 < met / len(choice) < 0.6
