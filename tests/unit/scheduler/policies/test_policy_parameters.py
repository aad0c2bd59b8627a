"""Parameters as a person or a file gives them: accepted if valid, else refused."""

from math import inf, nan

import pytest

from scheduler import policies
from scheduler.model.events import PolicySet
from tests.kit.cores.builders import a_core, request
from tests.kit.cores.core_world import World, placements, refused


def test_whole_number_is_taken_when_it_is_written_as_a_float() -> None:
    world = World(a_core("lb"))
    assert world.send(PolicySet("netgain", {"candidates": 8.0})) == []
    assert placements(world.arrive(request("r0"))) == [("r0", "g0")]


def test_limit_holds_when_it_is_written_as_a_float() -> None:
    """Passed over four times under a limit of 25, which falls to 2.0."""
    world = World(a_core("lalbo3", models=("bert", "cold")))
    world.arrive(request("r0"), request("late", "cold"), *(request(f"hit{n}") for n in range(9)))
    for number in range(4):
        assert placements(world.free("g0")) == [(f"hit{number}", "g0")]
    world.send(PolicySet("lalbo3", {"o3_limit": 2.0}))
    assert placements(world.free("g0")) == [("late", "g0")]


@pytest.mark.parametrize(
    ("policy", "parameter", "value"),
    [
        *(("lalbo3", "o3_limit", value) for value in (8.5, nan, inf, "5", True, None, -1.0)),
        *(("netgain", "candidates", value) for value in (0, 8.5, nan, "5", True)),
        *(("netgain", "rivals", value) for value in (-0.1, nan, -inf, "5", False)),
        pytest.param("lalbo3", "o3_limit", 10**400, id="huge"),
    ],
)
def test_old_policy_continues_when_a_parameter_is_refused(
    policy: str, parameter: str, value: float
) -> None:
    world = World(a_core("rr"))
    world.arrive(request("r0"))
    actions = world.send(PolicySet(policy, {parameter: value}))
    (reason,) = refused(actions)
    assert parameter in reason
    assert len(actions) == 1
    assert placements(world.arrive(request("r1"))) == [("r1", "queue of g0")], "as rr does"


@pytest.mark.parametrize("policy", policies.available())
def test_every_parameter_names_its_purpose(policy: str) -> None:
    described = policies.describe(policy)
    assert described.meanings.keys() == described.parameters.keys()
    assert all(described.meanings.values())
