"""Requests that a policy places together share one lease, which ends with the last of them."""

from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from cache_manager import eviction
from scheduler.cluster.view import View
from scheduler.composition import compose
from scheduler.model.actions import Action, Dispatch, EndLease
from scheduler.model.events import (
    GpuJoined,
    GpuSnapshot,
    LeaseReleased,
    LeaseWanted,
    LiveLease,
    ModelRegistered,
    NodeSnapshot,
    RequestArrived,
    RequestCancelled,
    RunFailed,
    SlotFreed,
)
from scheduler.model.values import CoreSettings, LeaseId, RequestId, RequestOutcome, SlotId
from scheduler.policies.placement_policy import Decision, Place
from tests.kit.cores.builders import GIB, gpu, model, request
from tests.kit.cores.core_world import World, ended, only, placements
from tests.kit.cores.wide_policy import WidePolicy

BERT = model("bert", load_s=2.0, run_s=1.0)
DONE = RequestOutcome.COMPLETED
LEASE = LeaseId(1)
R0, R1, R2 = (RequestId(f"r{number}") for number in range(3))


class TogetherPolicy:
    """Places all requests of the head's models together."""

    def decide(self, view: View) -> Iterator[Decision]:
        for slot in view.idle_slots():
            if (head := view.head(slot)) is not None:
                yield Place(view.waiting_like(head, 8), slot, "all at once")


def empty_world(*, first_lease: int = LEASE) -> World:
    settings = CoreSettings(first_lease=first_lease)
    found = World(compose(TogetherPolicy(), eviction.make("lru"), settings))
    found.send(ModelRegistered(BERT))
    return found


def shared(*names: str) -> World:
    """These requests of one function have lease 1 on g0."""
    found = empty_world()
    found.arrive(*(replace(request(name), function="t/f") for name in names))
    found.send(GpuJoined(gpu("g0")))
    return found


def gives_back(world: World, name: str, *, may_return: bool = False) -> list[Action]:
    return world.send(LeaseReleased(LEASE, may_return, RequestId(name)))


def ends_ordered(actions: list[Action]) -> list[LeaseId]:
    return [action.lease for action in actions if isinstance(action, EndLease)]


def test_requests_that_are_placed_together_have_one_lease_of_their_function() -> None:
    world = empty_world()
    world.arrive(*(replace(request(name), function="t/f") for name in ("r0", "r1", "r2")))
    given = only(Dispatch, world.send(GpuJoined(gpu("g0"))))
    assert (given.requests, given.function, given.stands) == ((R0, R1, R2), "t/f", None)


@pytest.mark.parametrize("own", [(True, True), (True, False), (False, False)])
def test_lease_is_own_if_sessions_asked_for_all_of_it(own: tuple[bool, ...]) -> None:
    world = empty_world()
    asked = [replace(request(f"r{n}"), function="t/f", own=each) for n, each in enumerate(own)]
    world.arrive(*asked)
    assert only(Dispatch, world.send(GpuJoined(gpu("g0")))).own is all(own)


def test_request_of_another_function_waits_for_a_lease_of_its_own() -> None:
    world = empty_world()
    for name, function in (("r0", "t/f"), ("r1", "t/g"), ("r2", "t/f")):
        world.arrive(replace(request(name), function=function))
    assert only(Dispatch, world.send(GpuJoined(gpu("g0")))).requests == (R0, R2)
    assert placements(world.free("g0")) == [("r1", "g0")]


@pytest.mark.parametrize("order", [("r0", "r1", "r2"), ("r2", "r0", "r1"), ("r1", "r2", "r0")])
def test_lease_ends_when_the_last_request_gives_it_back_in_whatever_order(
    order: tuple[str, str, str],
) -> None:
    world = shared("r0", "r1", "r2")
    for name in order[:2]:
        actions = gives_back(world, name)
        assert (ended(actions), ends_ordered(actions)) == ({name: DONE}, [])
    assert ends_ordered(gives_back(world, order[2])) == [LEASE]
    assert ended(world.free("g0")) == {order[2]: DONE}
    assert not world.core.requests


def test_lease_goes_on_when_one_request_gives_it_back_twice() -> None:
    world = shared("r0", "r1")
    gives_back(world, "r0")
    assert gives_back(world, "r0") == []
    assert gives_back(world, "no such request") == []
    assert ends_ordered(gives_back(world, "r1")) == [LEASE]


def test_lease_ends_for_all_when_its_release_names_no_request() -> None:
    world = shared("r0", "r1")
    assert ends_ordered(world.send(LeaseReleased(LEASE))) == [LEASE]
    assert ended(world.free("g0")) == {"r0": DONE, "r1": DONE}


