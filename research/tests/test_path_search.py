"""ESG_1Q against looking at every path."""

from collections.abc import Sequence
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from research.esg.path_search import ConfigurationPath, cheapest_paths, path_curve
from scheduler.model.values import Configuration
from scheduler.policies.weighing import Choice, StageProfile

# Multiples of 1/64 add up exactly, so that ties are ties.
QUARTERS = st.integers(1, 40).map(lambda number: number / 64)
STAGES = st.lists(
    st.lists(st.tuples(QUARTERS, QUARTERS), min_size=1, max_size=7).map(
        lambda pairs: StageProfile(
            tuple(
                Choice(time_s, cost, Configuration(1 + number, 1, 1))
                for number, (time_s, cost) in enumerate(pairs)
            )
        )
    ),
    min_size=1,
    max_size=4,
)


def exhaustive(stages: Sequence[StageProfile], target_s: float) -> list[float]:
    """The costs of all paths that take less than the target, ascending."""
    return sorted(
        sum(choice.cost for choice in path)
        for path in product(*(stage.choices for stage in stages))
        if sum(choice.time_s for choice in path) < target_s
    )


@pytest.mark.parametrize("third_blade", [False, True])
@given(stages=STAGES, target=st.integers(0, 200), kept=st.integers(1, 6))
def test_search_finds_the_same_costs_as_looking_at_every_path(
    *, third_blade: bool, stages: list[StageProfile], target: int, kept: int
) -> None:
    found = cheapest_paths(stages, target / 64, kept, third_blade=third_blade)

    assert [path.cost for path in found] == exhaustive(stages, target / 64)[:kept]
    assert len({path.choices for path in found}) == len(found)
    assert all(path.time_s == sum(each.time_s for each in path.choices) for path in found)
    assert all(path.time_s < target / 64 for path in found)


@given(STAGES, st.lists(st.integers(0, 200), min_size=1, max_size=5), st.integers(1, 6))
def test_curve_answers_every_target_as_the_search_does(
    stages: list[StageProfile], targets: list[int], kept: int
) -> None:
    curve = path_curve(stages, kept)

    for target in targets:
        found = curve.cheapest(target / 64)
        assert [path.cost for path in found] == exhaustive(stages, target / 64)[:kept]
        assert all(path.time_s < target / 64 for path in found)


def test_search_finds_nothing_when_the_fastest_takes_as_long_as_the_target() -> None:
    stages = [StageProfile((Choice(1.0, 1.0, Configuration(1, 1, 1)),))] * 2

    assert cheapest_paths(stages, 2.0) == []
    assert path_curve(stages).cheapest(2.0) == ()
    assert len(cheapest_paths(stages, 2.0001)) == 1


def test_curve_knows_the_fastest_path_and_the_cheapest_one() -> None:
    slow = Choice(3.0, 1.0, Configuration(1, 1, 1))
    fast = Choice(1.0, 5.0, Configuration(1, 4, 1))

    found = path_curve([StageProfile((slow, fast))] * 2)

    assert found.fastest == ConfigurationPath(10.0, 2.0, (fast, fast))
    assert found.cheapest_of_all == ConfigurationPath(2.0, 6.0, (slow, slow))
