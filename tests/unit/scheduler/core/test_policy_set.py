"""Policies are swapped live, and nothing is lost; all that exist can be made and set."""

from itertools import permutations

import pytest

from scheduler import policies
from scheduler.model.errors import BadParameter, UnknownPolicy
from scheduler.model.events import PolicySet
from scheduler.model.values import RequestOutcome
from tests.kit.cores.builders import a_core, request
from tests.kit.cores.core_world import World, placements, refused

# Requests that wait in arrival order, in queues of GPUs, and in orders by what placing them gains:
# the change from each of these to each other one moves every kind of order. The random lives of
# the other tests of the core change between all policies.
REPRESENTATIVE = ("lb", "lalbo3", "gain")


def crowded(policy: str) -> World:
    """Two GPUs and ten requests."""
    world = World(a_core(policy, gpus=("g0", "g1"), models=("bert", "gpt")))
    world.arrive(*(request(f"r{number}", ("bert", "gpt")[number % 3 % 2]) for number in range(10)))
    return world


@pytest.mark.parametrize(("before", "policy"), list(permutations(REPRESENTATIVE, 2)))
def test_every_request_is_served_when_the_policy_changes(before: str, policy: str) -> None:
    world = crowded(before)
    world.send(PolicySet(policy))
    while world.leases:
        world.free(min(lease.slot for lease in world.leases.values()))
    assert sorted(world.ends) == sorted(f"r{number}" for number in range(10))
    assert all(outcomes == [RequestOutcome.COMPLETED] for outcomes in world.ends.values())


def test_requests_go_by_arrival_again_when_they_leave_local_queues() -> None:
    world = World(a_core("rr", gpus=("g0", "g1")))
    world.arrive(*(request(f"r{number}") for number in range(6)))
    world.send(PolicySet("lb"))
    order = [placements(world.free("g0"))[0][0] for _ in range(4)]
    assert order == ["r2", "r3", "r4", "r5"]


def test_leases_stay_in_force_when_the_policy_changes() -> None:
    world = crowded("rr")
    in_force = dict(world.leases)
    world.send(PolicySet("lb"))
    assert world.leases == in_force


def test_policy_is_refused_when_it_lacks_the_parameter() -> None:
    reasons = {
        policy: refused(crowded("lb").send(PolicySet(policy, {"nonesuch": 1})))
        for policy in policies.available()
    }
    wrong = {
        policy: found
        for policy, found in reasons.items()
        if len(found) != 1 or "nonesuch" not in found[0]
    }

    assert reasons
    assert wrong == {}


def test_policy_in_force_stays_when_the_new_one_is_unknown() -> None:
    world = crowded("lb")
    (reason,) = refused(world.send(PolicySet("nonesuch")))
    assert all(name in reason for name in policies.available())
    assert placements(world.free("g0")) == [("r2", "g0")]


def test_visits_count_on_when_the_limit_changes() -> None:
    """Twice passed over under a limit of 25: enough for a limit of 2."""
    world = World(a_core("lalbo3", models=("bert", "cold")))
    world.arrive(request("r0"), request("late", "cold"), *(request(f"hit{n}") for n in range(5)))
    world.free("g0")
    world.free("g0")
    world.send(PolicySet("lalbo3", {"o3_limit": 2}))
    assert placements(world.free("g0")) == [("late", "g0")]


def test_policies_describe_themselves_when_they_are_read() -> None:
    assert [name for name in policies.available() if not policies.describe(name).rule] == []


def test_policy_is_unknown_when_no_file_has_its_name() -> None:
    for name in ("nonesuch", "base", "__init__", ""):
        with pytest.raises(UnknownPolicy):
            policies.make(name)
        with pytest.raises(UnknownPolicy):
            policies.takes(name, "o3_limit")


def test_limit_is_refused_when_it_is_negative() -> None:
    with pytest.raises(BadParameter, match="o3_limit"):
        policies.make("lalbo3", {"o3_limit": -1})


def test_policies_name_their_parameters() -> None:
    assert policies.takes("lalbo3", "o3_limit")
    assert not policies.takes("lalb", "o3_limit")
