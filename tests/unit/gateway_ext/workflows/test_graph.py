"""Graphs of workflows: their cycles, and their order."""

import pytest
from hypothesis import given

from gateway_ext.workflows.graph import BadWorkflow, Workflow
from tests.kit.random_graphs import graphs


@pytest.mark.parametrize(
    ("stages", "edges", "reason"),
    [
        (("a",), (("a", "a"),), "it has the cycle a -> a"),
        (("a", "b", "c"), (("b", "c"), ("c", "b")), "it has the cycle b -> c -> b"),
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


@given(graphs())
def test_order_has_each_stage_after_all_that_it_waits_for(workflow: Workflow) -> None:
    place = {stage: number for number, stage in enumerate(workflow.order)}

    assert sorted(workflow.order) == sorted(workflow.stages)
    assert all(place[start] < place[to] for start, to in workflow.edges)
