"""Decisions that no policy of ours takes yet: to load ahead of requests, and to be woken."""

from collections.abc import Iterator
from dataclasses import dataclass

from cache_manager import eviction
from cache_manager.model.ids import ModelId, Tier
from scheduler.cluster.view import View
from scheduler.composition import compose
from scheduler.model.actions import Dispatch, Prepare, SetTimer
from scheduler.model.events import GpuJoined, ModelLoaded, ModelRegistered, TimerFired
from scheduler.policies.placement_policy import Decision, Place, Prefetch, Wake
from tests.kit.cores.builders import gpu, model, request
from tests.kit.cores.core_world import World, only

BERT = ModelId("bert")
WAKE_AT_S = 5.0


@dataclass(frozen=True)
class Ahead:
    """Loads bert on every other idle slot as soon as one request for anything waits."""

    def decide(self, view: View) -> Iterator[Decision]:
        for slot in view.idle_slots():
            head = view.head(slot)
            if head is not None:
                yield Place((head,), slot, "first come")
                for other in view.few_idle(head, 8):
                    yield Prefetch(BERT, other)


@dataclass(frozen=True)
class Late:
    """Places nothing before its time has come."""

    def decide(self, view: View) -> Iterator[Decision]:
        if view.now < WAKE_AT_S:
            yield Wake(WAKE_AT_S)
            return
        for slot in view.idle_slots():
            head = view.head(slot)
            if head is not None:
                yield Place((head,), slot, "its time has come")


def world_of(policy: Ahead | Late) -> World:
    world = World(compose(policy, eviction.make("lru")))
    world.send(ModelRegistered(model("bert", load_s=2.0)))
    world.send(ModelRegistered(model("resnet")))
    for name in ("g0", "g1"):
        world.send(GpuJoined(gpu(name)))
    return world


def test_prefetch_loads_on_the_idle_slot_when_a_policy_decides_so() -> None:
    prepares = [a for a in world_of(Ahead()).arrive(request("r0", "resnet")) if type(a) is Prepare]
    ahead = [prepare for prepare in prepares if prepare.prefetch]
    assert [(prepare.slot, prepare.loads[0].model) for prepare in ahead] == [("g1", "bert")]


def test_prefetch_occupies_its_slot_when_it_is_not_loaded_yet() -> None:
    world = world_of(Ahead())
    world.arrive(request("r0", "resnet"))
    assert world.arrive(request("r1", "bert")) == []


def test_prefetch_makes_a_hit_when_it_has_been_loaded() -> None:
    world = world_of(Ahead())
    world.arrive(request("r0", "resnet"))
    world.send(ModelLoaded(gpu("g1").id, BERT, 2.0, Tier.DISK), at=2.0)
    world.free("g1")
    assert only(Dispatch, world.arrive(request("r1", "bert"))).hit


def test_policy_runs_again_when_the_time_it_asked_for_has_come() -> None:
    world = world_of(Late())
    timer = only(SetTimer, world.arrive(request("r0", "bert")))
    assert (timer.at_s, timer.event) == (WAKE_AT_S, TimerFired())
    assert only(Dispatch, world.send(timer.event, at=timer.at_s)).requests == ("r0",)
