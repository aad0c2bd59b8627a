"""What the core keeps for its orders stays small, however many requests it has served."""

import gc
from collections.abc import Iterator, Mapping
from random import Random

import pytest

from cache_manager.model.ids import GpuId, ModelId, Tier
from scheduler import policies
from scheduler.core.core import Core
from scheduler.features.staged_exit import StagedExit
from scheduler.model.events import (
    GpuJoined,
    GpuLost,
    LeaseWanted,
    ModelLoaded,
    PinAsked,
    PolicySet,
    RequestCancelled,
)
from scheduler.model.values import AfterLoss, CoreSettings, RequestId
from tests.kit.cores.builders import a_core, gpu, model, request
from tests.kit.cores.core_world import World

MOST = 300
MODELS = tuple(
    model(f"m{number}", memory_mb=1500, run_s=run_s)
    for number, run_s in enumerate((0.1, 1.0, 10.0, 1.0, 5.0, 0.5))
)
GPUS = ("g0", gpu("g1", memory_mb=6000, slots=2), gpu("g2", leases=2))

# What a policy makes the core keep: nothing but the arrivals, visits and queues of GPUs, queues in
# which hits go first, and orders by what a request gains. Other policies ask for parts of these.
each_policy = pytest.mark.parametrize("policy", ["lb", "lalbo3", "rro3", "gain"])


def world_of(policy: str) -> World:
    """Three small GPUs of three kinds, six models, and at most forty that wait."""
    settings = CoreSettings(max_waiting=40)
    return World(a_core(policy, gpus=GPUS, models=MODELS, settings=settings))


def parts(thing: object) -> Iterator[object]:
    """What an object of ours, or a collection, refers to."""
    if isinstance(thing, Mapping):
        yield from thing.keys()
        yield from thing.values()
    elif isinstance(thing, list | tuple | set | frozenset):
        yield from thing
    elif type(thing).__module__.startswith(("scheduler.", "cache_manager.")):
        yield from gc.get_referents(thing)  # compiled classes have no list of their slots


def largest_collection(core: Core, *, but: object = None) -> int:
    """The length of the longest list, dict or set that the core refers to, directly or not.

    What `but` refers to is not looked at.
    """
    largest, seen = 0, {id(but)}
    pending: list[object] = [
        core.cluster,
        core.placer,
        core.cluster.visits,
        core.lifecycle,
        core.fleet,
    ]
    pending.append(core.layer(StagedExit))
    while pending:
        thing = pending.pop()
        if id(thing) in seen or isinstance(thing, str | int | float):
            continue
        seen.add(id(thing))
        if isinstance(thing, list | dict | set):
            largest = max(largest, len(thing))
        pending.extend(parts(thing))
    assert largest, "nothing was looked at"
    return largest


def serve(world: World, requests: int, *, longest_s: float, seed: int = 0) -> Iterator[int]:
    """So many arrivals, a random lease freed for each; the books are cleared as it goes."""
    random = Random(seed)
    for number in range(requests):
        world.now += random.random() * longest_s
        world.arrive(request(f"r{number}", f"m{random.randrange(6)}"))
        if world.leases and number % 40:
            lease = random.choice(list(world.leases.values()))
            world.free(lease.slot)
        yield number
        world.log.clear()
        world.answers.clear()


@each_policy
@pytest.mark.parametrize("longest_s", [0.01, 2.0], ids=["early finishes", "slow"])
def test_memory_is_bounded_when_requests_keep_coming(policy: str, longest_s: float) -> None:
    world = world_of(policy)
    for _ in serve(world, 3000, longest_s=longest_s):
        pass
    assert largest_collection(world.core) <= MOST


@each_policy
def test_memory_is_bounded_when_gpus_come_and_go(policy: str) -> None:
    world = world_of(policy)
    for number in serve(world, 1500, longest_s=0.5):
        world.send(GpuJoined(gpu(f"h{number}")))
        world.send(GpuLost(GpuId(f"h{number}"), AfterLoss.REQUEUE))
    # The handover remembers some thousand leases that were cut off, and has tests of its own.
    assert largest_collection(world.core, but=world.core.lifecycle.handover) <= MOST


@each_policy
def test_memory_is_bounded_when_idle_gpus_come_and_go_and_nothing_else_happens(policy: str) -> None:
    world = world_of(policy)
    for number in range(1000):
        world.send(GpuJoined(gpu(f"h{number}")))
        world.send(GpuLost(GpuId(f"h{number}")))
    assert largest_collection(world.core) <= MOST


@each_policy
def test_memory_is_bounded_when_one_request_never_fits(policy: str) -> None:
    world = World(a_core(policy, models=(*MODELS, model("pin"), model("wide", memory_mb=8000))))
    world.send(PinAsked(ModelId("pin"), GpuId("g0")))
    world.send(ModelLoaded(GpuId("g0"), ModelId("pin"), 2.0, Tier.ABSENT))
    world.free("g0")
    world.arrive(request("stuck", "wide"))
    for _ in serve(world, 2000, longest_s=0.5):
        pass
    while world.leases:
        world.free("g0")
    assert largest_collection(world.core) <= MOST
    assert RequestId("stuck") in world.core.requests


@each_policy
def test_memory_is_bounded_when_many_are_cancelled_or_return(policy: str) -> None:
    world = world_of(policy)
    for number in serve(world, 1500, longest_s=0.5):
        if number % 2:
            world.send(RequestCancelled(RequestId(f"r{number}")))
        elif world.leases:
            lease = next(iter(world.leases.values()))
            world.release(lease.slot, may_return=True)
            world.free(lease.slot)
            for name in lease.requests:
                world.send(LeaseWanted(name))
                world.send(RequestCancelled(name))
    assert largest_collection(world.core) <= MOST


def test_memory_is_bounded_when_the_policy_changes_often() -> None:
    world = world_of("lb")
    names = policies.available()
    for number in serve(world, 2000, longest_s=0.5):
        if number % 7 == 0:
            world.send(PolicySet(names[number % len(names)]))
    assert largest_collection(world.core) <= MOST
