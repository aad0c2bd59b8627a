"""A request's way in and out: accepted, refused, asked again, expired, cancelled."""

import pytest

from scheduler.model.actions import Dispatch, EndLease, Finish, Prepare, Refuse, SetTimer
from scheduler.model.events import DeadlinePassed, GpuJoined, RequestArrived, RequestCancelled
from scheduler.model.values import CoreSettings, Request, RequestId, RequestOutcome
from tests.kit.cores.builders import a_core, gpu, model, request
from tests.kit.cores.core_world import World, ended, only, placements

R0 = RequestId("r0")


def busy_world(policy: str = "lb") -> World:
    """One GPU that `first` keeps busy."""
    world = World(a_core(policy))
    world.arrive(request("first"))
    return world


# -- in -------------------------------------------------------------------------------------------


def test_request_is_dispatched_when_a_gpu_is_idle() -> None:
    dispatch = only(Dispatch, World(a_core()).arrive(request("r0")))
    assert (dispatch.slot, dispatch.gpu, dispatch.node) == ("g0", "g0", "node-of-g0")
    assert dispatch.requests == ("r0",)
    assert not dispatch.hit


def test_request_waits_when_every_gpu_is_busy() -> None:
    world = busy_world()
    assert world.arrive(request("r0")) == []
    assert R0 in world.core.requests


def test_request_waits_when_there_is_no_gpu_yet() -> None:
    assert World(a_core(gpus=())).arrive(request("r0")) == []


def test_request_for_nothing_is_refused_when_it_arrives() -> None:
    world = World(a_core())
    empty = RequestArrived(Request(R0, "f", ()))
    assert only(Refuse, world.send(empty)).event == empty
    assert not world.core.requests


def test_request_naming_a_model_twice_is_one_load_when_it_arrives() -> None:
    world = World(a_core())
    world.arrive(request("r0", "bert", "bert"))
    (prepare,) = [action for action in world.answers[-1] if isinstance(action, Prepare)]
    assert [load.model for load in prepare.loads] == ["bert"]


def test_requests_are_served_by_arrival_when_one_is_handed_in_late() -> None:
    world = busy_world()
    world.arrive(request("early"), at=5.0)
    world.arrive(request("resubmitted", arrived_s=2.0), at=6.0)
    assert placements(world.free("g0")) == [("resubmitted", "g0")]


def test_request_counts_as_arrived_now_when_it_claims_to_come_from_the_future() -> None:
    world = busy_world()
    world.arrive(request("boaster", arrived_s=99.0), at=1.0)
    world.arrive(request("honest"), at=2.0)
    assert placements(world.free("g0")) == [("boaster", "g0")]


# -- asked again ----------------------------------------------------------------------------------


def test_request_asked_again_changes_nothing_when_it_waits() -> None:
    world = busy_world()
    world.arrive(request("r0"))
    assert world.arrive(request("r0")) == []
    assert placements(world.free("g0")) == [("r0", "g0")]
    assert placements(world.free("g0")) == []


def test_request_asked_again_gets_the_same_lease_when_it_holds_one() -> None:
    world = World(a_core())
    dispatch = only(Dispatch, world.arrive(request("r0")))
    assert world.arrive(request("r0")) == [dispatch]


def test_request_asked_again_changes_nothing_when_it_waits_in_a_local_queue() -> None:
    world = busy_world("rr")
    world.arrive(request("r0"))
    assert world.arrive(request("r0")) == []


# -- refused --------------------------------------------------------------------------------------


def test_request_is_too_large_when_no_gpu_could_hold_its_models() -> None:
    world = World(a_core(models=("bert", model("huge", memory_mb=9000))))
    finish = only(Finish, world.arrive(request("r0", "huge")))
    assert finish.outcome is RequestOutcome.TOO_LARGE
    assert str(9000 * 1024 * 1024) in finish.reason
    assert not world.core.requests


def test_request_is_too_large_when_only_its_models_together_are() -> None:
    halves = (model("a", memory_mb=5000), model("b", memory_mb=5000))
    world = World(a_core(models=halves))
    assert ended(world.arrive(request("r0", "a", "b"))) == {"r0": RequestOutcome.TOO_LARGE}


