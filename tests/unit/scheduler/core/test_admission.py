"""Which requests are accepted, and which expire: bounds, GPUs yet to join, old timers."""

import pytest

from cache_manager.model.ids import GpuId, ModelId
from scheduler import policies
from scheduler.model.actions import SetTimer
from scheduler.model.events import GpuJoined, ModelRegistered
from scheduler.model.values import CoreSettings, RequestId, RequestOutcome
from tests.kit.cores.builders import GIB, a_core, gpu, model, request
from tests.kit.cores.core_world import World, ended, only, placements

BIG = model("big", memory_mb=6000)


def expecting(largest_gib: int) -> World:
    """No GPU is there yet; the largest one to come has so much memory."""
    settings = CoreSettings(largest_gpu_bytes=largest_gib * GIB)
    return World(a_core("lb", gpus=(), models=(BIG,), settings=settings))


def test_request_waits_for_the_expected_gpu_when_a_smaller_one_joins_first() -> None:
    world = expecting(8)
    assert world.arrive(request("r0", "big")) == []
    assert world.send(GpuJoined(gpu("small", memory_mb=2000))) == []
    assert world.arrive(request("r1", "big")) == []
    assert placements(world.send(GpuJoined(gpu("large")))) == [("r0", "large")]


def test_request_is_too_large_when_no_expected_gpu_could_hold_it() -> None:
    assert ended(expecting(4).arrive(request("r0", "big"))) == {"r0": RequestOutcome.TOO_LARGE}


@pytest.mark.parametrize("policy", policies.available())
def test_queue_is_full_when_so_many_wait_in_any_queue(policy: str) -> None:
    """One runs, two may wait: in the global queue, or under rr in that of the GPU."""
    world = World(a_core(policy, settings=CoreSettings(max_waiting=2)))
    actions = world.arrive(*(request(f"r{number}") for number in range(5)))
    assert ended(actions) == {"r3": RequestOutcome.QUEUE_FULL, "r4": RequestOutcome.QUEUE_FULL}
    world.free("g0")
    assert ended(world.arrive(request("r5"), request("r6"))) == {"r6": RequestOutcome.QUEUE_FULL}


@pytest.mark.parametrize("policy", policies.available())
def test_request_for_registered_models_fails_when_no_node_has_registered_one(policy: str) -> None:
    """The neighbour's model stays, though it is idle and would have to make room."""
    world = World(a_core(policy, gpus=[gpu("g0", memory_mb=1500)]))
    world.arrive(request("r0"))
    world.free("g0")
    residents = dict(world.core.cluster.gpus[GpuId("g0")].cache.residents)
    invented = request("r1", "bert", "invented")._replace(registered_only=True)

    actions = world.arrive(invented)

    assert ended(actions) == {"r1": RequestOutcome.FAILED}
    assert len(actions) == 1
    assert world.core.cluster.gpus[GpuId("g0")].cache.residents == residents
    assert ModelId("invented") not in world.core.cluster.profiles.known()
    world.send(ModelRegistered(model("invented", memory_mb=100)))
    assert ("r2", "g0") in placements(world.arrive(invented._replace(id=RequestId("r2"))))


def test_request_stays_when_the_timer_is_of_an_earlier_one_of_its_name() -> None:
    world = World(a_core("lb"))
    timer = only(SetTimer, world.arrive(request("r0", deadline_s=10.0)))
    world.free("g0", at=1.0)
    later = only(SetTimer, world.arrive(request("r0", deadline_s=100.0), at=5.0))
    assert world.send(timer.event, at=10.0) == []
    assert ended(world.send(later.event, at=100.0)) == {"r0": RequestOutcome.EXPIRED}


def test_request_stays_when_the_timer_is_of_one_that_had_a_deadline_and_it_has_none() -> None:
    world = World(a_core("lb"))
    timer = only(SetTimer, world.arrive(request("r0", deadline_s=10.0)))
    world.free("g0", at=1.0)
    world.arrive(request("r0"), at=5.0)
    assert world.send(timer.event, at=10.0) == []
