"""Slots whose leases run at once: finish times, and memory for the peaks of all of them."""

from cache_manager.model.ids import ModelId, Tier
from scheduler.model.events import LeaseUsed, ModelLoaded, RunFinished, SlotFreed
from scheduler.model.values import LeaseUse, RequestId, SlotId
from tests.kit.cores.builders import GIB, a_core, gpu, model, request
from tests.kit.cores.core_world import World, placements

A, B = ModelId("a"), ModelId("b")
G0 = SlotId("g0")
PAIR = gpu("g0", leases=2, at_once=True)
MODELS = (model("a", load_s=0.0, run_s=10.0), model("b", load_s=2.0, run_s=1.0))


def wait_s(world: World) -> float:
    """Seconds until g0 could begin one more request."""
    return world.core.cluster.slots[G0].wait_s(world.now)


def test_slot_has_room_when_the_first_of_its_runs_ends() -> None:
    world = World(a_core("lb", gpus=(PAIR,), models=MODELS))
    world.arrive(request("r0", "a"))
    assert wait_s(world) == 0.0
    world.arrive(request("r1", "b"))
    assert wait_s(world) == 3.0
    world.send(ModelLoaded(PAIR.id, B, 1.0, Tier.ABSENT), at=1.0)
    assert wait_s(world) == 1.0
    world.now = 2.0
    world.send(SlotFreed(G0, world.lease_of("r1")))
    assert wait_s(world) == 0.0


def test_slot_is_free_later_when_the_lease_that_should_have_ended_is_overdue() -> None:
    world = World(a_core("lb", gpus=(PAIR,), models=MODELS))
    world.arrive(request("r0", "a"), request("r1", "b"))
    world.now = 60.0
    assert wait_s(world) == 0.0  # both are overdue, and count as ending now


def test_local_queue_is_served_by_as_many_leases_as_run_at_once() -> None:
    world = World(a_core("rr", gpus=(PAIR,), models=MODELS))
    world.arrive(request("r0", "a"), request("r1", "a"))
    world.arrive(request("r2", "b"), request("r3", "b"))
    assert world.core.cluster.slots[G0].local_s == 1.0  # two of 1 s, two at a time


def test_calls_of_one_model_take_turns_in_a_local_queue_too() -> None:
    world = World(a_core("rr", gpus=(PAIR,), models=MODELS))
    world.arrive(*(request(f"r{number}", "a") for number in range(4)))
    assert world.core.cluster.slots[G0].local_s == 20.0


def test_two_are_not_placed_together_when_their_measured_peaks_do_not_fit() -> None:
    """Declared they would fit; a is measured to need 6 of the 8 GiB while it runs."""
    models = (model("a", load_s=0.0), model("b", memory_mb=4096), model("small", memory_mb=1024))
    world = World(a_core("lb", gpus=(PAIR,), models=models))
    world.arrive(request("r0", "a"))
    world.send(RunFinished(G0, A, 1, 1.0, 6 * GIB))
    assert world.arrive(request("r1", "b")) == []
    assert placements(world.arrive(request("r2", "small"))) == [("r2", "g0")]
    assert placements(world.free("g0")) == [("r1", "g0")]


def test_second_lease_is_given_at_once_after_calls_under_the_first_one() -> None:
    world = World(a_core("lalbo3", gpus=(PAIR,), models=MODELS))
    world.arrive(request("r0", "a"))
    calls = LeaseUse(RequestId("u0"), 1.0, 1.0, 1.5), LeaseUse(RequestId("u1"), 1.5, 1.5, 2.0)
    world.send(LeaseUsed(world.lease_of("r0"), "f", calls), at=2.0)
    assert placements(world.arrive(request("r1", "b"))) == [("r1", "g0")]
