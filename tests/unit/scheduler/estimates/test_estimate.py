"""The one estimate of a placement: its parts, its neighbours, and where placements read it."""

import pytest

from cache_manager.model.ids import ModelId, Tier
from scheduler.core.core import make_core
from scheduler.core.state.slots import Slot
from scheduler.estimates import estimate
from scheduler.estimates.profiles import Profiles
from scheduler.model.actions import Dispatch
from scheduler.model.events import GpuJoined, ModelRegistered, RequestArrived
from scheduler.model.values import ANY_GPU_TYPE, CoreSettings, SlotId
from tests.kit.cores.builders import gpu, model, request

A, B = ModelId("a"), ModelId("b")


def profiles() -> Profiles:
    known = Profiles(CoreSettings())
    known.declare(model("a", load_s=2.0, run_s=1.0))
    known.declare(model("b", load_s=4.0, run_s=0.5))
    return known


def slots_of(slots: int, leases: int) -> dict[SlotId, Slot]:
    """The slots of one GPU, after as many requests of alternating models were placed there."""
    core = make_core("lb")
    core.handle(GpuJoined(gpu("g0", slots=slots, leases=leases)), 0.0)
    for each in ("a", "b"):
        core.handle(ModelRegistered(model(each)), 0.0)
    placed = 0
    for number in range(2):
        event = RequestArrived(request(f"r{number}", "ab"[number]))
        placed += sum(isinstance(action, Dispatch) for action in core.handle(event, 1.0))
    assert placed == min(2, slots * leases)
    return core.cluster.slots


def test_estimate_adds_loads_of_missing_models_and_runs_of_all() -> None:
    assert estimate.load_s(profiles(), [(B, Tier.ABSENT)]) == 4.0
    assert estimate.run_s(profiles(), (A, B), 1, ANY_GPU_TYPE, ()) == 1.5


@pytest.mark.parametrize("neighbours", [(), (B,), (A, B, B)])
def test_estimate_is_not_changed_by_neighbours_yet(neighbours: tuple[ModelId, ...]) -> None:
    assert estimate.run_s(profiles(), (A,), 1, ANY_GPU_TYPE, neighbours) == 1.0


def test_slot_has_no_neighbours_when_its_gpu_holds_one_lease_at_a_time() -> None:
    assert slots_of(1, 1)[SlotId("g0")].neighbours() == ()


def test_neighbours_are_the_models_of_the_other_slots_when_a_gpu_is_partitioned() -> None:
    slots = slots_of(2, 1)
    assert slots[SlotId("g0.0")].neighbours() == (B,)
    assert slots[SlotId("g0.1")].neighbours() == (A,)


def test_neighbours_are_the_models_of_the_same_slot_when_it_holds_several_leases() -> None:
    assert slots_of(1, 2)[SlotId("g0")].neighbours() == (A, B)