def test_request_fits_when_it_needs_exactly_all_memory() -> None:
    world = World(a_core(models=(model("all", memory_mb=8192),)))
    assert placements(world.arrive(request("r0", "all"))) == [("r0", "g0")]


def test_request_of_before_the_first_gpu_is_too_large_when_that_is_too_small() -> None:
    world = World(a_core(gpus=(), models=("bert", model("huge", memory_mb=9000))))
    world.arrive(request("r0", "huge"), request("r1"))
    actions = world.send(GpuJoined(gpu("g0")))
    assert ended(actions) == {"r0": RequestOutcome.TOO_LARGE}
    assert placements(actions) == [("r1", "g0")]


def test_large_request_waits_for_the_large_gpu_when_only_a_small_one_is_idle() -> None:
    gpus = (gpu("large", memory_mb=16000), gpu("small"))
    world = World(a_core("lb", gpus=gpus, models=("bert", model("huge", memory_mb=9000))))
    assert placements(world.arrive(request("r0", "huge"))) == [("r0", "large")]
    assert world.arrive(request("r1", "huge")) == []
    assert placements(world.arrive(request("r2"))) == [("r2", "small")]
    assert placements(world.free("large")) == [("r1", "large")]


def test_request_is_refused_when_the_queue_is_full() -> None:
    world = World(a_core("lb", settings=CoreSettings(max_waiting=1)))
    world.arrive(request("running"), request("waiting"))
    assert ended(world.arrive(request("r0"))) == {"r0": RequestOutcome.QUEUE_FULL}
    world.free("g0")
    assert ended(world.arrive(request("r1"))) == {}


def test_request_is_refused_when_its_deadline_has_passed_already() -> None:
    world = World(a_core())
    assert ended(world.arrive(request("r0", deadline_s=1.0), at=1.0)) == {
        "r0": RequestOutcome.EXPIRED
    }


# -- deadlines and cancellations, wherever the request is -----------------------------------------


def test_deadline_is_set_as_a_timer_when_the_request_arrives() -> None:
    timer = only(SetTimer, World(a_core()).arrive(request("r0", deadline_s=9.0)))
    assert (timer.at_s, timer.event) == (9.0, DeadlinePassed(R0, 9.0))


@pytest.mark.parametrize(
    ("event", "outcome"),
    [
        (RequestCancelled(R0), RequestOutcome.CANCELLED),
        (DeadlinePassed(R0), RequestOutcome.EXPIRED),
    ],
)
class TestWithdrawal:
    """The caller is answered at once; a slot frees on its manager's report only."""

    def test_request_ends_when_it_waits(
        self, event: RequestCancelled, outcome: RequestOutcome
    ) -> None:
        world = busy_world()
        world.arrive(request("r0"), request("r1"))
        assert ended(world.send(event)) == {"r0": outcome}
        assert placements(world.free("g0")) == [("r1", "g0")]

    def test_request_ends_when_it_waits_in_a_local_queue(
        self, event: RequestCancelled, outcome: RequestOutcome
    ) -> None:
        world = busy_world("rr")
        world.arrive(request("r0"), request("r1"))
        assert ended(world.send(event)) == {"r0": outcome}
        assert placements(world.free("g0")) == [("r1", "g0")]

    def test_lease_is_ended_when_the_request_holds_it(
        self, event: RequestCancelled, outcome: RequestOutcome
    ) -> None:
        world = World(a_core("lb"))
        world.arrive(request("r0"), request("r1"))
        actions = world.send(event)
        assert ended(actions) == {"r0": outcome}
        assert only(EndLease, actions).lease == world.lease_on("g0")
        assert placements(actions) == []
        assert placements(world.free("g0")) == [("r1", "g0")]
        assert world.ends[R0] == [outcome]

    def test_request_ends_when_it_gave_its_lease_back_early(
        self, event: RequestCancelled, outcome: RequestOutcome
    ) -> None:
        world = World(a_core())
        world.arrive(request("r0"))
        world.release("g0", may_return=True)
        world.free("g0")
        assert ended(world.send(event)) == {"r0": outcome}

    def test_nothing_happens_when_the_request_has_ended(
        self, event: RequestCancelled, outcome: RequestOutcome
    ) -> None:
        del outcome
        world = World(a_core())
        world.arrive(request("r0"))
        world.free("g0")
        assert world.send(event) == []
