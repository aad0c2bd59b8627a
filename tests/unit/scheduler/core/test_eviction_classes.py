"""Ways in which evictions of other systems looked alive and were not, one test for each.

g0 has room for two models of 4 GiB; a load takes 2 s and a run 1 s. What a node does of its own is
in `tests/unit/gpu_manager/node/test_stuck_loads.py`.
"""

import pytest

from cache_manager.model.ids import MIB, GpuId, ModelId, Tier
from scheduler import policies
from scheduler.core.core import Core
from scheduler.model.actions import Action, Demote, Finish, Prepare
from scheduler.model.events import (
    GpuSnapshot,
    LiveLease,
    LoadFailed,
    ModelLoaded,
    NodeSnapshot,
    RunFinished,
    SlotFreed,
)
from scheduler.model.values import AfterLoss, CoreSettings, RequestId, RequestOutcome, SlotId
from tests.kit.cores.builders import a_core, gpu, model, request
from tests.kit.cores.core_world import World, ended, placements
from tests.kit.cores.invariants import check_books

G0, SLOT = GpuId("g0"), SlotId("g0")
A, B, C, HUGE = (ModelId(name) for name in ("a", "b", "c", "huge"))
MODELS = tuple(model(name, memory_mb=4096, load_s=2.0) for name in (A, B, C))

every_policy = pytest.mark.parametrize("policy", policies.available())


def a_world(policy: str, *gpus: str, memory_mb: int = 8192, leases: int = 1) -> World:
    """GPUs of which the first one holds a, idle."""
    specs = [gpu(name, memory_mb=memory_mb, leases=leases) for name in gpus or ("g0",)]
    world = World(a_core(policy, gpus=specs, models=MODELS))
    world.arrive(request("first", A))
    world.send(ModelLoaded(G0, A, 2.0, Tier.ABSENT))
    world.free("g0", at=5.0)
    return world


def stuck(core: Core) -> dict[ModelId, float]:
    return core.cluster.gpus[G0].stuck


# -- resident calls beside a stuck load ---------------------------------------------------------


@every_policy
def test_resident_calls_go_on_beside_a_stuck_load(policy: str) -> None:
    world = a_world(policy)
    world.arrive(request("r0", B), at=10.0)
    world.arrive(request("r1", A), at=11.0)
    world.report(G0, stuck={B: 5.0}, at=17.0)
    assert world.lease_of("r1"), "it does not wait for the load"
    world.send(SlotFreed(SLOT, world.lease_of("r1")), 18.0)
    for number in range(2, 12):
        world.arrive(request(f"r{number}", A), at=17.0 + number)
        world.send(SlotFreed(SLOT, world.lease_of(f"r{number}")), 17.5 + number)
    assert not world.ends.get(RequestId("r0")), "it waits for its load"
    check_books(world.core)


@every_policy
def test_request_waits_for_another_gpu_and_not_for_a_stuck_load(policy: str) -> None:
    world = a_world(policy, "g0", "g1")
    while not any(lease.gpu == G0 and B in lease.models for lease in world.leases.values()):
        world.arrive(request(f"r{len(world.sent)}", B), at=10.0)
    world.report(G0, stuck={B: 5.0}, at=17.0)
    for _ in range(4):
        world.arrive(request(f"r{len(world.sent)}", B), at=18.0)
        for lease in [each for each in world.leases.values() if each.gpu != G0]:
            for loaded in lease.models & world.loads.get(lease.gpu, set()):
                world.send(ModelLoaded(lease.gpu, loaded, 2.0, Tier.ABSENT), 19.0)
            world.send(SlotFreed(lease.slot, lease.id), 20.0)
    assert len([lease for lease in world.leases.values() if lease.gpu == G0]) == 1
    check_books(world.core)


@every_policy
def test_load_that_was_stuck_serves_its_request_and_later_ones_when_it_moves_again(
    policy: str,
) -> None:
    world = a_world(policy)
    world.arrive(request("r0", B), at=10.0)
    world.report(G0, stuck={B: 5.0}, at=17.0)
    assert stuck(world.core) == {B: 12.0}
    world.report(G0, at=18.0)
    assert stuck(world.core) == {}
    world.send(ModelLoaded(G0, B, 10.0, Tier.ABSENT), 20.0)
    assert ended(world.send(SlotFreed(SLOT, world.lease_of("r0")), 21.0)) == {
        "r0": RequestOutcome.COMPLETED
    }
    assert placements(world.arrive(request("r1", B), at=22.0))[-1] == ("r1", "g0")
    check_books(world.core)