def test_cancelled_request_leaves_the_lease_to_the_others() -> None:
    world = shared("r0", "r1")
    assert ends_ordered(world.send(RequestCancelled(R1))) == []
    assert ends_ordered(world.send(RequestCancelled(R0))) == [LEASE]


def test_request_that_may_return_pauses_while_the_others_go_on() -> None:
    world = shared("r0", "r1")
    assert gives_back(world, "r0", may_return=True) == []
    assert world.send(RequestArrived(world.sent[R0])) == []  # it has no lease to be told of
    world.send(LeaseWanted(R0))
    gives_back(world, "r1")
    assert placements(world.free("g0")) == [("r0", "g0")]


@pytest.mark.parametrize("wanted", [False, True])
def test_request_that_gave_its_part_back_early_ends_alone_for_good(*, wanted: bool) -> None:
    world = shared("r0", "r1")
    gives_back(world, "r0", may_return=True)
    gives_back(world, "r1", may_return=True)
    world.free("g0")
    if wanted:
        world.send(LeaseWanted(R0))
    assert ended(gives_back(world, "r0")) == {"r0": DONE}
    assert world.core.requests.keys() == {R1}
    assert ended(gives_back(world, "r1")) == {"r1": DONE}


def test_early_return_after_a_final_release_of_all_pauses_nobody() -> None:
    world = shared("r0", "r1")
    world.send(LeaseReleased(LEASE))
    assert ended(gives_back(world, "r0", may_return=True)) == {"r0": DONE}
    assert ended(world.free("g0")) == {"r1": DONE}


def test_all_requests_fail_once_when_the_work_of_their_lease_fails() -> None:
    world = shared("r0", "r1")
    gives_back(world, "r0")
    assert ended(world.send(RunFailed(LEASE, "crashed"))) == {"r1": RequestOutcome.FAILED}
    assert ends_ordered(gives_back(world, "r1")) == [LEASE]
    assert ended(world.free("g0")) == {}


def test_all_slots_of_a_lease_count_the_requests_that_have_it() -> None:
    it = World(compose(WidePolicy(), eviction.make("lru")))
    it.send(ModelRegistered(BERT))
    it.arrive(*(replace(request(name), function="t/f") for name in ("r0", "r1")))
    it.send(GpuJoined(gpu("g0", slots=3, vcpus=8)))
    assert [slot.frequency for slot in it.core.cluster.slots.values()] == [2] * 3


# -- another leader -------------------------------------------------------------------------------


def found_by_node() -> NodeSnapshot:
    spec = gpu("g0")
    live = LiveLease(LEASE, SlotId("g0"), (BERT.id,), (R0, R1))
    return NodeSnapshot(spec.node, (GpuSnapshot(spec, ((BERT.id, GIB),), (live,)),))


def adopted() -> World:
    """A new leader, which was told that r0 and r1 have lease 1."""
    world = empty_world(first_lease=LEASE + 1)
    world.send(found_by_node())
    return world


def test_adopted_lease_ends_when_both_unknown_requests_have_given_it_back() -> None:
    world = adopted()
    assert gives_back(world, "r1") == gives_back(world, "r1") == []
    assert ends_ordered(gives_back(world, "r0")) == [LEASE]


def test_adopted_lease_goes_on_for_an_unknown_request_when_a_known_one_leaves() -> None:
    for leaves in (LeaseReleased(LEASE, request=R0), RequestCancelled(R0)):
        world = adopted()
        assert only(Dispatch, world.arrive(request("r0"))).lease == LEASE
        assert ends_ordered(world.send(leaves)) == []
        assert ends_ordered(gives_back(world, "r1")) == [LEASE]


def test_adopted_lease_ends_when_its_unknown_requests_are_cancelled() -> None:
    world = adopted()
    assert ends_ordered(world.send(RequestCancelled(R0))) == []
    assert ends_ordered(world.send(RequestCancelled(R1))) == [LEASE]


@pytest.mark.parametrize("both", [False, True])
def test_release_before_the_report_of_the_lease_counts_for_its_request(*, both: bool) -> None:
    world = empty_world(first_lease=LEASE + 1)
    gives_back(world, "r0")
    if both:
        gives_back(world, "r1")
    assert ends_ordered(world.send(found_by_node())) == ([LEASE] if both else [])
    assert placements(world.arrive(request("r0"))) == []  # its part is over: it waits
    if not both:
        assert ends_ordered(gives_back(world, "r1")) == [LEASE]
    assert placements(world.send(SlotFreed(SlotId("g0"), LEASE))) == [("r0", "g0")]
