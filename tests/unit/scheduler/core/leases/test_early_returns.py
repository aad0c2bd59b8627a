"""Leases given back early: every order of release, new request, failure and freeing."""

from scheduler.model.actions import Dispatch, EndLease
from scheduler.model.events import LeaseReleased, LeaseWanted, RunFailed, SlotFreed
from scheduler.model.values import LeaseId, RequestId, RequestOutcome, SlotId
from tests.kit.cores.builders import a_core, request
from tests.kit.cores.core_world import World, ended, only, placements, refused

R0 = RequestId("r0")
FIRST = LeaseId(1)


def released_early(*also_waiting: str) -> World:
    """r0 gave lease 1 on g0, the only GPU, back early; the slot is not freed yet."""
    world = World(a_core("lb"))
    world.arrive(request("r0"), *(request(name) for name in also_waiting))
    world.send(LeaseReleased(FIRST, may_return=True))
    return world


def paused(*also_waiting: str) -> World:
    """As above, and the slot was freed."""
    world = released_early(*also_waiting)
    world.free("g0")
    return world


def wanted_again() -> World:
    """r0 asks for a lease again and waits for it: x has the GPU."""
    world = paused("x")
    world.send(LeaseWanted(R0))
    return world


def test_request_ends_once_when_its_run_fails_after_an_early_release() -> None:
    world = released_early()
    world.send(RunFailed(FIRST, "out of memory"))
    world.send(LeaseReleased(FIRST))
    world.free("g0")
    assert len(world.ends[R0]) == 1
    assert not world.core.requests


def test_request_stays_paused_when_the_early_release_is_repeated() -> None:
    world = paused()
    assert world.send(LeaseReleased(FIRST, may_return=True)) == []
    assert R0 in world.core.requests
    assert placements(world.send(LeaseWanted(R0))) == [("r0", "g0")]


def test_request_is_completed_when_it_is_released_for_good_after_its_wish() -> None:
    """It takes no lease that will not be used."""
    world = released_early()
    world.send(LeaseWanted(R0))
    world.send(LeaseReleased(FIRST))
    actions = world.free("g0")
    assert ended(actions) == {"r0": RequestOutcome.COMPLETED}
    assert placements(actions) == []


def test_request_is_completed_when_its_old_lease_is_released_for_good_while_it_waits() -> None:
    world = wanted_again()
    assert ended(world.send(LeaseReleased(FIRST))) == {"r0": RequestOutcome.COMPLETED}
    assert placements(world.free("g0")) == []
    assert world.ends[R0] == [RequestOutcome.COMPLETED]


def test_request_is_completed_when_its_first_lease_is_released_for_good_while_it_has_another() -> (
    None
):
    """The holder of the first lease does not know of the other."""
    world = paused("x")
    world.free("g0")
    again = only(Dispatch, world.send(LeaseWanted(R0)))
    actions = world.send(LeaseReleased(FIRST))
    assert ended(actions) == {"r0": RequestOutcome.COMPLETED}
    assert only(EndLease, actions).lease == again.lease
    assert ended(world.free("g0")) == {}
    assert world.ends[R0] == [RequestOutcome.COMPLETED]
    assert not world.leases


def test_request_is_completed_when_its_first_lease_is_released_for_good_after_two_returns() -> None:
    world = paused()
    world.send(LeaseWanted(R0))
    world.release("g0", may_return=True)
    world.free("g0")
    assert ended(world.send(LeaseReleased(FIRST))) == {"r0": RequestOutcome.COMPLETED}
    assert not world.core.requests


def test_request_is_not_paused_when_an_early_release_follows_the_final_one() -> None:
    world = World(a_core("lb"))
    world.arrive(request("r0"))
    world.send(LeaseReleased(FIRST))
    world.send(LeaseReleased(FIRST, may_return=True))
    assert ended(world.free("g0")) == {"r0": RequestOutcome.COMPLETED}
    assert not world.core.requests


def test_returning_requests_keep_their_order_when_several_want_a_lease() -> None:
    """a and b return, in this order; c, d and e run, f has waited all the time."""
    world = World(a_core("lb", gpus=("g0", "g1", "g2")))
    world.arrive(*(request(name) for name in "abcdef"))
    for slot in ("g0", "g1"):
        world.release(slot, may_return=True)
        world.free(slot)
    for name in "ab":
        world.send(LeaseWanted(RequestId(name)))
    assert [placements(world.free(slot)) for slot in ("g2", "g1", "g0")] == [
        [("a", "g2")],
        [("b", "g1")],
        [("f", "g0")],
    ]


def test_wish_changes_nothing_when_it_is_repeated_before_the_slot_is_freed() -> None:
    world = released_early("x")
    assert world.send(LeaseWanted(R0)) == world.send(LeaseWanted(R0)) == []
    assert placements(world.free("g0")) == [("r0", "g0")]
    assert placements(world.free("g0")) == [("x", "g0")]


def test_wish_changes_nothing_when_it_is_repeated_while_the_request_waits() -> None:
    world = wanted_again()
    assert world.send(LeaseWanted(R0)) == []
    assert placements(world.free("g0")) == [("r0", "g0")]
    assert placements(world.free("g0")) == []
    assert world.ends[R0] == [RequestOutcome.COMPLETED]


def test_wish_is_answered_by_the_same_lease_when_it_is_repeated_after_the_dispatch() -> None:
    world = paused()
    first = only(Dispatch, world.send(LeaseWanted(R0)))
    assert world.send(LeaseWanted(R0)) == [first]
    assert ended(world.send(SlotFreed(SlotId("g0"), first.lease))) == {
        "r0": RequestOutcome.COMPLETED
    }


def test_wish_is_refused_when_the_request_has_ended() -> None:
    world = paused()
    world.send(LeaseReleased(FIRST))
    assert refused(world.send(LeaseWanted(R0))) != []


def test_request_returns_again_when_it_gives_its_second_lease_back_early_too() -> None:
    world = paused()
    for _ in range(3):
        world.send(LeaseWanted(R0))
        world.release("g0", may_return=True)
        assert world.free("g0") == []
    last = world.lease_of("r0") if world.leases else LeaseId(4)
    assert ended(world.send(LeaseReleased(last))) == {"r0": RequestOutcome.COMPLETED}
