"""The core's invariants hold after every step, under every policy and eviction rule there is."""

from random import Random

import pytest
from hypothesis import given

from cache_manager import eviction
from scheduler import policies
from scheduler.composition import compose, make_core
from scheduler.core.core import Core
from tests.kit.cores.checked_lives import check_life
from tests.kit.cores.core_world import World
from tests.kit.cores.invariants import Invariants
from tests.kit.cores.life_lengths import life_length
from tests.kit.cores.random_lives import (
    LEAVING,
    Chaos,
    Operation,
    operations,
    random_operations,
)
from tests.kit.cores.wide_policy import WidePolicy

pytestmark = pytest.mark.group("invariants", seconds=40)

each_policy = pytest.mark.parametrize("policy", policies.available())


@each_policy
@given(operations=operations)
def test_core_keeps_its_invariants_when_anything_happens(
    policy: str, operations: list[Operation]
) -> None:
    live_through(make_core(policy, "lru", settings=LEAVING), operations)


@each_policy
@pytest.mark.parametrize("rule", eviction.available())
def test_core_keeps_its_invariants_when_it_runs_long(policy: str, rule: str) -> None:
    random = Random(f"{policy} {rule}")
    core = make_core(policy, rule, settings=LEAVING)
    live_through(core, random_operations(random, life_length(3000)))


@given(operations=operations)
def test_core_keeps_its_invariants_when_leases_take_several_slots(
    operations: list[Operation],
) -> None:
    core = compose(WidePolicy(), eviction.make("lru"), LEAVING, policy_name="wide")
    live_through(core, [each for each in operations if each[0] != "policy"])


@pytest.mark.parametrize("seed", range(3))
def test_core_keeps_its_invariants_when_wide_leases_run_long(seed: int) -> None:
    core = compose(WidePolicy(), eviction.make("lru"), LEAVING, policy_name="wide")
    lived = random_operations(Random(f"wide {seed}"), life_length(3000))
    live_through(core, [each for each in lived if each[0] != "policy"])


def live_through(core: Core, operations: list[Operation]) -> None:
    """Check every step of a random life, then bring all that is left to its end."""
    world = World(core)
    check_life(Chaos(world), Invariants(world), operations)
