"""How a workflow's time is divided among groups of its stages."""

from collections.abc import Mapping
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway_ext.workflows.graph import Workflow
from research.esg.slo_distribution import (
    BadProfile,
    SloTooShort,
    average_normalised_lengths,
    chain,
    distribute,
    dominators,
    leads,
    require_slo,
)
from scheduler.model.values import Configuration
from scheduler.policies.weighing import Prices, StageProfile, profile
from tests.kit.random_graphs import graphs

PRICES = Prices(0.034, 0.67)
TWO = (Configuration(1, 1, 1), Configuration(2, 1, 1))

DIAMOND = Workflow("d", ("a", "b", "c", "d"), (("a", "b"), ("a", "c"), ("b", "d"), ("c", "d")))


def stage(*times_s: float) -> StageProfile:
    return profile(dict(zip(TWO, times_s, strict=False)), PRICES)


def profiles(**seconds: float) -> Mapping[str, StageProfile]:
    """Stages that take these times in both configurations."""
    return {name: stage(each, each) for name, each in seconds.items()}


def test_length_of_a_stage_is_its_mean_part_over_all_configurations() -> None:
    found = average_normalised_lengths({"a": stage(1.0, 3.0), "b": stage(3.0, 1.0)})

    assert found == pytest.approx({"a": 0.5, "b": 0.5})


def test_lengths_are_refused_when_no_configuration_is_shared() -> None:
    other = profile({Configuration(9, 9, 9): 1.0}, PRICES)

    with pytest.raises(BadProfile):
        average_normalised_lengths({"a": stage(1.0), "b": other})


def test_chain_is_cut_into_groups_of_three() -> None:
    workflow = chain("five", "abcde")

    found = distribute(workflow, profiles(a=1, b=1, c=2, d=3, e=3))

    assert [each.stages for each in found.groups] == [("a", "b", "c"), ("d", "e")]
    assert [each.share for each in found.groups] == pytest.approx([0.4, 0.6])


def test_branches_get_the_same_share_as_the_longest_of_them() -> None:
    edges = (("a", "b"), ("a", "c"), ("c", "d"), ("b", "e"), ("d", "e"))
    workflow = Workflow("split", tuple("abcde"), edges)

    found = distribute(workflow, profiles(a=2, b=1, c=1, d=3, e=4))

    assert [each.stages for each in found.groups] == [("a",), ("b",), ("c", "d"), ("e",)]
    assert [each.share for each in found.groups] == pytest.approx([0.2, 0.4, 0.4, 0.4])


def test_quota_is_the_whole_rest_when_the_group_is_the_last_one() -> None:
    found = distribute(chain("five", "abcde"), profiles(a=1, b=1, c=2, d=3, e=3))

    assert found.quota("a") == pytest.approx(0.4)
    assert found.quota("c") == pytest.approx(2 / 8)
    assert found.quota("d") == pytest.approx(1.0)
    assert found.ahead("b") == ("b", "c")


def test_deadline_is_refused_with_the_shortest_time_when_it_cannot_be_met() -> None:
    edges = (("a", "b"), ("a", "c"), ("b", "d"), ("c", "d"))
    workflow, known = Workflow("w", tuple("abcd"), edges), profiles(a=1, b=2, c=5, d=1)

    require_slo(workflow, known, 7.01)
    with pytest.raises(SloTooShort) as raised:
        require_slo(workflow, known, 7.0)

    assert raised.value.fastest_s == pytest.approx(7.0)


def test_stages_are_not_grouped_when_neither_leads_to_the_other() -> None:
    edges = (("d", "e"), ("d", "f"), ("e", "f"), ("e", "g"))
    workflow = Workflow("w", tuple("defg"), edges)

    found = distribute(workflow, profiles(d=1, e=1, f=1, g=1))

    assert [each.stages for each in found.groups] == [("d", "e", "g"), ("f",)]


@given(graphs(), st.data())
def test_shares_along_every_path_fill_the_time_at_most_once(
    workflow: Workflow, data: st.DataObject
) -> None:
    seconds = {name: data.draw(st.floats(0.01, 10.0)) for name in workflow.stages}
    size = data.draw(st.integers(1, 4))

    found = distribute(workflow, profiles(**seconds), size)

    assert max(found.rest.values()) <= 1.0 + 1e-9
    assert sorted(name for group in found.groups for name in group.stages) == sorted(seconds)
    assert all(1 <= len(group.stages) <= size for group in found.groups)
    followers = [pair for group in found.groups for pair in pairwise(group.stages)]
    assert all(leads(workflow, *pair) for pair in followers)


def test_path_leads_down_the_edges_alone() -> None:
    assert leads(DIAMOND, "a", "d")
    assert not leads(DIAMOND, "b", "c")
    assert not leads(DIAMOND, "d", "a")


def test_dominators_of_a_join_are_above_its_branches() -> None:
    assert dominators(DIAMOND) == {"a": None, "b": "a", "c": "a", "d": "a"}


def test_dominators_of_a_chain_are_the_stages_before() -> None:
    assert dominators(chain("c", ("a", "b", "c"))) == {"a": None, "b": "a", "c": "b"}


def test_dominator_is_none_when_two_entries_lead_to_a_stage() -> None:
    workflow = Workflow("two", ("a", "b", "c"), (("a", "c"), ("b", "c")))

    assert dominators(workflow)["c"] is None


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
