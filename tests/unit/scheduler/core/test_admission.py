"""Which requests are accepted, and which expire: bounds, GPUs yet to join, old timers."""

import pytest

from scheduler import policies
from scheduler.model.actions import SetTimer
from scheduler.model.events import GpuJoined
from scheduler.model.values import CoreSettings, RequestOutcome
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
