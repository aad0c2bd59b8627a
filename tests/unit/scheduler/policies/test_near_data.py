"""A request that names a node goes there, where that costs nobody more than its data's way."""

import pytest

from cache_manager import eviction
from cache_manager.model.ids import GpuId, ModelId, Tier
from scheduler.composition import compose
from scheduler.model.actions import Dispatch
from scheduler.model.events import (
    GpuJoined,
    GpuLost,
    ModelLoaded,
    ModelRegistered,
    PrefetchAsked,
    SlotFreed,
)
from scheduler.policies.netgain import Policy
from tests.kit.cores.builders import gpu, model, request
from tests.kit.cores.core_world import World, only


def nodes(*gpus: str, policy: Policy | None = None) -> World:
    """A cluster in which each GPU `a0` is of node `a`."""
    world = World(compose(policy or Policy(), eviction.make("lru")))
    for name in ("bert", "resnet", "vgg"):
        world.send(ModelRegistered(model(name, load_s=2.0, memory_mb=5000)))
    for name in gpus:
        world.send(GpuJoined(gpu(name, node=name[0])))
    return world


def placed(world: World, name: str, *models: str, near: str | None = None) -> str:
    """The GPU that a request is given at once."""
    return str(only(Dispatch, world.arrive(request(name, *models, near=near))).gpu)


def warm(world: World, *gpus: str) -> None:
    """Have bert resident on these idle GPUs."""
    for name in gpus:
        world.send(PrefetchAsked(ModelId("bert"), GpuId(name)))
        world.send(ModelLoaded(GpuId(name), ModelId("bert"), 2.0, Tier.ABSENT))
        for lease in [held for held in world.leases.values() if held.slot == name]:
            world.send(SlotFreed(lease.slot, lease.id))


@pytest.mark.parametrize("near", ["a", "b", "c"])
def test_model_is_loaded_on_the_named_node_when_all_gpus_are_idle(near: str) -> None:
    assert placed(nodes("a0", "b0", "c0"), "r", near=near) == f"{near}0"


@pytest.mark.parametrize("near", ["a", "b"])
def test_hit_on_the_named_node_is_taken_when_both_nodes_have_one(near: str) -> None:
    world = nodes("a0", "b0")
    warm(world, "a0", "b0")
    assert placed(world, "r", near=near) == f"{near}0"


def test_hit_elsewhere_is_taken_when_the_named_node_has_none() -> None:
    world = nodes("a0", "b0")
    warm(world, "a0")
    assert placed(world, "r", near="b") == "a0"


@pytest.mark.parametrize("near", ["nowhere", None])
def test_nothing_changes_when_the_named_node_is_not_there(near: str | None) -> None:
    assert placed(nodes("a0", "b0"), "r", near=near) == "a0"


def test_request_goes_elsewhere_when_the_named_node_is_busy_or_lost() -> None:
    world = nodes("a0", "b0")
    placed(world, "busy", "resnet", near="b")
    assert placed(world, "r", near="b") == "a0"
    world = nodes("a0", "b0")
    world.send(GpuLost(GpuId("b0")))
    assert placed(world, "r", near="b") == "a0"
