"""Runs that had neighbours: what they teach, and what a policy is told of it."""

from statistics import fmean

import pytest

from cache_manager.model.ids import GpuId, ModelId, Tier
from scheduler.cluster.request_queue import Pending
from scheduler.cluster.slots import Slot
from scheduler.cluster.view import View
from scheduler.features.neighbours import Neighbours
from scheduler.model.events import ModelLoaded, ModelRegistered, RunFinished, SlotFreed
from scheduler.model.values import ANY_GPU_TYPE, METRICS, ModelSpec, Request, SlotId
from tests.kit.cores.builders import a_core, gpu, model, request
from tests.kit.cores.core_world import World

A, B = ModelId("a"), ModelId("b")
G0 = SlotId("g0")
MODELS = (model("a", load_s=0.0, run_s=1.0), model("b", load_s=0.0, run_s=4.0))


def a_world(*, at_once: bool = True, declared: bool = True) -> World:
    spec = gpu("g0", leases=2, at_once=at_once)
    models = MODELS if declared else [model(each.id, load_s=0.0, run_s={}) for each in MODELS]
    world = World(a_core("lb", gpus=(spec,), models=models))
    for name, value in (("a", 0.2), ("b", 0.8)):
        features = dict.fromkeys(METRICS, value)
        world.send(ModelRegistered(ModelSpec(ModelId(name), features=features)))
    return world


def slot_of(world: World) -> Slot:
    return world.core.cluster.slots[G0]


def runs(world: World, name: str, of: ModelId, run_s: float) -> None:
    """A request for the model runs so long, alone, from now on."""
    world.arrive(request(name, of))
    world.now += run_s
    world.send(RunFinished(G0, of, 1, run_s))
    world.send(SlotFreed(G0, world.lease_of(name)))


def asks(world: World) -> Pending:
    """A request for a that could be placed now."""
    return Pending(request("asked", A), world.core.cluster.bundle((A,)), 0, world.now)


def arrives(world: World, *requests: Request) -> None:
    """These arrive, and what they lack is loaded in no time."""
    world.arrive(*requests)
    for name in list(slot_of(world).gpu.loads):
        world.send(ModelLoaded(GpuId("g0"), name, 0.0, Tier.ABSENT))


def run_beside(world: World, number: int, run_s: float, other_s: float) -> None:
    """a and b begin at the same time, and end after these times, a first."""
    arrives(world, request(f"a{number}", A), request(f"b{number}", B))
    world.now += run_s
    world.send(RunFinished(G0, A, 1, run_s))
    world.send(SlotFreed(G0, world.lease_of(f"a{number}")))
    world.now += other_s - run_s
    world.send(RunFinished(G0, B, 1, other_s))
    world.send(SlotFreed(G0, world.lease_of(f"b{number}")))
    world.now += 30.0


def trained() -> World:
    """a takes twice as long beside b, b 1.5 times as long beside a for a part of its time."""
    world = a_world()
    runs(world, "first", A, 1.0)
    runs(world, "second", B, 4.0)
    for number in range(16):
        run_beside(world, number, 2.0, 5.0)
    return world


def slowdowns(world: World) -> list[float]:
    """Of the runs beside others that taught something."""
    learned = world.core.layer(Neighbours).learned[ANY_GPU_TYPE]
    return [slowdown for _, _, slowdown in learned.rows]


def test_run_beside_another_teaches_and_leaves_the_time_alone_as_it_was() -> None:
    world = trained()
    profiles = world.core.cluster.profiles
    assert profiles.run_s(A, 1, ANY_GPU_TYPE) == 1.0
    assert profiles.usual_run_s(B) == 4.0
    # b was beside a for less than half of its time, which teaches nothing
    assert slowdowns(world) == [2.0] * 16


