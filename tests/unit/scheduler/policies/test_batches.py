"""Dispatches of several requests, and half GPUs: shapes that the thesis's policies never use.

A throw-away policy sends pairs of requests of the same models to the two slots of one GPU.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from msgspec.structs import replace

from cache_manager import eviction
from scheduler.cluster.view import View
from scheduler.composition import compose
from scheduler.model.actions import Dispatch, Finish, Prepare
from scheduler.model.events import (
    GpuJoined,
    GpuLost,
    ModelRegistered,
    RequestArrived,
    RequestCancelled,
    RunFailed,
)
from scheduler.model.values import AfterLoss, Estimate, Request, RequestId, RequestOutcome
from scheduler.policies.placement_policy import Decision, Place
from tests.kit.cores import builders
from tests.kit.cores.builders import gpu, model
from tests.kit.cores.core_world import World, ended, only, placements

BERT = model("bert", load_s=2.0, run_s={(1, "any"): 1.0, (2, "any"): 1.25})


@dataclass(frozen=True)
class Pairs:
    """Two waiting requests of the same models go to an idle slot; one alone waits."""

    def decide(self, view: View) -> Iterator[Decision]:
        for slot in view.idle_slots():
            head = view.head(slot)
            pair = view.waiting_like(head, 2) if head is not None else []
            if len(pair) == 2:
                yield Place(tuple(pair), slot, "a pair")


def request(name: str, *models: str) -> Request:
    """One of the same function as all others."""
    return replace(builders.request(name, *models), function="t/f")


def half_gpus() -> World:
    world = World(compose(Pairs(), eviction.make("lru")))
    world.send(ModelRegistered(BERT))
    world.send(ModelRegistered(model("resnet")))
    world.send(GpuJoined(gpu("g0", slots=2)))
    return world


def test_batch_waits_when_one_request_is_alone() -> None:
    assert half_gpus().arrive(request("r0")) == []


def test_batch_takes_one_lease_when_a_pair_is_there() -> None:
    world = half_gpus()
    world.arrive(request("r0"))
    dispatch = only(Dispatch, world.arrive(request("r1")))
    assert dispatch.requests == ("r0", "r1")
    assert dispatch.slot == "g0.0"
    assert dispatch.estimate == Estimate(load_s=2.0, run_s=1.25)


def test_batch_passes_over_other_models_when_it_is_made() -> None:
    world = half_gpus()
    actions = world.arrive(request("r0"), request("r1", "resnet"), request("r2"))
    assert placements(actions) == [("r0", "g0.0"), ("r2", "g0.0")]


def test_batch_finds_its_models_when_the_other_half_of_the_gpu_loads_them() -> None:
    world = half_gpus()
    world.arrive(request("r0"), request("r1"), request("r2"))
    actions = world.arrive(request("r3"))
    assert only(Dispatch, actions).slot == "g0.1"
    assert only(Dispatch, actions).hit
    assert not [action for action in actions if isinstance(action, Prepare)]


def test_batch_waits_when_both_halves_are_busy() -> None:
    world = half_gpus()
    world.arrive(*(request(f"r{number}") for number in range(4)))
    assert world.arrive(request("r4"), request("r5")) == []
    assert placements(world.free("g0.1")) == [("r4", "g0.1"), ("r5", "g0.1")]


def test_batch_ends_for_all_when_its_slot_is_freed() -> None:
    world = half_gpus()
    world.arrive(request("r0"), request("r1"))
    assert ended(world.free("g0.0")) == {
        "r0": RequestOutcome.COMPLETED,
        "r1": RequestOutcome.COMPLETED,
    }


def test_batch_keeps_its_lease_when_one_of_two_is_cancelled() -> None:
    world = half_gpus()
    world.arrive(request("r0"), request("r1"))
    actions = world.send(RequestCancelled(RequestId("r0")))
    assert actions == [Finish(RequestId("r0"), RequestOutcome.CANCELLED, "the caller went away")]
    assert ended(world.free("g0.0")) == {"r1": RequestOutcome.COMPLETED}


def test_batch_fails_for_all_when_its_run_fails() -> None:
    world = half_gpus()
    world.arrive(request("r0"), request("r1"))
    actions = world.send(RunFailed(world.lease_on("g0.0"), "out of memory"))
    assert ended(actions) == {"r0": RequestOutcome.FAILED, "r1": RequestOutcome.FAILED}


def test_batch_is_made_again_in_order_when_its_gpu_is_lost() -> None:
    world = half_gpus()
    world.arrive(request("r0"), request("r1"))
    world.send(GpuLost(gpu("g0").id, AfterLoss.REQUEUE))
    actions = world.send(GpuJoined(gpu("g1")))
    assert placements(actions) == [("r0", "g1"), ("r1", "g1")]


def test_batch_is_the_answer_to_both_when_one_asks_again() -> None:
    world = half_gpus()
    world.arrive(request("r0"))
    dispatch = only(Dispatch, world.arrive(request("r1")))
    assert world.send(RequestArrived(request("r0"))) == [dispatch]
