"""Parameters as a person or a file gives them: accepted if valid, else refused."""

from math import inf, nan
from typing import Any

from scheduler import policies
from scheduler.model.events import PolicySet
from tests.kit.cores.builders import a_core, request
from tests.kit.cores.core_world import World, placements, refused
from tests.kit.outcomes import outcome


def test_whole_number_is_taken_when_it_is_written_as_a_float() -> None:
    world = World(a_core("lb"))
    assert world.send(PolicySet("netgain", {"patience": 8.0})) == []
    assert placements(world.arrive(request("r0"))) == [("r0", "g0")]


def test_limit_holds_when_it_is_written_as_a_float() -> None:
    """Passed over four times under a limit of 25, which falls to 2.0."""
    world = World(a_core("lalbo3", models=("bert", "cold")))
    world.arrive(request("r0"), request("late", "cold"), *(request(f"hit{n}") for n in range(9)))
    for number in range(4):
        assert placements(world.free("g0")) == [(f"hit{number}", "g0")]
    world.send(PolicySet("lalbo3", {"o3_limit": 2.0}))
    assert placements(world.free("g0")) == [("late", "g0")]


REFUSED: tuple[tuple[str, str, Any], ...] = (
    *(("lalbo3", "o3_limit", value) for value in (8.5, nan, inf, "5", True, None, -1.0)),
    *(("togo", "most_batch", value) for value in (0, 8.5, nan, "5", True)),
    *(("fair", "lead_s", value) for value in (-0.1, nan, -inf, "5", False)),
    ("lalbo3", "o3_limit", 10**400),
)


def test_old_policy_continues_when_a_parameter_is_refused() -> None:
    def placed_after(policy: str, parameter: str, value: Any) -> object:
        world = World(a_core("rr"))
        world.arrive(request("r0"))
        actions = world.send(PolicySet(policy, {parameter: value}))
        (reason,) = refused(actions)
        if parameter not in reason or len(actions) != 1:
            return actions
        return placements(world.arrive(request("r1")))

    as_rr_does = [("r1", "queue of g0")]
    wrong = [
        (*case, found) for case in REFUSED if (found := outcome(placed_after, *case)) != as_rr_does
    ]
    assert wrong == []


def test_every_parameter_names_its_purpose() -> None:
    described = {policy: policies.describe(policy) for policy in policies.available()}
    wrong = [
        (policy, description.parameters, description.meanings)
        for policy, description in described.items()
        if description.meanings.keys() != description.parameters.keys()
        or not all(description.meanings.values())
    ]

    assert described
    assert wrong == []