def test_many_runs_of_one_pair_make_few_observations_with_their_mean() -> None:
    """40 runs of 0.1 s and more in a row, that take 2 and 3 times as long in turn."""
    world = a_world()
    runs(world, "first", A, 1.0)
    arrives(world, request("other", B))
    for number in range(40):
        world.arrive(request(f"a{number}", A))
        world.now += 2.0 + number % 2
        world.send(RunFinished(G0, A, 1, 2.0 + number % 2))
        world.send(SlotFreed(G0, world.lease_of(f"a{number}")))
    assert 8 <= len(slowdowns(world)) <= 14
    assert fmean(slowdowns(world)) == pytest.approx(2.5, abs=0.2)


def test_slot_in_turns_learns_nothing_and_takes_every_run_as_one_alone() -> None:
    world = a_world(at_once=False)
    runs(world, "first", A, 1.0)
    run_beside(world, 0, 2.0, 5.0)
    profiles = world.core.cluster.profiles
    assert profiles.run_s(A, 1, ANY_GPU_TYPE) > 1.0
    assert not world.core.layer(Neighbours).learned


def test_run_beside_another_stands_in_while_the_time_alone_is_not_known() -> None:
    """The core was told of no time; then of 1 s, by a run that was alone."""
    world = a_world(declared=False)
    run_beside(world, 0, 3.0, 5.0)
    profiles = world.core.cluster.profiles
    assert profiles.run_s(A, 1, ANY_GPU_TYPE) == 3.0
    assert profiles.usual_run_s(A) == 3.0
    assert profiles.alone_s(A, 1, ANY_GPU_TYPE) is None
    assert not world.core.layer(Neighbours).learned
    runs(world, "alone", A, 1.0)
    assert profiles.run_s(A, 1, ANY_GPU_TYPE) == profiles.alone_s(A, 1, ANY_GPU_TYPE) == 1.0
    run_beside(world, 1, 3.0, 5.0)
    assert profiles.run_s(A, 1, ANY_GPU_TYPE) == 1.0
    assert slowdowns(world) == [3.0]


def test_run_of_a_lease_that_is_not_known_teaches_nothing() -> None:
    world = a_world()
    world.send(RunFinished(G0, A, 1, 2.5))
    profiles = world.core.cluster.profiles
    assert profiles.alone_s(A, 1, ANY_GPU_TYPE) == 1.0  # as declared
    assert not world.core.layer(Neighbours).learned


def test_policy_is_told_what_a_request_suffers_and_does_beside_what_runs() -> None:
    world = trained()
    world.arrive(request("running", B))
    view, slot = View(world.core.cluster), slot_of(world)
    assert slot.neighbours() == ((B,),)
    asked = asks(world)
    assert view.slowdown(asked, slot) == pytest.approx(2.0, abs=0.1)
    assert view.run_s(asked, slot) == pytest.approx(2.0, abs=0.1)
    assert view.slows(asked, slot) >= 1.0
    left_s = 4.0 * (view.slows(asked, slot) - 1.0)
    assert view.disturbs(asked, slot) == pytest.approx(left_s)


def test_request_disturbs_nobody_on_an_empty_slot() -> None:
    world = trained()
    view, slot = View(world.core.cluster), slot_of(world)
    asked = asks(world)
    assert (view.slowdown(asked, slot), view.slows(asked, slot)) == (1.0, 1.0)
    assert view.disturbs(asked, slot) == 0.0


def test_what_runs_ends_later_when_a_request_joins_that_disturbs_it() -> None:
    """Two of one model take turns: each ends later by what the other one takes."""
    world = a_world()
    world.arrive(request("r0", B))
    (lease,) = slot_of(world).leases.values()
    due_s = lease.due_s
    world.arrive(request("r1", B))
    assert lease.due_s == due_s + 4.0


def test_prediction_is_one_for_a_type_of_gpu_of_which_nothing_was_learned() -> None:
    learned = trained().core.layer(Neighbours)
    assert learned.slowdown(A, ANY_GPU_TYPE, [(B,)]) == pytest.approx(2.0, abs=0.1)
    assert learned.slowdown(A, "another type", [(B,)]) == 1.0
    assert learned.slowdown(A, ANY_GPU_TYPE, [(B,), (ModelId("not measured"),)]) == 1.0
