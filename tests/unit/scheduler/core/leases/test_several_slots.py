"""Leases that occupy several slots of one GPU, and virtual CPUs."""

from msgspec import msgpack
from msgspec.structs import replace

from cache_manager import eviction
from cache_manager.model.ids import ModelId
from scheduler.composition import compose
from scheduler.features.billing.charges import GPU_TIME
from scheduler.features.billing.use_meter import UseMeter
from scheduler.model.actions import Dispatch, Prepare
from scheduler.model.events import GpuJoined, GpuSnapshot, LiveLease, ModelRegistered, NodeSnapshot
from scheduler.model.values import Configuration, LeaseId, RequestId, SlotId
from scheduler.service.streams.nodes import amended
from scheduler.wire.codec import pack
from tests.kit.cores.builders import gpu, model, request
from tests.kit.cores.core_world import World, only, placements, refused
from tests.kit.cores.wide_policy import WidePolicy

BERT = model("bert", load_s=2.0, run_s=1.0)
MORE = (SlotId("g0.1"), SlotId("g0.2"))


def wide(*, vcpus: int = 8) -> World:
    world = World(compose(WidePolicy(), eviction.make("lru")))
    world.send(ModelRegistered(BERT))
    world.send(GpuJoined(gpu("g0", slots=3, vcpus=vcpus)))
    return world


def test_lease_occupies_all_its_slots_until_it_is_freed() -> None:
    world = wide()
    actions = world.arrive(request("r0"))
    dispatch = only(Dispatch, actions)
    assert (dispatch.slot, dispatch.more_slots) == ("g0.0", MORE)
    assert only(Prepare, actions).more_slots == MORE
    assert placements(world.arrive(request("r1"))) == []
    assert placements(world.free("g0.0")) == [("r1", "g0.0")]


def test_lease_carries_its_configuration_and_takes_vcpus() -> None:
    world = wide()
    given = Configuration(1, 3, 3)
    actions = world.arrive(request("r0"))
    assert only(Dispatch, actions).configuration == given
    assert only(Prepare, actions).configuration == given
    (gpu_there,) = world.core.cluster.gpus.values()
    assert gpu_there.vcpus_used == 3
    world.free("g0.0")
    assert gpu_there.vcpus_used == 0


def test_manager_without_vcpus_gets_no_configuration() -> None:
    dispatch = only(Dispatch, wide(vcpus=0).arrive(request("r0")))
    assert dispatch.configuration is None


def test_single_slot_is_written_as_before() -> None:
    world = World(compose(WidePolicy(), eviction.make("lru")))
    world.send(ModelRegistered(BERT))
    world.send(GpuJoined(gpu("g0")))
    fields = msgpack.decode(pack(only(Dispatch, world.arrive(request("r0")))))
    assert not {"more_slots", "configuration"} & fields.keys()


def test_order_survives_the_wire() -> None:
    dispatch = only(Dispatch, wide().arrive(request("r0")))
    assert msgpack.decode(pack(dispatch), type=Dispatch) == dispatch


def snapshot(*leases: LiveLease) -> NodeSnapshot:
    spec = gpu("g0", slots=3, vcpus=8)
    return NodeSnapshot(spec.node, (GpuSnapshot(spec, ((ModelId("bert"), 1 << 30),), leases),))


LIVE = LiveLease(
    LeaseId(7),
    SlotId("g0.0"),
    (ModelId("bert"),),
    (RequestId("r0"),),
    (SlotId("g0.1"),),
    Configuration(1, 2, 2),
)


def new_leader() -> World:
    world = World(compose(WidePolicy(), eviction.make("lru")))
    world.send(ModelRegistered(BERT))
    return world


def test_new_leader_takes_over_all_slots_of_a_lease() -> None:
    world = new_leader()
    world.send(snapshot(LIVE))
    (gpu_there,) = world.core.cluster.gpus.values()
    assert [slot.idle for slot in gpu_there.slots] == [False, False, True]
    assert gpu_there.vcpus_used == 2
    again = only(Dispatch, world.arrive(request("r0")))
    assert (again.lease, again.more_slots, again.configuration) == (7, ("g0.1",), (1, 2, 2))
    assert placements(world.arrive(request("r1"))) == [("r1", "g0.2")]
    world.free("g0.0")
    assert gpu_there.vcpus_used == 3


def test_report_is_refused_when_a_further_slot_is_unknown_or_named_twice() -> None:
    for more in ("g9.1", "g0.0"):
        found = new_leader().send(snapshot(replace(LIVE, more_slots=(SlotId(more),))))
        assert refused(found), more


def test_report_is_refused_when_a_known_lease_has_other_slots() -> None:
    world = wide()
    lease = only(Dispatch, world.arrive(request("r0"))).lease
    assert refused(world.send(snapshot(replace(LIVE, lease=lease))))


def test_snapshot_that_crossed_a_dispatch_has_its_slots() -> None:
    dispatch = only(Dispatch, wide().arrive(request("r0")))
    (found,) = amended(snapshot(), [dispatch]).gpus
    (live,) = found.leases
    assert (live.more_slots, live.configuration) == (MORE, Configuration(1, 3, 3))


def test_lease_pays_for_each_of_its_slots() -> None:
    world = wide()
    meter = world.core.add(UseMeter(world.core.lifecycle, 0.0))
    world.arrive(request("r0"))
    world.free("g0.0", at=4.0)
    rows, (span,) = meter.collect(5.0)
    assert sum(row.amounts[GPU_TIME] for row in rows) == 3 * 4_000_000
    assert (span.slot_us, span.idle_slot_us) == (3 * 5_000_000, 3 * 1_000_000)
