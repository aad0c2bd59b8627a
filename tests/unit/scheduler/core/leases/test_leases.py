"""A lease's life: given, released, perhaps wanted again, ended by its manager or cut off."""

import pytest

from cache_manager.model.ids import GpuId, ModelId, Tier
from scheduler import policies
from scheduler.model.actions import Dispatch, EndLease, Refuse
from scheduler.model.events import (
    GpuLost,
    LeaseReleased,
    LeaseWanted,
    LoadFailed,
    ModelLoaded,
    RequestArrived,
    RunFailed,
    SlotFreed,
)
from scheduler.model.values import AfterLoss, LeaseId, RequestId, RequestOutcome, SlotId
from tests.kit.cores.builders import a_core, gpu, holding, request
from tests.kit.cores.core_world import World, ended, only, placements, refused
from tests.kit.cores.invariants import Invariants

R0 = RequestId("r0")
G0 = gpu("g0").id


def running(*also_waiting: str) -> World:
    """r0 runs on g0, the only GPU; the others wait."""
    world = World(a_core("lb"))
    world.arrive(request("r0"), *(request(name) for name in also_waiting))
    return world


@pytest.mark.parametrize("policy", policies.available())
def test_lease_that_its_manager_took_back_goes_to_the_next_whatever_its_function_says_later(
    policy: str,
) -> None:
    world = World(a_core(policy))
    invariants = Invariants(world)
    for name in ("r0", "r1"):
        invariants.step(RequestArrived(request(name)))
    invariants.step(ModelLoaded(GpuId("g0"), ModelId("bert"), 2.0, Tier.ABSENT))
    taken = world.lease_on("g0")
    actions = invariants.step(SlotFreed(SlotId("g0"), taken))
    assert ended(actions) == {"r0": RequestOutcome.COMPLETED}
    assert placements(actions) == [("r1", "g0")]
    assert ended(invariants.step(LeaseReleased(taken))) == {}
    assert refused(invariants.step(LeaseWanted(R0))) == ["this request has ended"]
    assert ended(invariants.step(RequestArrived(request("again")))) == {}
    assert placements(world.free("g0")) == [("again", "g0")]


# -- release and end ------------------------------------------------------------------------------


def test_release_notifies_the_manager_and_ends_nothing_when_it_comes() -> None:
    world = running("r1")
    actions = world.release("g0")
    assert actions == [EndLease(SlotId("g0"), world.lease_on("g0"), "released")]


def test_request_is_completed_when_its_slot_is_freed() -> None:
    world = running("r1")
    world.release("g0")
    actions = world.free("g0")
    assert ended(actions) == {"r0": RequestOutcome.COMPLETED}
    assert placements(actions) == [("r1", "g0")]


def test_nothing_happens_when_a_slot_is_freed_twice() -> None:
    world = running("r1")
    lease = world.lease_on("g0")
    world.free("g0")
    assert world.send(SlotFreed(SlotId("g0"), lease)) == []
    assert world.core.requests.keys() == {"r1"}


def test_every_lease_has_a_number_of_its_own_when_slots_are_used_again() -> None:
    world = running("r1", "r2")
    leases = [world.lease_on("g0")]
    for _ in range(2):
        world.free("g0")
        leases.append(world.lease_on("g0"))
    assert leases == sorted(set(leases))


# -- leases that are given back early -------------------------------------------------------------


def paused(*also_waiting: str) -> World:
    """r0 gave its lease back early, and the slot was freed."""
    world = running(*also_waiting)
    world.release("g0", may_return=True)
    world.free("g0")
    return world


def test_request_stays_alive_when_it_gave_its_lease_back_early() -> None:
    world = paused("r1")
    assert R0 in world.core.requests
    assert not world.ends
    assert placements(world.answers[-1]) == [("r1", "g0")]


def test_request_comes_first_when_it_asks_for_its_lease_again() -> None:
    world = paused("r1", "r2")
    assert world.send(LeaseWanted(R0)) == []
    assert placements(world.free("g0")) == [("r0", "g0")]
    assert placements(world.free("g0")) == [("r2", "g0")]


def test_request_continues_at_once_when_it_asks_for_its_lease_and_a_gpu_is_idle() -> None:
    world = paused()
    dispatch = only(Dispatch, world.send(LeaseWanted(R0)))
    assert dispatch.requests == ("r0",)
    assert dispatch.hit


def test_request_waits_again_when_it_asks_for_its_lease_before_the_slot_is_freed() -> None:
    world = running("r1")
    world.release("g0", may_return=True)
    assert world.send(LeaseWanted(R0)) == []
    assert placements(world.free("g0")) == [("r0", "g0")]
    assert not world.ends


