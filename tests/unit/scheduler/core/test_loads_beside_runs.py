"""A GPU copies and computes at the same time, where the policy orders a load beside runs.

g0 has room for two models of 4 GiB; a load takes 2 s and a run 1 s.
"""

from msgspec.structs import replace

from cache_manager.model.ids import GpuId, ModelId, NodeId, Tier
from scheduler.core.core import Core
from scheduler.model.actions import Dispatch, EndLease, Finish, Prepare, Recall
from scheduler.model.events import (
    EvictAsked,
    GpuDraining,
    GpuJoined,
    GpuLost,
    GpuSnapshot,
    LiveLease,
    LoadFailed,
    ModelLoaded,
    NodeSnapshot,
    PolicySet,
    RequestCancelled,
    SlotFreed,
)
from scheduler.model.values import (
    AfterLoss,
    CoreSettings,
    LeaseId,
    RequestId,
    RequestOutcome,
    SlotId,
    StandingTerms,
)
from tests.kit.cores.builders import GIB, a_core, gpu, model, request
from tests.kit.cores.core_world import World, ended, only, placements

G0, SLOT = GpuId("g0"), SlotId("g0")
A, B, C = ModelId("a"), ModelId("b"), ModelId("c")
MODELS = tuple(model(name, memory_mb=4096, load_s=2.0, run_s=1.0) for name in (A, B, C))


def a_world(*gpus: str, policy: str = "beside", settings: CoreSettings | None = None) -> World:
    """A core whose first GPU holds a, idle."""
    world = World(a_core(policy, gpus=gpus or ("g0",), models=MODELS, settings=settings))
    world.arrive(request("first", A))
    loaded(world, A)
    world.free("g0")
    return world


def loaded(world: World, which: ModelId, at: float | None = None) -> list[tuple[str, str]]:
    """The model is there; what was placed then."""
    return placements(world.send(ModelLoaded(G0, which, 2.0, Tier.ABSENT), at))


def free_s(core: Core) -> float:
    return core.cluster.slots[SLOT].free_s


# -- two resources ------------------------------------------------------------------------------


def test_hit_runs_when_another_model_is_loaded_on_the_same_gpu() -> None:
    world = a_world()
    prepare = only(Prepare, world.arrive(request("r0", B), at=10.0))
    assert (prepare.beside, [load.model for load in prepare.loads]) == (True, [B])
    assert placements(world.arrive(request("r1", A))) == [("r1", "g0")]


def test_load_begins_when_the_same_gpu_runs_another_model() -> None:
    world = a_world()
    world.arrive(request("r0", A), at=10.0)
    found = world.arrive(request("r1", B))
    assert only(Prepare, found).beside
    assert only(Dispatch, found).estimate == (2.0, 1.0)


def test_slot_takes_no_hit_when_a_loaded_request_has_joined_its_compute() -> None:
    world = a_world()
    world.arrive(request("r0", B), request("r1", A), at=10.0)
    assert free_s(world.core) == 11.0
    assert loaded(world, B, at=10.5) == []
    assert free_s(world.core) == 12.0, "r1 until 11, and r0 after it"
    assert placements(world.arrive(request("r2", A))) == []
    assert placements(world.send(SlotFreed(SLOT, world.lease_of("r1")), 11.0)) == []
    assert placements(world.send(SlotFreed(SLOT, world.lease_of("r0")), 12.0)) == [("r2", "g0")]


def test_requests_for_an_arriving_model_wait_when_the_compute_is_idle() -> None:
    world = a_world()
    world.arrive(request("r0", B), at=10.0)
    assert placements(world.arrive(request("r1", B), request("r2", A))) == [("r2", "g0")]
    world.send(SlotFreed(SLOT, world.lease_of("r2")), 11.0)
    assert loaded(world, B, at=12.0) == []
    (hit,) = [each for each in world.free("g0", at=13.0) if isinstance(each, Dispatch)]
    assert (hit.requests, hit.hit) == (("r1",), True)


def test_second_load_waits_when_the_copy_engine_is_busy() -> None:
    world = World(a_core("beside", models=MODELS))
    assert placements(world.arrive(request("r0", A), request("r1", B))) == [("r0", "g0")]
    assert loaded(world, A, at=2.0) == [("r1", "g0")]


def test_load_goes_to_another_gpu_when_the_first_one_copies() -> None:
    world = World(a_core("beside", gpus=("g0", "g1"), models=MODELS))
    found = placements(world.arrive(request("r0", A), request("r1", B)))
    assert found == [("r0", "g0"), ("r1", "g1")]


