"""Tenants' invariants hold after every step, with and without turns, whatever happens."""

from random import Random

import pytest
from hypothesis import given

from scheduler import policies
from scheduler.composition import make_core
from scheduler.core.core import Core
from scheduler.features.tenants.tenancy import Tenancy
from tests.kit.cores.checked_lives import check_life
from tests.kit.cores.core_world import World
from tests.kit.cores.life_lengths import life_length
from tests.kit.cores.random_lives import LEAVING, Operation
from tests.kit.cores.tenant_invariants import TenantInvariants
from tests.kit.cores.tenant_lives import (
    TenantChaos,
    random_tenant_operations,
    tenant_operations,
)

each_policy = pytest.mark.parametrize("policy", policies.available())


@pytest.mark.parametrize("policy", ["fair", "netgain", "beside"])
@given(operations=tenant_operations)
def test_owners_keep_their_quotas_when_anything_happens(
    policy: str, operations: list[Operation]
) -> None:
    live_through(make_core(policy, settings=LEAVING), operations)


@each_policy
def test_owners_keep_their_quotas_when_it_runs_long(policy: str) -> None:
    random = Random(f"owners {policy}")
    core = make_core(policy, settings=LEAVING)
    operations = life_length(3000)
    found = live_through(core, random_tenant_operations(random, operations))
    if operations == 3000:  # a short life need not come to either
        assert found.held_back
        assert found.paused
        assert found.over_quota


def test_head_start_is_that_of_the_present_pace_when_a_namespace_has_ended() -> None:
    operations = [
        *(("arrive", 0, 1, 0), ("arrive", 0, 1, 0), ("free", 0, 0, 0), ("silent", 62, 0, 0)),
        *(("arrive", 1, 4, 0), ("arrive", 1, 5, 0), ("drain", 0, 0, 0), ("lose", 0, 1, 0)),
    ]
    live_through(make_core("fair", settings=LEAVING), operations)


@pytest.mark.parametrize("seed", range(3))
def test_the_same_events_give_the_same_actions_when_owners_have_terms(seed: int) -> None:
    world = World(make_core("fair", settings=LEAVING))
    chaos = TenantChaos(world)
    for event in chaos.setup():
        world.send(event)
    for operation in random_tenant_operations(Random(seed), life_length(2000)):
        happened = chaos.event(operation)
        if happened is not None:
            world.send(happened)
    fresh = make_core("fair", settings=LEAVING)
    assert [fresh.handle(event, now) for event, now in world.log] == world.answers


def live_through(core: Core, operations: list[Operation]) -> TenantInvariants:
    """Check every step of a random life, then bring all that is left to its end."""
    world = World(core)
    invariants = TenantInvariants(world)
    check_life(TenantChaos(world), invariants, operations)
    for owner in core.layer(Tenancy).owners.functions.values():
        assert not owner.busy
    return invariants
