"""Which lease an id means: after a change of leader, in late reports, in snapshots."""

from cache_manager.model.ids import ModelId
from scheduler.model.actions import Dispatch
from scheduler.model.events import GpuSnapshot, LiveLease, NodeSnapshot, SlotFreed
from scheduler.model.values import CoreSettings, GpuSpec, LeaseId, RequestOutcome, SlotId
from tests.kit.cores.builders import GIB, a_core, gpu, request
from tests.kit.cores.core_world import World, ended, only, placements, refused

BERT = ModelId("bert")


def adopting(spec: GpuSpec, lease: int) -> NodeSnapshot:
    """A manager's report: its one GPU holds bert, which this lease uses."""
    live = LiveLease(LeaseId(lease), SlotId(spec.id), (BERT,))
    return NodeSnapshot(spec.node, (GpuSnapshot(spec, ((BERT, GIB),), (live,)),))


def test_leases_count_from_the_first_when_a_leader_is_new() -> None:
    settings = CoreSettings(first_lease=1000)
    world = World(a_core("lb", gpus=("g0", "g1"), settings=settings))
    world.arrive(request("r0"), request("r1"))
    assert [world.lease_on("g0"), world.lease_on("g1")] == [1000, 1001]


def test_nothing_is_freed_when_the_lease_is_of_another_slot() -> None:
    world = World(a_core("lb", gpus=("g0", "g1")))
    world.arrive(request("r0"), request("r1"), request("r2"))
    on_g0, on_g1 = world.lease_on("g0"), world.lease_on("g1")
    actions = world.send(SlotFreed(SlotId("g1"), on_g0))
    assert len(refused(actions)) == len(actions) == 1
    assert placements(world.send(SlotFreed(SlotId("g1"), on_g1))) == [("r2", "g1")]
    assert ended(world.send(SlotFreed(SlotId("g0"), on_g0))) == {"r0": RequestOutcome.COMPLETED}


def test_snapshot_is_refused_when_its_lease_is_another_slots() -> None:
    """The other slot keeps the lease, and the refused one frees nothing."""
    world = World(a_core("lb"))
    world.arrive(request("r0"))
    lease = world.lease_on("g0")
    assert refused(world.core.handle(adopting(gpu("g1"), lease), 0.0)) != []
    assert refused(world.core.handle(SlotFreed(SlotId("g1"), lease), 0.0)) != []
    assert ended(world.free("g0")) == {"r0": RequestOutcome.COMPLETED}


def test_snapshot_changes_nothing_when_its_lease_is_another_slots() -> None:
    """Else its slot would count as idle, though its manager has a lease in force there."""
    world = World(a_core("lb"))
    world.arrive(request("r0"))
    world.core.handle(adopting(gpu("g1"), world.lease_on("g0")), 0.0)
    assert world.arrive(request("r1")) == []


def test_slot_is_busy_until_freed_when_a_snapshot_has_an_unknown_lease() -> None:
    world = World(a_core("lb", gpus=()))
    world.send(adopting(gpu("g0"), 41))
    assert world.arrive(request("r0")) == []
    dispatch = only(Dispatch, world.free("g0"))
    assert dispatch.requests == ("r0",)
    assert dispatch.hit


def test_new_leases_count_above_it_when_a_snapshot_has_an_unknown_lease() -> None:
    world = World(a_core("lb", gpus=("g1",)))
    world.send(adopting(gpu("g0"), 41))
    world.arrive(request("r0"))
    assert world.lease_of("r0") == 42
