"""The one estimate of a placement: its parts, its neighbours, and where placements read it."""

from cache_manager.model.ids import ModelId, Tier
from scheduler.cluster.slots import Slot
from scheduler.composition import make_core
from scheduler.model.actions import Dispatch
from scheduler.model.events import GpuJoined, ModelRegistered, RequestArrived
from scheduler.model.profiles import Profiles
from scheduler.model.values import ANY_GPU_TYPE, CoreSettings, SlotId
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


def test_estimate_adds_loads_and_runs_of_all() -> None:
    assert profiles().all_loads_s((A, B), Tier.ABSENT) == 6.0
    assert profiles().runs_s((A, B), 1, ANY_GPU_TYPE, ()) == 1.5


def test_estimate_is_that_alone_beside_models_of_which_nothing_is_known() -> None:
    assert profiles().runs_s((A,), 1, ANY_GPU_TYPE, ((B,),)) == 1.0


def test_model_takes_turns_with_itself() -> None:
    assert profiles().runs_s((A,), 1, ANY_GPU_TYPE, ((A,), (A,))) == 3.0
    assert profiles().runs_s((A,), 1, ANY_GPU_TYPE, ((A, B),)) == 1.5
    assert profiles().slowdown((A, B), ANY_GPU_TYPE, ((A,),)) == 2.5 / 1.5


def test_estimate_is_longer_beside_what_is_predicted_to_disturb() -> None:
    known = profiles()
    known.predict_slowdowns(lambda model, _, leases: 2.0 if (model, leases) == (A, [(B,)]) else 1.0)
    assert known.runs_s((A,), 1, ANY_GPU_TYPE, ((B,),)) == 2.0
    assert known.runs_s((A,), 1, ANY_GPU_TYPE, ((B,), (A,))) == 3.0  # in turns with itself
    assert known.runs_s((B,), 1, ANY_GPU_TYPE, ((A,),)) == 0.5


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