@pytest.mark.parametrize("how", ["loaded", "failed", "evicted", "gone"])
def test_load_is_stuck_no_more_when_it_has_ended_in_any_way(how: str) -> None:
    world = a_world("lalbo3")
    world.arrive(request("r0", B), at=10.0)
    world.report(G0, stuck={B: 5.0}, at=17.0)
    if how == "loaded":
        world.send(ModelLoaded(G0, B, 9.0, Tier.ABSENT), 19.0)
    elif how == "failed":
        world.send(LoadFailed(G0, B, "killed", AfterLoss.REQUEUE, world.lease_of("r0")), 19.0)
    elif how == "evicted":
        world.core.cluster.evict(world.core.cluster.gpus[G0], B)
    else:
        known = world.core.cluster.gpus[G0]
        leases = (LiveLease(world.lease_of("r0"), SLOT, (B,), (RequestId("r0"),)),)
        found = GpuSnapshot(known.spec, ((A, 4096 * MIB),), leases)
        world.send(NodeSnapshot(known.spec.node, (found,)), 19.0)
    assert stuck(world.core) == {}
    check_books(world.core)


# -- a revived victim ---------------------------------------------------------------------------


@every_policy
def test_neither_livelocks_when_a_pending_loads_victim_is_revived_by_another_call(
    policy: str,
) -> None:
    """a and b have room one at a time; each is asked for while the other is being loaded."""
    world = a_world(policy, memory_mb=4096)
    for number in range(40):
        asked = request(f"r{number}", (B, A)[number % 2])
        world.arrive(asked, at=10.0 + number)
    for _ in range(200):
        if not world.leases:
            break
        (lease,) = world.leases.values()
        for loading in lease.models & world.loads.get(G0, set()):
            world.send(ModelLoaded(G0, loading, 2.0, Tier.ABSENT), world.now + 2.0)
        world.send(SlotFreed(SLOT, lease.id), world.now + 1.0)
    loads = sum(isinstance(each, Prepare) for actions in world.answers for each in actions)
    assert set(map(tuple, world.ends.values())) == {(RequestOutcome.COMPLETED,)}
    assert len(world.ends) == 41
    assert loads <= 41, "no request had its model loaded for it twice"
    check_books(world.core)


@every_policy
def test_victim_that_another_call_uses_again_stays_and_the_load_waits(policy: str) -> None:
    world = a_world(policy, memory_mb=4096, leases=2)
    world.arrive(request("r0", A), at=10.0)
    actions = world.arrive(request("r1", B), at=10.5)
    assert not [each for each in actions if isinstance(each, Prepare | Demote)]
    world.send(SlotFreed(SLOT, world.lease_of("r0")), 12.0)
    assert world.lease_of("r1")


# -- a model that never fits --------------------------------------------------------------------


def evicted(actions: list[Action]) -> list[ModelId]:
    prepared = [each for each in actions if isinstance(each, Prepare)]
    demoted = [each.model for each in actions if isinstance(each, Demote)]
    return [*demoted, *(victim for each in prepared for victim in each.victims)]


@every_policy
def test_model_that_never_fits_is_refused_once_and_evicts_nobody(policy: str) -> None:
    world = World(
        a_core(policy, models=[*MODELS, model(HUGE, memory_mb=9000)], settings=CoreSettings())
    )
    world.arrive(request("first", A), at=1.0)
    for number in range(5):
        actions = world.arrive(request(f"r{number}", HUGE), at=2.0)
        (finish,) = [each for each in actions if isinstance(each, Finish)]
        assert finish.outcome is RequestOutcome.TOO_LARGE
        assert "the largest GPU has" in finish.reason
        assert not evicted(actions)
        assert len(actions) == 1
    assert A in world.core.cluster.gpus[G0].cache.residents


@every_policy
def test_model_that_never_fits_is_not_loaded_again_when_only_its_first_run_shows_that(
    policy: str,
) -> None:
    world = a_world(policy)
    world.arrive(request("r0", B), at=10.0)
    world.send(ModelLoaded(G0, B, 2.0, Tier.ABSENT), 12.0)
    world.send(RunFinished(SLOT, B, 1, 1.0, peak_bytes=9000 * MIB), 13.0)
    world.send(SlotFreed(SLOT, world.lease_of("r0")), 14.0)
    for number in range(1, 6):
        actions = world.arrive(request(f"r{number}", B), at=14.0 + number)
        assert ended(actions) == {f"r{number}": RequestOutcome.TOO_LARGE}
        assert not evicted(actions)
    assert A in world.core.cluster.gpus[G0].cache.residents
    check_books(world.core)