def test_load_waits_when_a_loaded_request_waits_for_the_compute() -> None:
    """Else requests that gave up all other GPUs would heap up behind one long run."""
    world = World(a_core("beside", gpus=(gpu("g0", memory_mb=16384),), models=MODELS))
    world.arrive(request("r0", A))
    loaded(world, A, at=2.0)
    world.arrive(request("r1", B))
    loaded(world, B, at=4.0)
    assert placements(world.arrive(request("r2", C))) == []
    assert placements(world.free("g0", at=5.0)) == [("r2", "g0")]


# -- memory -------------------------------------------------------------------------------------


def test_load_waits_when_all_that_could_leave_is_in_use() -> None:
    world = a_world()
    world.arrive(request("r0", A), request("r1", B), at=10.0)
    assert placements(world.arrive(request("r2", C))) == []
    loaded(world, B, at=12.0)
    prepare = only(Prepare, world.send(SlotFreed(SLOT, world.lease_of("r0")), 12.5))
    assert (prepare.victims, prepare.beside) == ((A,), True)


def test_only_copy_stays_when_requests_wait_for_it() -> None:
    """b runs, a is waited for: c would take a's place, and wait no longer than a's run."""
    world = a_world()
    world.arrive(request("r0", B), at=10.0)
    loaded(world, B, at=12.0)
    world.arrive(request("r1", A), request("r2", C))
    assert placements(world.free("g0", at=13.0)) == [("r1", "g0"), ("r2", "g0")]
    prepare = [each for each in world.answers[-1] if isinstance(each, Prepare)]
    assert [each.victims for each in prepare] == [(B,)]


# -- ends that come early -----------------------------------------------------------------------


def test_copy_engine_stays_busy_when_the_request_of_a_load_goes_away() -> None:
    world = a_world()
    world.arrive(request("r0", B), at=10.0)
    before_s = free_s(world.core)
    only(EndLease, world.send(RequestCancelled(RequestId("r0"))))
    world.send(SlotFreed(SLOT, world.lease_of("r0")), 10.5)
    assert free_s(world.core) == before_s
    world.arrive(request("r1", C))
    assert loaded(world, B, at=12.0) == [("r1", "g0")]


def test_copy_engine_is_free_when_a_load_fails() -> None:
    world = a_world()
    world.arrive(request("r0", B), request("r1", C), at=10.0)
    failed = world.send(LoadFailed(G0, B, "no such file", lease=world.lease_of("r0")))
    assert ended(failed) == {"r0": RequestOutcome.FAILED}
    assert placements(failed) == [], "the lease of the load holds on until its node ends it"
    freed = world.send(SlotFreed(SLOT, world.lease_of("r0")))
    assert placements(freed) == [("r1", "g0")]


def test_copy_engine_is_free_when_the_model_is_evicted_on_its_way() -> None:
    world = a_world()
    world.arrive(request("r0", B), at=10.0)
    world.send(RequestCancelled(RequestId("r0")))
    world.send(SlotFreed(SLOT, world.lease_of("r0")))
    world.arrive(request("r1", C))
    assert placements(world.send(EvictAsked(B, G0))) == [("r1", "g0")]


def test_lost_gpu_gives_both_requests_back_when_one_loads_and_one_runs() -> None:
    world = a_world()
    world.arrive(request("r0", A), request("r1", B), at=10.0)
    assert placements(world.send(GpuLost(G0, AfterLoss.REQUEUE))) == []
    joined = world.send(GpuJoined(gpu("g1")))
    assert placements(joined) == [("r0", "g1")]
    again = world.send(ModelLoaded(GpuId("g1"), A, 2.0, Tier.ABSENT), 12.0)
    assert placements(again) == [("r1", "g1")]


def test_draining_gpu_leaves_when_its_load_beside_runs_has_ended_too() -> None:
    world = a_world()
    world.arrive(request("r0", A), request("r1", B), at=10.0)
    world.send(GpuDraining(G0))
    world.send(SlotFreed(SLOT, world.lease_of("r0")))
    assert G0 in world.core.cluster.gpus
    world.send(SlotFreed(SLOT, world.lease_of("r1")))
    assert G0 not in world.core.cluster.gpus


# -- nodes and leaders --------------------------------------------------------------------------


def test_load_goes_on_when_the_node_reports_it_under_way() -> None:
    world = a_world()
    world.arrive(request("r0", B), at=10.0)
    world.report(G0, loading=[B])
    assert placements(world.arrive(request("r1", B))) == []
    assert world.core.leases[world.lease_of("r0")].beside


