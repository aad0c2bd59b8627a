"""Reports that contradict what is known are refused whole; those that do not replace it whole."""

import pytest

from cache_manager.model.ids import GpuId, ModelId, NodeId, Tier
from scheduler.model.actions import Dispatch
from scheduler.model.events import GpuJoined, GpuSnapshot, LiveLease, NodeSnapshot, RunFinished
from scheduler.model.values import Configuration, GpuSpec, LeaseId, SlotId, SlotSpec
from tests.kit.cores.builders import GIB, a_core, gpu, holding, model, request
from tests.kit.cores.core_world import World, only, placements, refused

BERT = ModelId("bert")
G0 = gpu("g0")


def with_slots(name: str, *slots: str, node: str = "node-of-others") -> GpuSpec:
    """A GPU whose slots have these names."""
    specs = tuple(SlotSpec(SlotId(slot)) for slot in slots)
    return GpuSpec(GpuId(name), NodeId(node), 8 * GIB, slots=specs)


def test_stored_tiers_are_replaced_when_a_node_reports_again() -> None:
    times = {Tier.HOST: 0.5, Tier.DISK: 3.0, Tier.ABSENT: 9.0}
    world = World(a_core("lb", models=(model("bert", load_s=times),)))
    world.send(NodeSnapshot(G0.node, (GpuSnapshot(G0),), ((BERT, Tier.HOST),)))
    world.send(NodeSnapshot(G0.node, (GpuSnapshot(G0),)))
    dispatch = only(Dispatch, world.arrive(request("r0")))
    assert dispatch.estimate.load_s == 9.0


@pytest.mark.parametrize("policy", ["esg", "gain", "togo"])
def test_run_is_refused_when_its_configuration_has_a_part_of_nothing(policy: str) -> None:
    world = World(a_core(policy, gpus=[gpu("g0", vcpus=8)], models=(model("bert"),)))
    ran = RunFinished(SlotId("g0"), BERT, 1, 0.1, configuration=Configuration(1, 0, 1))
    assert refused(world.send(ran)) == ["no configuration (1, 0, 1)"]
    assert placements(world.arrive(request("r0"))) == [("r0", "g0")]


@pytest.mark.parametrize("policy", ["esg", "lalb"])
@pytest.mark.parametrize("given", [None, Configuration(1, 1, 1)])
@pytest.mark.parametrize(("batch", "together"), [(0, 1), (-3, 1), (1, 0)])
def test_run_is_refused_when_it_was_one_of_nothing(
    policy: str, given: Configuration | None, batch: int, together: int
) -> None:
    spec = gpu("g0", slots=2, vcpus=8)
    world = World(a_core(policy, gpus=[spec], models=(model("bert", run_s={}),)))
    ran = RunFinished(SlotId("g0.0"), BERT, batch, 0.1, configuration=given, together=together)
    assert refused(world.send(ran)) == [f"no run of a batch of {batch * together}"]
    assert placements(world.arrive(request("r0"))) == [("r0", "g0.0")]


def test_gpu_is_refused_when_it_names_a_slot_twice() -> None:
    world = World(a_core("lb", gpus=()))
    assert refused(world.send(GpuJoined(with_slots("h0", "x", "x")))) != []
    assert world.arrive(request("r0")) == []
    assert placements(world.send(GpuJoined(with_slots("h0", "x", "y")))) == [("r0", "x")]


@pytest.mark.parametrize(
    "gpus",
    [
        (with_slots("h0", "x", "x"),),
        (with_slots("h0", "x"), with_slots("h1", "y", "y")),
        (with_slots("h0", "x"), with_slots("h1", "g0")),
        (with_slots("h0", "x"), with_slots("h1", "x")),
    ],
    ids=["twice", "twice on the second", "of another node", "on two GPUs of the report"],
)
def test_snapshot_changes_nothing_when_its_slots_contradict(gpus: tuple[GpuSpec, ...]) -> None:
    """The node's old GPU stays, which the report does not name."""
    world = World(a_core("lb", gpus=("g0", with_slots("old", "old"))))
    snapshot = NodeSnapshot(NodeId("node-of-others"), tuple(GpuSnapshot(spec) for spec in gpus))
    actions = world.send(snapshot)
    assert len(refused(actions)) == len(actions) == 1
    world.arrive(request("r0"), request("r1"), request("r2"))
    assert {lease.slot for lease in world.leases.values()} == {"g0", "old"}


@pytest.mark.parametrize("claimed_for", ["node-of-g0", "node-of-others"])
def test_snapshot_takes_no_gpu_from_another_node_when_it_claims_it(claimed_for: str) -> None:
    world = World(a_core("lb"))
    world.arrive(request("r0"))
    snapshot = NodeSnapshot(
        NodeId("node-of-others"), (GpuSnapshot(gpu("g0", memory_mb=4096, node=claimed_for)),)
    )
    assert len(refused(world.send(snapshot))) == 1
    assert world.core.cluster.gpus[GpuId("g0")].spec == G0
    assert world.ends == {}


def test_snapshot_takes_nothing_from_a_gpu_when_it_claims_its_slot() -> None:
    world = World(a_core("lb"))
    world.send(holding(G0, "bert"))
    world.send(NodeSnapshot(NodeId("n"), (GpuSnapshot(with_slots("h0", "g0")),)))
    assert only(Dispatch, world.arrive(request("r0"))).hit


def test_lease_of_a_refused_snapshot_is_in_no_books() -> None:
    world = World(a_core("lb"))
    world.arrive(request("r0"))
    before = set(world.leases)
    spec, live = with_slots("h0", "x", "x"), LiveLease(LeaseId(7), SlotId("x"), (BERT,))
    assert refused(world.send(NodeSnapshot(spec.node, (GpuSnapshot(spec, (), (live,)),)))) != []
    assert set(world.leases) == set(world.core.leases) == before
