"""Graphs of workflows: what is refused, their order, and their dominators."""

import pytest
from hypothesis import given

from scheduler.workflows.dag import MOST_STAGES, Workflow, chain, dominators
from scheduler.workflows.errors import BadWorkflow
from tests.unit.scheduler.workflows.random_graphs import graphs

DIAMOND = Workflow("d", ("a", "b", "c", "d"), (("a", "b"), ("a", "c"), ("b", "d"), ("c", "d")))


@pytest.mark.parametrize(
    ("stages", "edges", "reason"),
    [
        ((), (), "it has no stage"),
        (("a", "a"), (), "the stage a is listed twice"),
        (("a",), (("a", "b"),), "an edge names the unknown stage b"),
        (("a", "b"), (("a", "b"), ("a", "b")), "an edge is listed twice"),
        (("a",), (("a", "a"),), "it has the cycle a -> a"),
        (("a", "b", "c"), (("b", "c"), ("c", "b")), "it has the cycle b -> c -> b"),
        (tuple(map(str, range(MOST_STAGES + 1))), (), f"it has more than {MOST_STAGES} stages"),
    ],
)
def test_workflow_says_what_is_wrong_when_it_cannot_be_run(
    stages: tuple[str, ...], edges: tuple[tuple[str, str], ...], reason: str
) -> None:
    with pytest.raises(BadWorkflow) as raised:
        Workflow("bad", stages, edges)

    assert raised.value.reason == reason


def test_cycle_is_found_when_other_stages_hang_on_it() -> None:
    with pytest.raises(BadWorkflow, match="cycle b -> c -> d -> b"):
        Workflow("bad", ("a", "b", "c", "d"), (("a", "b"), ("b", "c"), ("c", "d"), ("d", "b")))


def test_path_leads_down_the_edges_alone() -> None:
    assert DIAMOND.leads("a", "d")
    assert not DIAMOND.leads("b", "c")
    assert not DIAMOND.leads("d", "a")


def test_dominators_of_a_join_are_above_its_branches() -> None:
    assert dominators(DIAMOND) == {"a": None, "b": "a", "c": "a", "d": "a"}


def test_dominators_of_a_chain_are_the_stages_before() -> None:
    assert dominators(chain("c", ("a", "b", "c"))) == {"a": None, "b": "a", "c": "b"}


def test_dominator_is_none_when_two_entries_lead_to_a_stage() -> None:
    workflow = Workflow("two", ("a", "b", "c"), (("a", "c"), ("b", "c")))

    assert dominators(workflow)["c"] is None
    assert workflow.entries == ("a", "b")


@given(graphs())
def test_order_has_each_stage_after_all_that_it_waits_for(workflow: Workflow) -> None:
    place = {stage: number for number, stage in enumerate(workflow.order)}

    assert sorted(workflow.order) == sorted(workflow.stages)
    assert all(place[start] < place[to] for start, to in workflow.edges)


@given(graphs())
def test_immediate_dominator_is_the_nearest_stage_on_every_path(workflow: Workflow) -> None:
    paths = _paths(workflow)

    for stage, parent in dominators(workflow).items():
        common = set.intersection(*(set(path) for path in paths[stage])) - {stage}
        nearest = max(common, key=workflow.order.index, default=None)
        assert parent == nearest


def _paths(workflow: Workflow) -> dict[str, list[tuple[str, ...]]]:
    """Every path from an entry to each stage."""
    found: dict[str, list[tuple[str, ...]]] = {}
    for stage in workflow.order:
        above = workflow.before(stage)
        found[stage] = [(*path, stage) for each in above for path in found[each]] or [(stage,)]
    return found
