"""When a slot should be free that has several leases, or one that is overdue."""

from cache_manager.model.ids import ModelId, Tier
from scheduler.model.events import ModelLoaded, RequestCancelled, RunFinished, SlotFreed
from scheduler.model.values import RequestId, SlotId
from tests.kit.cores.builders import a_core, gpu, model, request
from tests.kit.cores.core_world import World, placements

A, B = ModelId("a"), ModelId("b")
G0 = SlotId("g0")
SHARED = gpu("g0", leases=2)


def wait_s(world: World) -> float:
    """Seconds until g0 could begin one more request."""
    return world.core.cluster.slots[G0].wait_s(world.now)


def loads_at(world: World, name: ModelId, at: float) -> None:
    world.send(ModelLoaded(SHARED.id, name, at, Tier.ABSENT), at=at)


def load_beside_a_run(run_s: float) -> World:
    """a runs so long on g0 from 0 on, while b loads (2 s) and then runs (1 s) there."""
    models = (model("a", load_s=0.0, run_s=run_s), model("b", load_s=2.0, run_s=1.0))
    world = World(a_core("lb", gpus=(SHARED,), models=models))
    world.arrive(request("r0", "a"), request("r1", "b"))
    return world


def test_slot_is_busy_as_long_as_the_run_when_a_load_beside_it_ends() -> None:
    world = load_beside_a_run(100.0)
    loads_at(world, B, 2.0)
    assert 98.0 <= wait_s(world) <= 99.0


def test_slot_is_busy_as_long_as_the_run_when_a_load_beside_it_ends_early() -> None:
    world = load_beside_a_run(100.0)
    loads_at(world, B, 0.5)
    assert 99.5 <= wait_s(world) <= 100.5


def test_slot_is_busy_with_the_later_one_when_a_load_beside_a_run_ends_late() -> None:
    world = load_beside_a_run(10.0)
    loads_at(world, B, 50.0)
    assert wait_s(world) == 1.0


def test_load_counts_once_when_the_first_of_two_models_comes_early() -> None:
    """Expected: 10 s, 10 s, and two runs of 1 s."""
    models = (model("a", load_s=10.0, run_s=1.0), model("b", load_s=10.0, run_s=1.0))
    world = World(a_core("lb", models=models))
    world.arrive(request("r0", "a", "b"))
    assert wait_s(world) == 22.0
    loads_at(world, A, 5.0)
    assert 12.0 <= wait_s(world) <= 17.0
    loads_at(world, B, 15.0)
    assert wait_s(world) == 2.0


def test_finish_time_stays_near_the_one_lease_when_many_beside_it_are_cancelled() -> None:
    world = World(a_core("lb", gpus=(SHARED,)))
    world.arrive(request("keep"))
    alone_s = wait_s(world)
    for number in range(100):
        name = f"r{number}"
        world.arrive(request(name))
        world.send(RequestCancelled(RequestId(name)))
        world.send(SlotFreed(G0, world.lease_of(name)))
    assert alone_s - 1.0 <= wait_s(world) <= alone_s + 1.0


def test_finish_time_does_not_drift_when_runs_overlap_for_long() -> None:
    world = World(a_core("lb", gpus=(SHARED,), models=(model("a", load_s=0.0, run_s=1.0),)))
    world.arrive(request("r0", "a"), request("r1", "a"))
    for number in range(2, 1000):
        world.now = number * 0.5
        world.send(RunFinished(G0, A, 1, 0.5))
        world.free("g0")
        world.arrive(request(f"r{number}", "a"))
        assert 0.0 < wait_s(world) <= 3.0


def test_few_wait_for_an_overdue_gpu_when_another_is_idle() -> None:
    """A request a second and 40 at once: g0 is overdue by a minute, a load takes 2 s on g1."""
    models = (model("bert", load_s=2.0, run_s=1.0),)
    world = World(a_core("lalbo3", gpus=("g0", "g1"), models=models))
    world.arrive(request("r0"))
    placed = placements(world.arrive(*(request(f"r{n}") for n in range(1, 41)), at=60.0))
    where = [slot for _, slot in placed]
    assert where.count("queue of g0") <= 3
    assert "g1" in where
