"""GPUs that join, drain, are lost, and report what they really hold."""

from cache_manager.model.ids import ModelId, Tier
from scheduler.model.actions import Demote, Dispatch, Prepare
from scheduler.model.events import (
    GpuDraining,
    GpuJoined,
    GpuLost,
    GpuSnapshot,
    LiveLease,
    ModelDemoted,
    NodeSnapshot,
    RunFinished,
    SlotFreed,
)
from scheduler.model.values import AfterLoss, GpuSpec, LeaseId, RequestOutcome, SlotId
from tests.kit.cores.builders import GIB, a_core, gpu, holding, model, request
from tests.kit.cores.core_world import World, ended, only, placements, refused

G0, G1 = gpu("g0"), gpu("g1")
BERT = ModelId("bert")


def report(
    spec: GpuSpec,
    *residents: str,
    leases: tuple[LiveLease, ...] = (),
    lost_leases: AfterLoss = AfterLoss.FAIL,
) -> NodeSnapshot:
    """A node with one GPU reports what the GPU holds."""
    held = tuple((ModelId(name), GIB) for name in residents)
    snapshot = GpuSnapshot(spec, held, leases)
    return NodeSnapshot(spec.node, (snapshot,), lost_leases=lost_leases)


# -- joining --------------------------------------------------------------------------------------


def test_waiting_request_is_placed_when_a_gpu_joins() -> None:
    world = World(a_core(gpus=()))
    world.arrive(request("r0"))
    assert placements(world.send(GpuJoined(G0))) == [("r0", "g0")]


def test_gpu_is_refused_when_it_is_here_already() -> None:
    world = World(a_core(gpus=("g0",)))
    assert refused(world.send(GpuJoined(G0))) == ["GPU g0 has joined already"]


def test_gpu_is_refused_when_a_slot_of_that_name_is_here_already() -> None:
    world = World(a_core(gpus=(gpu("g0", slots=2),)))
    assert refused(world.send(GpuJoined(gpu("g0.1")))) != []


def test_gpu_starts_as_little_used_as_the_least_when_it_joins() -> None:
    """Or it would get every request until it had caught up."""
    world = World(a_core("rr", gpus=("g0",)))
    world.arrive(*(request(f"old{number}") for number in range(10)))
    world.send(GpuJoined(G1))
    actions = world.arrive(*(request(f"new{number}") for number in range(4)))
    assert [slot for name, slot in placements(actions) if name.startswith("new")] == [
        "queue of g0",
        "queue of g1",
        "g1",
        "queue of g0",
        "queue of g1",
    ]


def test_gpu_is_like_new_when_it_comes_back_under_its_old_name() -> None:
    world = World(a_core("lb", gpus=("g0", "g1")))
    world.arrive(request("r0"))
    world.send(GpuLost(G0.id))
    assert world.send(GpuJoined(G0)) == []
    assert not only(Dispatch, world.arrive(request("r1"))).hit


# -- draining -------------------------------------------------------------------------------------


def test_draining_gpu_gets_no_request_when_it_is_idle() -> None:
    world = World(a_core("lb", gpus=("g0",)))
    world.send(GpuDraining(G0.id))
    assert world.arrive(request("r0")) == []


def test_draining_gpu_gives_its_local_queue_back_when_draining_begins() -> None:
    world = World(a_core("rr", gpus=("g0",)))
    world.arrive(request("running"), request("r0"), request("r1"))
    world.send(GpuDraining(G0.id))
    assert placements(world.send(GpuJoined(G1))) == [
        ("r0", "queue of g1"),
        ("r1", "queue of g1"),
        ("r0", "g1"),
    ]
    assert ended(world.free("g0")) == {"running": RequestOutcome.COMPLETED}


def test_draining_gpu_counts_as_holder_of_nothing_when_hits_are_looked_for() -> None:
    world = World(a_core("lalb", gpus=("g1",)))
    world.send(holding(G0, "bert"))
    world.send(GpuDraining(G0.id))
    assert placements(world.arrive(request("r0"))) == [("r0", "g1")]


def test_drained_gpu_is_forgotten_when_its_last_lease_ends() -> None:
    world = World(a_core("lb", gpus=(gpu("g0", leases=2),)))
    world.arrive(request("r0"), request("r1"))
    world.send(GpuDraining(G0.id))
    world.free("g0")
    assert refused(world.send(GpuJoined(G0))) != [], "one lease is still in force"
    world.free("g0")
    assert refused(world.send(GpuJoined(G0))) == []


