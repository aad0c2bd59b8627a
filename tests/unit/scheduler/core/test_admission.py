"""Which requests are accepted, and which expire: bounds, waits, GPUs yet to join, old timers."""

import pytest
from msgspec.structs import replace

from cache_manager.model.ids import GpuId, ModelId
from scheduler import policies
from scheduler.model.actions import SetTimer
from scheduler.model.events import (
    GpuDraining,
    GpuJoined,
    GpuLost,
    ModelRegistered,
    NodeHeard,
    NodeSilent,
)
from scheduler.model.values import AfterLoss, CoreSettings, RequestId, RequestOutcome
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


# Where namespaces take turns, one alone does not fill the queue: see test_tenants.
WITHOUT_TURNS = [name for name in policies.available() if not policies.takes(name, "lead_s")]


@pytest.mark.parametrize("policy", WITHOUT_TURNS)
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
    invented = replace(request("r1", "bert", "invented"), registered_only=True)

    actions = world.arrive(invented)

    assert ended(actions) == {"r1": RequestOutcome.FAILED}
    assert len(actions) == 1
    assert world.core.cluster.gpus[GpuId("g0")].cache.residents == residents
    assert ModelId("invented") not in world.core.cluster.profiles.known
    world.send(ModelRegistered(model("invented", memory_mb=100)))
    assert ("r2", "g0") in placements(world.arrive(replace(invented, id=RequestId("r2"))))


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


def one_a_second(policy: str, waiting: int) -> World:
    """A busy GPU that has served two requests, one a second; so many others wait."""
    world = World(a_core(policy))
    world.arrive(*(request(f"w{number}") for number in range(waiting + 3)))
    for second in (1.0, 2.0):
        world.free("g0", at=second)
    return world


@pytest.mark.parametrize("policy", policies.available())
def test_request_is_refused_when_those_before_it_need_longer_than_it_may_wait(policy: str) -> None:
    world = one_a_second(policy, waiting=6)
    late, in_time = request("late", max_wait_s=5.5), request("in_time", max_wait_s=6.5)
    assert ended(world.arrive(late)) == {"late": RequestOutcome.QUEUE_FULL}
    assert ended(world.arrive(in_time)) == {}
    assert ended(world.arrive(request("patient"))) == {}


@pytest.mark.parametrize("policy", policies.available())
def test_request_is_refused_when_its_deadline_passes_before_its_turn(policy: str) -> None:
    world = one_a_second(policy, waiting=6)
    hasty = request("hasty", max_wait_s=60.0, deadline_s=world.now + 5.0)
    assert ended(world.arrive(hasty)) == {"hasty": RequestOutcome.QUEUE_FULL}


def test_burst_is_accepted_when_nothing_has_been_measured() -> None:
    world = World(a_core("lalbo3"))
    burst = [request(f"r{number}", max_wait_s=0.5) for number in range(50)]
    assert ended(world.arrive(*burst)) == {}


def test_times_without_waiting_requests_do_not_count_as_slowness() -> None:
    """Hours between two requests show that few were sent, not that the GPU is slow."""
    world = one_a_second("lalbo3", waiting=0)
    world.free("g0", at=3.0)
    world.arrive(*(request(f"r{number}") for number in range(3)), at=7200.0)
    world.free("g0", at=7201.0)
    soon = request("soon", max_wait_s=1.5)
    assert ended(world.arrive(soon)) == {}


@pytest.mark.parametrize("loss", ["silence", "loss", "draining"])
def test_time_without_a_gpu_does_not_count_as_slowness(loss: str) -> None:
    """A queue that stood for a minute moves as before once a GPU is there."""
    world = one_a_second("lalbo3", waiting=12)
    g0 = gpu("g0")
    if loss == "silence":
        world.send(NodeSilent(g0.node))
        world.send(NodeHeard(g0.node), at=world.now + 60.0)
    elif loss == "loss":
        world.send(GpuLost(g0.id, AfterLoss.REQUEUE))
        world.send(GpuJoined(g0), at=world.now + 60.0)
    else:
        world.send(GpuDraining(g0.id))
        world.free("g0")
        world.send(GpuJoined(g0), at=world.now + 60.0)
    world.free("g0", at=world.now + 1.0)
    assert world.core.cluster.pace.wait_s(10) == pytest.approx(10.0, rel=0.2)


def test_request_is_accepted_beside_one_that_fits_nowhere_when_a_gpu_is_idle() -> None:
    world = one_a_second("lalbo3", waiting=1)
    world.free("g0", at=30.0)
    world.free("g0", at=60.0)
    world.send(GpuJoined(gpu("g1")))
    assert ended(world.arrive(request("soon", max_wait_s=0.1))) == {}


def test_wait_is_measured_anew_when_the_gpus_become_slower() -> None:
    world = one_a_second("lalbo3", waiting=12)
    for at in (12.0, 22.0, 32.0):
        world.free("g0", at=at)
    assert world.core.lifecycle.expected_wait_s("f") > 5 * world.core.cluster.queued
