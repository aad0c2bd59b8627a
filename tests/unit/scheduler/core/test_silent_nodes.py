"""Nodes whose stream is broken: nothing new goes there, and nothing that is there is lost."""

import pytest

from cache_manager.model.ids import ModelId
from scheduler import policies
from scheduler.model.actions import Dispatch, EndLease
from scheduler.model.events import (
    GpuDraining,
    GpuJoined,
    GpuSnapshot,
    LeaseReleased,
    LiveLease,
    NodeHeard,
    NodeSilent,
    NodeSnapshot,
    PrefetchAsked,
    RequestCancelled,
)
from scheduler.model.values import RequestId, SlotId
from tests.kit.cores.builders import a_core, gpu, holding, request
from tests.kit.cores.core_world import World, ended, only, placements, refused

G0, G1 = gpu("g0"), gpu("g1")
each_policy = pytest.mark.parametrize("policy", policies.available())


@each_policy
def test_request_goes_to_another_gpu_when_the_holder_of_its_model_is_silent(policy: str) -> None:
    world = World(a_core(policy, gpus=("g1",)))
    world.send(holding(G0, "bert"))
    world.send(NodeSilent(G0.node))
    assert placements(world.arrive(request("r0")))[-1] == ("r0", "g1")


@each_policy
def test_request_waits_when_the_only_gpu_is_silent_and_hits_there_when_it_reports(
    policy: str,
) -> None:
    world = World(a_core(policy, gpus=()))
    world.send(holding(G0, "bert"))
    world.send(NodeSilent(G0.node))
    assert world.arrive(request("r0")) == []
    assert only(Dispatch, world.send(NodeHeard(G0.node))).hit


def test_local_queue_goes_to_another_gpu_at_once_when_its_own_falls_silent() -> None:
    world = World(a_core("rr", gpus=("g0", "g1")))
    world.arrive(*(request(f"r{number}") for number in range(4)))
    assert placements(world.send(NodeSilent(G0.node))) == [("r2", "queue of g1")]
    assert [placements(world.free("g1"))[0][0] for _ in range(2)] == ["r3", "r2"]


def test_local_queue_keeps_its_order_when_its_gpu_is_the_only_one_and_falls_silent() -> None:
    world = World(a_core("rr"))
    world.arrive(*(request(f"r{number}") for number in range(3)))
    assert world.send(NodeSilent(G0.node)) == []
    world.send(NodeHeard(G0.node))
    assert placements(world.free("g0")) == [("r1", "g0")]
    assert placements(world.free("g0")) == [("r2", "g0")]


def test_lease_stays_in_force_when_its_node_is_silent_for_a_while() -> None:
    world = World(a_core("lb"))
    world.arrive(request("r0"))
    lease = world.lease_on("g0")
    assert world.send(NodeSilent(G0.node)) == []
    world.send(LeaseReleased(lease))
    world.send(NodeHeard(G0.node))
    assert ended(world.free("g0")) != {}


@pytest.mark.parametrize("how", ["released", "cancelled"])
def test_lease_is_ended_again_when_its_silent_node_was_given_up_before_it_was_notified(
    how: str,
) -> None:
    world = World(a_core("lb"))
    world.arrive(request("r0"))
    lease = world.lease_on("g0")
    world.send(NodeSilent(G0.node))
    world.send(LeaseReleased(lease) if how == "released" else RequestCancelled(RequestId("r0")))
    world.send(NodeSnapshot(G0.node, ()))
    live = LiveLease(lease, SlotId("g0"), (ModelId("bert"),), (RequestId("r0"),))
    back = NodeSnapshot(G0.node, (GpuSnapshot(G0, (), (live,)),))
    assert only(EndLease, world.send(back)).lease == lease


def test_silence_ends_when_the_node_reports_what_it_holds() -> None:
    world = World(a_core("lb"))
    world.send(NodeSilent(G0.node))
    world.arrive(request("r0"))
    assert placements(world.send(holding(G0, "bert"))) == [("r0", "g0")]


def test_gpu_is_like_new_when_it_was_given_up_while_it_was_silent() -> None:
    world = World(a_core("lb"))
    world.send(NodeSilent(G0.node))
    world.send(NodeSnapshot(G0.node, ()))
    world.send(GpuJoined(G0))
    assert placements(world.arrive(request("r0"))) == [("r0", "g0")]


def test_draining_gpu_takes_nothing_when_its_silent_node_reports_again() -> None:
    world = World(a_core("lb", gpus=("g0",)))
    world.arrive(request("r0"))
    world.send(NodeSilent(G0.node))
    world.send(GpuDraining(G0.id))
    world.arrive(request("r1"))
    assert world.send(NodeHeard(G0.node)) == []
    assert placements(world.free("g0")) == []
    assert refused(world.send(GpuJoined(G0))) == [], "it drained, and is forgotten"


def test_gpu_is_offered_when_a_new_manager_has_it_whose_former_one_drained_it() -> None:
    world = World(a_core("lb", gpus=("g0",)))
    world.arrive(request("r0"))
    world.send(GpuDraining(G0.id))
    world.send(NodeSilent(G0.node))
    world.arrive(request("r1"))
    assert placements(world.send(holding(G0, "bert"))) == [("r1", "g0")]


def test_gpu_takes_nothing_when_its_snapshot_says_that_it_drains() -> None:
    world = World(a_core("lb", gpus=("g0",)))
    world.arrive(request("r0"))
    live = (LiveLease(world.lease_on("g0"), SlotId("g0"), (ModelId("bert"),)),)
    world.send(GpuDraining(G0.id))
    world.send(NodeSilent(G0.node))
    world.arrive(request("r1"))
    snapshot = GpuSnapshot(G0, leases=live, draining=True)
    assert placements(world.send(NodeSnapshot(G0.node, (snapshot,)))) == []
    assert placements(world.free("g0")) == []
    assert placements(world.send(NodeSnapshot(G0.node, (GpuSnapshot(G0, draining=True),)))) == []
    assert refused(world.send(GpuJoined(G0))) == [], "it is not known again"


def test_gpus_of_other_nodes_are_offered_when_one_node_is_silent() -> None:
    world = World(a_core("lb", gpus=("g0", "g1")))
    world.send(NodeSilent(G0.node))
    world.send(NodeHeard(G1.node))
    assert placements(world.arrive(request("r0"), request("r1"))) == [("r0", "g1")]


def test_prefetch_is_refused_when_the_gpu_is_silent() -> None:
    world = World(a_core("lb"))
    world.send(NodeSilent(G0.node))
    assert refused(world.send(PrefetchAsked(ModelId("bert"), G0.id))) != []


def test_every_gpu_is_ranked_once_for_all_when_a_node_breaks_off_again_and_again() -> None:
    world = World(a_core("lalbo3", gpus=("g1",)))
    world.send(holding(G0, "bert"))
    for number in range(200):
        world.send(NodeSilent(G0.node))
        world.send(NodeHeard(G0.node))
        assert placements(world.arrive(request(f"r{number}"))) == [(f"r{number}", "g0")]
        world.free("g0")
    cluster = world.core.cluster
    rankings = [*cluster.active, *cluster.idle, cluster.ready]
    assert max(len(ranking.entries) for ranking in rankings) < 50