def test_drained_gpu_is_forgotten_when_its_manager_lost_the_last_lease() -> None:
    world = World(a_core("lb"))
    world.arrive(request("r0"))
    world.send(GpuDraining(G0.id))
    world.send(NodeSnapshot(G0.node, (GpuSnapshot(G0, draining=True),)))
    assert refused(world.send(GpuJoined(G0))) == []


def test_draining_is_refused_when_the_gpu_is_unknown() -> None:
    assert refused(World(a_core()).send(GpuDraining(G1.id))) == ["no GPU 'g1'"]


# -- losing ---------------------------------------------------------------------------------------


def test_local_queue_waits_for_any_gpu_when_its_gpu_is_lost() -> None:
    world = World(a_core("rr", gpus=("g0", "g1")))
    world.arrive(*(request(f"r{number}") for number in range(6)))
    actions = world.send(GpuLost(G0.id))
    assert ended(actions) == {"r0": RequestOutcome.FAILED}
    assert placements(actions) == [("r2", "queue of g1"), ("r4", "queue of g1")]
    order = [placements(world.free("g1"))[0][0] for _ in range(4)]
    assert order == ["r3", "r5", "r2", "r4"], "g1's queue first, then what came back, by arrival"


def test_requests_wait_at_their_old_places_when_their_gpu_is_lost() -> None:
    world = World(a_core("lb"))
    world.arrive(request("r0"), request("r1"), request("r2"))
    world.free("g0")
    world.send(GpuLost(G0.id, AfterLoss.REQUEUE))
    assert placements(world.send(GpuJoined(G1))) == [("r1", "g1")]
    assert placements(world.free("g1")) == [("r2", "g1")]


def test_report_of_a_lost_gpu_is_ignored_when_it_comes_late() -> None:
    world = World(a_core("lb"))
    world.arrive(request("r0"))
    lease = world.lease_on("g0")
    world.send(GpuLost(G0.id))
    assert world.send(SlotFreed(SlotId("g0"), lease)) == []


# -- snapshots ------------------------------------------------------------------------------------


def test_snapshot_brings_a_gpu_and_its_residents_when_it_is_the_first() -> None:
    world = World(a_core(gpus=()))
    world.arrive(request("r0"))
    assert only(Dispatch, world.send(report(G0, "bert"))).hit


def test_snapshot_takes_residents_away_when_the_manager_lacks_them() -> None:
    world = World(a_core("lb"))
    world.arrive(request("r0"))
    world.free("g0")
    world.send(report(G0))
    assert not only(Dispatch, world.arrive(request("r1"))).hit


def test_snapshot_gives_the_lru_order_when_residents_are_new() -> None:
    world = World(a_core("lb", gpus=(), models=("a", "b", model("c", memory_mb=7 * 1024))))
    world.send(report(G0, "a", "b"))
    assert only(Prepare, world.arrive(request("r0", "c"))).victims == ("a",)


def test_snapshot_ends_a_lease_when_the_manager_lacks_it() -> None:
    world = World(a_core("lb"))
    world.arrive(request("r0"), request("r1"))
    actions = world.send(report(G0, "bert"))
    assert ended(actions) == {"r0": RequestOutcome.FAILED}
    assert placements(actions) == [("r1", "g0")]


def test_snapshot_lets_requests_wait_again_when_their_lost_leases_may_be_repeated() -> None:
    world = World(a_core("lb"))
    world.arrive(request("r0"), request("r1"))
    actions = world.send(report(G0, lost_leases=AfterLoss.REQUEUE))
    assert placements(actions) == [("r0", "g0")]
    assert not only(Dispatch, actions).hit


def test_snapshot_keeps_a_lease_when_the_manager_has_it() -> None:
    world = World(a_core("lb"))
    world.arrive(request("r0"), request("r1"))
    live = LiveLease(world.lease_on("g0"), SlotId("g0"), (BERT,))
    assert world.send(report(G0, "bert", leases=(live,))) == []
    assert ended(world.free("g0")) == {"r0": RequestOutcome.COMPLETED}


def test_snapshot_makes_the_slot_busy_when_it_has_a_lease_of_an_earlier_leader() -> None:
    world = World(a_core("lb", gpus=()))
    world.send(report(G0, "bert", leases=(LiveLease(LeaseId(41), SlotId("g0"), (BERT,)),)))
    assert world.arrive(request("r0")) == []
    dispatch = only(Dispatch, world.send(SlotFreed(SlotId("g0"), LeaseId(41))))
    assert dispatch.requests == ("r0",)
    assert dispatch.lease > 41, "numbers are not given twice"


def test_snapshot_removes_a_gpu_when_its_node_no_longer_names_it() -> None:
    world = World(a_core("lb"))
    world.arrive(request("r0"))
    assert ended(world.send(NodeSnapshot(G0.node, ()))) == {"r0": RequestOutcome.FAILED}
    assert world.arrive(request("r1")) == []


