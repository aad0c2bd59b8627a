"""The one estimate of a placement: its parts, its neighbours, and where placements read it."""

import pytest

from cache_manager.model.ids import ModelId, Tier
from scheduler.cluster.slots import Slot
from scheduler.composition import make_core
from scheduler.estimates import estimate
from scheduler.estimates.profiles import Profiles
from scheduler.estimates.resource_metrics import METRICS
from scheduler.model.actions import Dispatch
from scheduler.model.events import GpuJoined, ModelRegistered, RequestArrived
from scheduler.model.values import ANY_GPU_TYPE, CoreSettings, ModelSpec, SlotId
from tests.kit.cores.builders import gpu, model, request

A, B = ModelId("a"), ModelId("b")


def profiles() -> Profiles:
    known = Profiles(CoreSettings())
    known.declare(model("a", load_s=2.0, run_s=1.0))
    known.declare(model("b", load_s=4.0, run_s=0.5))
    return known


def slots_of(slots: int, leases: int, *, at_once: bool = False) -> dict[SlotId, Slot]:
    """The slots of one GPU, after as many requests of alternating models were placed there."""
    core = make_core("lb")
    spec = gpu("g0", slots=slots, leases=leases, at_once=at_once)
    core.handle(GpuJoined(spec), 0.0)
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


def test_estimate_is_that_alone_beside_models_of_which_nothing_is_known() -> None:
    assert estimate.run_s(profiles(), (A,), 1, ANY_GPU_TYPE, ((B,),)) == 1.0


def test_model_takes_turns_with_itself() -> None:
    assert estimate.run_s(profiles(), (A,), 1, ANY_GPU_TYPE, ((A,), (A,))) == 3.0
    assert estimate.run_s(profiles(), (A,), 1, ANY_GPU_TYPE, ((A, B),)) == 1.5
    assert estimate.slowdown(profiles(), (A, B), ANY_GPU_TYPE, ((A,),)) == 2.5 / 1.5


def test_estimate_is_longer_beside_what_was_learned_to_disturb() -> None:
    known = profiles()
    own, other = tuple([0.2] * 13), tuple([0.9] * 13)
    for name, metrics in (("a", own), ("b", other)):
        features = dict(zip(METRICS, metrics, strict=True))
        known.declare(ModelSpec(ModelId(name), features=features))
    for _ in range(16):
        known.interference.observe(ANY_GPU_TYPE, own, [other], 2.0)
        known.interference.observe(ANY_GPU_TYPE, other, [own], 1.25)
    assert estimate.run_s(known, (A,), 1, ANY_GPU_TYPE, ((B,),)) == pytest.approx(2.0, abs=0.05)
    assert estimate.run_s(known, (B,), 1, ANY_GPU_TYPE, ((A,),)) == pytest.approx(0.62, abs=0.05)
    assert estimate.run_s(known, (A,), 1, "another type", ((B,),)) == 1.0


def test_slot_has_no_neighbours_when_its_gpu_holds_one_lease_at_a_time() -> None:
    assert slots_of(1, 1)[SlotId("g0")].neighbours() == ()


def test_slot_has_no_neighbours_when_its_leases_take_turns() -> None:
    assert slots_of(1, 2)[SlotId("g0")].neighbours() == ()
    assert slots_of(2, 2, at_once=True)[SlotId("g0.0")].neighbours() == ()  # a part of its GPU


def test_neighbours_are_the_models_of_each_lease_when_these_run_at_once() -> None:
    assert slots_of(1, 3, at_once=True)[SlotId("g0")].neighbours() == ((A,), (B,))


def test_neighbours_of_a_full_slot_are_those_that_do_not_end_first() -> None:
    """b, which came second, ends as early as a; one of both is over when a third one begins."""
    assert slots_of(1, 2, at_once=True)[SlotId("g0")].neighbours() == ((B,),)