def test_load_is_over_when_the_node_reports_the_model_as_there() -> None:
    """The report of the load was lost with the node's connection."""
    world = a_world()
    world.arrive(request("r0", B), request("r1", C), at=10.0)
    assert placements(world.report(G0, loading=[])) == [("r1", "g0")]
    assert not world.core.leases[world.lease_of("r0")].beside
    assert free_s(world.core) == 11.0


def test_new_leader_knows_what_is_copied_when_a_node_reports_it() -> None:
    fresh = World(a_core("beside", gpus=(), models=MODELS))
    live = (
        LiveLease(LeaseId(7), SLOT, (A,), (RequestId("r0"),)),
        LiveLease(LeaseId(8), SLOT, (B,), (RequestId("r1"),)),
    )
    residents = ((A, 3 * GIB), (B, 3 * GIB))
    spec = gpu("g0", memory_mb=16384)
    snapshot = GpuSnapshot(spec, residents, live, loading=(B,))
    fresh.send(NodeSnapshot(NodeId("node-of-g0"), (snapshot,)))
    fresh.arrive(request("r0", A), request("r1", B), request("r2", C))
    assert fresh.core.requests[RequestId("r2")].at is None, "its copy engine is busy"
    fresh.send(SlotFreed(SLOT, LeaseId(7)))
    assert loaded(fresh, B, at=2.0) == [("r2", "g0")]


# -- policies, callers and waits ----------------------------------------------------------------


def test_lease_holds_compute_and_copy_engine_when_the_policy_is_the_thesiss() -> None:
    world = a_world(policy="lalbo3")
    prepare = only(Prepare, world.arrive(request("r0", B), at=10.0))
    assert not prepare.beside
    assert placements(world.arrive(request("r1", A))) == []
    assert loaded(world, B, at=12.0) == []
    assert placements(world.free("g0", at=13.0)) == [("r1", "g0")]


def test_load_beside_runs_goes_on_when_the_policy_changes() -> None:
    world = a_world()
    world.arrive(request("r0", B), at=10.0)
    world.send(PolicySet("lb"))
    assert placements(world.arrive(request("r1", A))) == [("r1", "g0")]
    assert loaded(world, B, at=12.0) == []
    world.free("g0")
    assert placements(world.arrive(request("r2", A))) == []
    assert placements(world.free("g0")) == [("r2", "g0")]


def test_kept_lease_is_recalled_when_a_loaded_request_waits_for_its_slot() -> None:
    settings = CoreSettings(standing=StandingTerms(5.0, 100))
    world = a_world(settings=settings)
    world.arrive(replace(request("r0", A), caller="gateway"), at=10.0)
    found = world.arrive(replace(request("r1", B), caller="gateway"))
    assert only(Dispatch, found).stands is None, "a lease is kept for calls, not for a load"
    assert not [each for each in found if isinstance(each, Recall)]
    recalls = world.send(ModelLoaded(G0, B, 2.0, Tier.ABSENT), 12.0)
    assert only(Recall, recalls).lease == world.lease_of("r0")


def test_request_is_refused_for_its_wait_when_copy_engines_are_busy_and_slots_idle() -> None:
    names = ("m0", "m1", "m2", "m3", "m4")
    models = [model(name, load_s=2.0) for name in names]
    world = World(a_core("beside", models=models))
    world.arrive(*[request(f"r{number}", names[number]) for number in range(4)])
    for number in range(2):  # a load each 2 s, and a short run
        assert loaded(world, ModelId(names[number]), at=2.0 * number + 2.0)
        world.send(SlotFreed(SLOT, world.lease_of(f"r{number}")), 2.0 * number + 2.5)
    assert world.core.cluster.slots[SLOT].idle
    finish = only(Finish, world.arrive(request("r4", "m4", max_wait_s=0.5), at=5.0))
    assert finish.outcome is RequestOutcome.QUEUE_FULL


def test_explanation_has_both_finish_times_when_a_load_goes_beside_runs() -> None:
    settings = CoreSettings(explain=frozenset({RequestId("r1"), RequestId("r2")}))
    world = a_world(settings=settings)
    world.arrive(request("r0", A), at=10.0)
    dispatch = only(Dispatch, world.arrive(request("r1", B), at=10.5))
    assert dispatch.explanation is not None
    (candidate,) = dispatch.explanation.candidates
    assert (candidate.wait_s, candidate.copy_wait_s, candidate.beside) == (0.5, 0.0, True)
    assert candidate.finish_s == 3.0, "2 s to load, in which the run ends, and 1 s to run"