def test_snapshot_leaves_other_nodes_alone_when_it_is_taken_over() -> None:
    world = World(a_core("lb", gpus=("g0", "g1")))
    world.send(NodeSnapshot(G1.node, ()))
    assert placements(world.arrive(request("r0"))) == [("r0", "g0")]


def test_snapshot_is_refused_whole_when_it_names_a_slot_that_its_gpu_lacks() -> None:
    world = World(a_core("lb"))
    lease = LiveLease(LeaseId(9), SlotId("elsewhere"), (BERT,))
    assert refused(world.send(report(G0, "bert", leases=(lease,)))) != []
    assert not only(Dispatch, world.arrive(request("r0"))).hit


# -- tiers ----------------------------------------------------------------------------------------


def tiered() -> World:
    loads = {Tier.HOST: 0.5, Tier.DISK: 3.0, Tier.ABSENT: 20.0}
    return World(a_core("lb", models=(model("bert", load_s=loads),)))


def test_load_estimate_follows_the_tier_when_the_node_reports_where_weights_are() -> None:
    for tier, load_s in ((Tier.HOST, 0.5), (Tier.DISK, 3.0), (Tier.ABSENT, 20.0)):
        world = tiered()
        world.send(NodeSnapshot(G0.node, (GpuSnapshot(G0),), ((BERT, tier),)))
        actions = world.arrive(request("r0"))
        assert only(Dispatch, actions).estimate.load_s == load_s
        assert only(Prepare, actions).loads[0].source is tier


def test_load_estimate_follows_the_tier_when_a_model_is_demoted() -> None:
    world = tiered()
    world.arrive(request("r0"))
    world.free("g0")
    world.send(ModelDemoted(G0.node, G0.id, BERT, Tier.HOST))
    dispatch = only(Dispatch, world.arrive(request("r1")))
    assert not dispatch.hit
    assert dispatch.estimate.load_s == 0.5


def test_load_estimate_stays_when_the_weights_are_on_another_node() -> None:
    world = tiered()
    world.send(ModelDemoted(G1.node, None, BERT, Tier.HOST))
    assert only(Dispatch, world.arrive(request("r0"))).estimate.load_s == 20.0


def test_copy_is_counted_with_what_it_took_when_its_node_had_reported_less() -> None:
    """Or the scheduler would promise memory that the node has granted to the copy meanwhile."""
    world = World(a_core(gpus=("g0", "g1")))
    world.send(report(G0, BERT))
    world.send(report(G1, BERT))
    world.send(RunFinished(SlotId("g1"), BERT, 1, 1.0, 3 * GIB))
    world.send(report(G0, BERT))  # of a copy that has run nothing as large
    world.send(RunFinished(SlotId("g0"), BERT, 1, 1.0, 2 * GIB))
    assert world.core.cluster.gpus[G0.id].cache.residents[BERT].bytes >= 2 * GIB


def test_model_that_a_snapshot_made_leave_is_not_counted_when_the_snapshot_still_has_it() -> None:
    """Or requests would be sent to a copy that its manager was ordered to unload."""
    other = ModelId("other")
    one, next_one = (gpu(name, memory_mb=2048, node="n") for name in ("g0", "g1"))
    world = World(a_core(gpus=(one, next_one), models=("bert", "other")))
    held = GpuSnapshot(next_one, ((other, GIB), (BERT, GIB)))
    world.send(NodeSnapshot(one.node, (GpuSnapshot(one, ((BERT, GIB),)), held)))
    larger = GpuSnapshot(one, ((BERT, GIB + GIB // 2),))
    actions = world.send(NodeSnapshot(one.node, (larger, held)))
    assert [(each.gpu, each.model) for each in actions if isinstance(each, Demote)] == [
        ("g1", "other")
    ]
    assert world.core.cluster.gpus[next_one.id].cache.residents.keys() == {BERT}


def test_model_that_made_room_for_another_is_not_counted_when_its_snapshot_still_has_it() -> None:
    other = ModelId("other")
    spec = gpu("g0", memory_mb=2048)
    world = World(a_core(gpus=(spec,), models=("bert", "other")))
    world.send(report(spec, "other"))
    sizes = ((BERT, GIB + GIB // 2), (other, GIB))
    actions = world.send(NodeSnapshot(spec.node, (GpuSnapshot(spec, sizes),)))
    assert [each.model for each in actions if isinstance(each, Demote)] == ["other"]
    assert world.core.cluster.gpus[spec.id].cache.residents.keys() == {BERT}