def test_request_is_completed_when_it_is_released_for_good_after_a_pause() -> None:
    world = running()
    lease = world.lease_on("g0")
    world.release("g0", may_return=True)
    world.free("g0")
    assert ended(world.send(LeaseReleased(lease))) == {"r0": RequestOutcome.COMPLETED}
    assert not world.core.requests


def test_request_is_completed_when_an_early_release_is_made_final() -> None:
    world = running()
    world.release("g0", may_return=True)
    world.release("g0")
    assert ended(world.free("g0")) == {"r0": RequestOutcome.COMPLETED}


def test_wish_is_refused_when_the_request_never_gave_its_lease_back() -> None:
    world = running("r1")
    for name in ("r0", "r1", "unknown"):
        assert refused(world.send(LeaseWanted(RequestId(name)))) != []


# -- what goes wrong ------------------------------------------------------------------------------


@pytest.mark.parametrize("after", AfterLoss)
def test_request_fails_or_waits_again_when_its_run_fails(after: AfterLoss) -> None:
    world = running("r1")
    actions = world.send(RunFailed(world.lease_on("g0"), "out of memory", after))
    assert placements(actions) == []
    if after is AfterLoss.FAIL:
        assert ended(actions) == {"r0": RequestOutcome.FAILED}
        assert placements(world.free("g0")) == [("r1", "g0")]
    else:
        assert placements(world.free("g0")) == [("r0", "g0")]


@pytest.mark.parametrize("after", AfterLoss)
def test_request_fails_or_waits_again_when_its_load_fails(after: AfterLoss) -> None:
    world = running("r1")
    actions = world.send(LoadFailed(G0, ModelId("bert"), "no such file", after))
    assert only(EndLease, actions).lease == world.lease_on("g0")
    assert ended(actions) == ({"r0": RequestOutcome.FAILED} if after is AfterLoss.FAIL else {})
    dispatch = only(Dispatch, world.free("g0"))
    assert dispatch.requests == (("r1",) if after is AfterLoss.FAIL else ("r0",))
    assert not dispatch.hit, "what could not be loaded is not there"


def test_failure_of_a_lease_of_the_past_is_nothing_when_it_comes_late() -> None:
    world = running()
    lease = world.lease_on("g0")
    world.free("g0")
    assert world.send(RunFailed(lease, "too late")) == []


def test_model_stays_locked_when_it_is_loaded_again_before_the_failed_lease_ends() -> None:
    """Two slots: lease 1's load fails, lease 2 loads the model again, then lease 1 ends."""
    world = World(a_core("lb", gpus=(gpu("g0", memory_mb=1024, slots=2),), models=("bert", "gpt")))
    world.arrive(request("r0"))
    world.send(LoadFailed(G0, ModelId("bert"), "no such file"))
    world.arrive(request("r1"))
    world.free("g0.0")
    assert world.arrive(request("r2", "gpt")) == [], "bert is in use and fills the GPU"
    assert placements(world.free("g0.1")) == [("r2", "g0.0")]


# -- lost GPUs ------------------------------------------------------------------------------------


def test_request_fails_when_its_gpu_is_lost() -> None:
    assert ended(running().send(GpuLost(G0))) == {"r0": RequestOutcome.FAILED}


def test_request_runs_elsewhere_when_its_gpu_is_lost_and_it_may_be_repeated() -> None:
    world = World(a_core("lb", gpus=("g0", "g1")))
    world.arrive(request("r0"))
    actions = world.send(GpuLost(G0, AfterLoss.REQUEUE))
    assert placements(actions) == [("r0", "g1")]
    assert not only(Dispatch, actions).hit


@pytest.mark.parametrize("after", AfterLoss)
def test_request_is_completed_when_it_was_released_before_its_gpu_was_lost(
    after: AfterLoss,
) -> None:
    world = running()
    world.release("g0")
    assert ended(world.send(GpuLost(G0, after))) == {"r0": RequestOutcome.COMPLETED}


def test_lease_is_not_given_again_when_its_request_was_cancelled_before_the_loss() -> None:
    world = running()
    world.send(LeaseReleased(LeaseId(99)))
    world.release("g0")
    world.send(GpuLost(G0, AfterLoss.REQUEUE))
    assert world.send(holding(gpu("g0"), "bert")) == []


def test_refusal_names_what_is_unknown_when_a_report_makes_no_sense() -> None:
    world = running()
    actions = world.send(LoadFailed(gpu("nowhere").id, ModelId("bert"), "x"))
    assert "nowhere" in only(Refuse, actions).reason
