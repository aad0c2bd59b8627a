"""Requests whose room is gone where they wait, and those that have room behind one that has not."""

import pytest

from cache_manager.model.ids import ModelId, Tier
from scheduler.model.events import ModelLoaded, PinAsked, RunFinished
from scheduler.model.values import SlotId
from tests.kit.cores.builders import GIB, a_core, gpu, model, request
from tests.kit.cores.core_world import World, placements

BERT = ModelId("bert")


def test_local_queue_is_given_back_when_a_pin_without_a_gpu_takes_its_room() -> None:
    """bert, of which only g0 has a copy, leaves no room there for big."""
    models = ("bert", "other", model("big", memory_mb=2048))
    gpus = (gpu("g0", memory_mb=2048), gpu("g1", memory_mb=2048))
    world = World(a_core("rr", gpus=gpus, models=models))
    placed = placements(world.arrive(request("r0"), request("r1", "other"), request("r2", "big")))
    assert placed[-1] == ("r2", "queue of g0")
    assert placements(world.send(PinAsked(BERT))) == [("r2", "queue of g1")]


@pytest.mark.parametrize("loaded", [True, False], ids=["load", "run"])
def test_request_goes_elsewhere_at_once_when_its_model_is_measured_too_large(loaded: bool) -> None:  # noqa: FBT001 (a case)
    """r3 waits for the small g0, where bert turns out not to fit; g2 is idle."""
    gpus = (gpu("g0", memory_mb=2048), gpu("g1"), gpu("g2"))
    world = World(a_core("rr", gpus=gpus, models=("bert", "other")))
    world.arrive(request("r0", "other"), request("r1"), request("r2", "other"))
    assert placements(world.arrive(request("r3"))) == [("r3", "queue of g0")]
    world.free("g2")
    measured = (
        ModelLoaded(gpus[1].id, BERT, 2.0, Tier.ABSENT, 4 * GIB)
        if loaded
        else RunFinished(SlotId("g1"), BERT, 1, 1.0, 4 * GIB)
    )
    actions = world.send(measured)
    assert [request for request, _ in placements(actions)] == ["r3"]
    assert "g0" not in placements(actions)[0][1]


@pytest.mark.parametrize("policy", ["lb", "lalb", "lalbo3", "netgain"])
def test_first_request_is_placed_when_it_fits_beside_what_runs(policy: str) -> None:
    """g0 has room for a second lease; hundreds of other models wait behind."""
    models = [model("bert"), *(model(f"m{number}", memory_mb=7168) for number in range(300))]
    world = World(a_core(policy, gpus=(gpu("g0", leases=2),), models=models))
    world.arrive(request("r0"), request("r1"))
    world.arrive(*(request(f"q{number}", f"m{number}") for number in range(300)))
    assert placements(world.free("g0")) == [("q0", "g0")]


@pytest.mark.parametrize("policy", ["lb", "lalb", "lalbo3", "netgain"])
def test_next_request_is_placed_when_the_first_has_no_room_beside_what_runs(policy: str) -> None:
    models = ("bert", "small", model("wide", memory_mb=8192))
    world = World(a_core(policy, gpus=(gpu("g0", leases=2),), models=models))
    world.arrive(request("r0"))
    assert world.arrive(request("first", "wide")) == []
    assert placements(world.arrive(request("second", "small"))) == [("second", "g0")]
    assert placements(world.free("g0")) == []
    assert placements(world.free("g0")) == [("first", "g0")]
