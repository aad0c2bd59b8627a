"""Calls that have used a GPU and need one again, while a quota of GPU time is used up."""

import pytest
from msgspec.structs import replace

from scheduler.features.tenants.limits import MOST_PAUSED
from scheduler.features.tenants.tenancy import Tenancy
from scheduler.model.actions import Action, Dispatch, Finish, SetTimer
from scheduler.model.events import (
    DeadlinePassed,
    PolicySet,
    RequestCancelled,
    RunFinished,
    TermsSet,
    TimerFired,
)
from scheduler.model.owner_terms import OwnerTerms
from scheduler.model.values import CoreSettings, Request, RequestId, RequestOutcome
from tests.kit.cores.builders import a_core, request
from tests.kit.cores.builders import model as a_model
from tests.kit.cores.core_world import World, only, placements

A, B = "a/f", "b/f"
QUOTA = OwnerTerms(gpu_s=5.0, window_s=60.0)
# The last part of the window in which all was used has left it then.
ROOM_S = 67.1


def new(function: str, name: str) -> Request:
    return replace(request(name), function=function)


def going_on(function: str, name: str, deadline_s: float | None = None) -> Request:
    return replace(new(function, name), goes_on=True, deadline_s=deadline_s)


def used_up(owner: str = "a", *, gpus: int = 2, settings: CoreSettings | None = None) -> World:
    """By 6 s a call has used the 5 s that its owner may use in a minute."""
    names = [f"g{number}" for number in range(gpus)]
    world = World(a_core("lalbo3", gpus=names, settings=settings))
    world.send(TermsSet(owner, QUOTA))
    world.arrive(new(A, "first"))
    world.free("g0", 6.0)
    return world


def timers(actions: list[Action]) -> list[float]:
    return [
        each.at_s
        for each in actions
        if isinstance(each, SetTimer) and isinstance(each.event, TimerFired)
    ]


def outcomes(actions: list[Action]) -> dict[str, RequestOutcome]:
    return {each.request: each.outcome for each in actions if isinstance(each, Finish)}


@pytest.mark.parametrize("owner", ["a", A])
def test_call_waits_until_the_quota_has_room_when_it_goes_on(owner: str) -> None:
    world = used_up(owner)
    assert outcomes(world.arrive(new(A, "new"))) == {"new": RequestOutcome.OVER_QUOTA}
    (room_s,) = timers(world.arrive(going_on(A, "on")))
    assert room_s == pytest.approx(62.0, abs=0.1)
    assert world.core.cluster.held == 1
    assert placements(world.send(TimerFired(), 40.0)) == []
    assert placements(world.send(TimerFired(), room_s)) == [("on", "g0")]
    assert world.core.cluster.held == 0


def test_call_that_goes_on_is_placed_at_once_while_there_is_room() -> None:
    world = World(a_core("lalbo3"))
    world.send(TermsSet("a", QUOTA))
    assert placements(world.arrive(going_on(A, "on"))) == [("on", "g0")]


def test_others_are_served_meanwhile() -> None:
    world = used_up()
    world.arrive(going_on(A, "on"))
    assert placements(world.arrive(new(B, "other"))) == [("other", "g0")]


@pytest.mark.parametrize("functions", [1, 8])
@pytest.mark.parametrize("gpus", [1, 8])
def test_tenant_gets_no_more_than_its_quota_whatever_it_says_of_its_calls(
    gpus: int, functions: int
) -> None:
    """Nothing is used when they come; each runs for twice its quota, as it soon turns out."""
    world = World(a_core("lalbo3", gpus=[f"g{number}" for number in range(gpus)]))
    world.send(TermsSet("a", QUOTA))
    names = [f"a/f{number % functions}" for number in range(200)]
    world.arrive(*(going_on(name, f"on{number}") for number, name in enumerate(names)))
    granted, end_s = 0, 600.0
    while world.now < end_s:
        if world.leases:
            began_s, held = world.now, list(world.leases.values())
            granted += len(held)
            for each in held:
                (model,) = each.models
                world.send(RunFinished(each.slot, model, 1, 10.0), began_s + 10.0)
                world.free(each.slot, began_s + 10.0)
        else:
            world.send(TimerFired(), world.now + 5.0)
    assert granted <= end_s / QUOTA.window_s + 1
    assert granted > end_s / QUOTA.window_s / 3


def test_calls_that_go_on_together_use_no_more_than_is_left() -> None:
    """A second is left, and the GPU is another's when they ask."""
    world = World(a_core("lalbo3", gpus=["g0"]))
    world.send(TermsSet("a", QUOTA))
    world.arrive(new(A, "first"))
    world.free("g0", 4.0)
    world.arrive(new(B, "busy"))
    world.arrive(*(going_on(A, f"on{number}") for number in range(10)))
    world.free("g0", 6.0)
    granted = 0
    while world.leases:
        granted += 1
        world.free("g0", world.now + 4.0)
    assert granted == 1


def test_kept_lease_is_not_recalled_for_calls_that_are_paused() -> None:
    world = used_up()
    world.send(PolicySet("fair"))
    world.arrive(*(going_on(A, f"on{number}") for number in range(3)))
    world.arrive(new(B, "kept"))
    (lease,) = world.leases
    world.send(TimerFired(), 20.0)
    assert world.core.layer(Tenancy).may_be_kept(world.core.leases[lease])


def test_queue_is_not_full_of_calls_that_are_paused() -> None:
    world = used_up(settings=CoreSettings(max_waiting=5))
    refused = outcomes(world.arrive(*(going_on(A, f"on{number}") for number in range(6))))
    assert refused == {"on5": RequestOutcome.QUEUE_FULL}
    assert placements(world.arrive(new(B, "other"))) == [("other", "g0")]


def test_calls_that_go_on_are_paused_while_others_fill_the_queue() -> None:
    """As many of them may wait as of others, whoever came first."""
    world = used_up(gpus=1, settings=CoreSettings(max_waiting=3))
    world.arrive(new(B, "busy"), *(new(B, f"b{number}") for number in range(3)))
    assert outcomes(world.arrive(new(B, "b3"))) == {"b3": RequestOutcome.QUEUE_FULL}
    assert outcomes(world.arrive(*(going_on(A, f"on{number}") for number in range(3)))) == {}


def test_paused_calls_refuse_nobody_where_namespaces_take_turns() -> None:
    """Neither by the time that they wait, nor by their number; also not others of their own."""
    world = World(a_core("fair", gpus=["g0"], settings=CoreSettings(max_waiting=10)))
    world.send(TermsSet(A, QUOTA))
    world.arrive(new(A, "first"))
    world.free("g0", 6.0)
    world.arrive(*(going_on(A, f"on{number}") for number in range(5)))
    for number in range(5):
        world.arrive(new("a/g", f"g{number}"), at=10.0 + 10.0 * number)
        world.free("g0", world.now + 1.0)
    world.arrive(new(B, "busy"))
    bounded = [replace(new("a/g", "soon"), max_wait_s=5.0), replace(new(B, "b"), max_wait_s=5.0)]
    assert outcomes(world.arrive(*bounded)) == {}
    assert world.core.cluster.paused == 5


def test_next_call_goes_on_when_the_one_before_ends_in_an_event_without_a_decision() -> None:
    world = used_up(gpus=1)
    world.arrive(new(B, "busy"), *(going_on(A, f"on{number}") for number in range(2)))
    world.send(TimerFired(), ROOM_S)
    assert world.core.cluster.held == 1
    world.send(RequestCancelled(RequestId("on0")))
    assert world.core.cluster.held == 0


def test_head_of_the_queue_is_overtaken_no_more_often_while_others_are_paused() -> None:
    def overtakers(paused: int) -> list[str]:
        """Those that are placed before the head, whose model is not on the GPU."""
        core = a_core("netgain", models=["bert", "other"], parameters={"patience": 3})
        world = World(core)
        world.send(TermsSet("a", QUOTA))
        world.arrive(new(A, "first"))
        world.free("g0", 6.0)
        world.arrive(new(B, "busy"), *(going_on(A, f"on{number}") for number in range(paused)))
        world.arrive(replace(request("head", "other"), function=B))
        found = []
        for number in range(20):
            world.arrive(new(B, f"b{number}"))
            found += [name for name, _ in placements(world.free("g0", world.now + 1.0))]
        return found[: found.index("head")]

    assert overtakers(0) == overtakers(15) == ["b0", "b1", "b2"]


def test_call_goes_on_when_what_ran_leaves_a_window_that_is_shorter_than_the_quota() -> None:
    """A run of 150 s is expected, of which the window counts the last minute alone."""
    world = World(a_core("lalbo3", models=[a_model("bert", run_s=150.0)], gpus=["g0", "g1"]))
    world.send(TermsSet("a", OwnerTerms(gpu_s=100.0, window_s=60.0)))
    world.arrive(new("a/g", "long"))
    world.arrive(going_on(A, "on"), at=1.0)
    assert world.core.cluster.paused == 1
    while world.core.cluster.paused:
        next_s = world.core.layer(Tenancy).order.paused.next_s()
        assert next_s is not None
        assert next_s < 200.0
        world.send(TimerFired(), next_s)


def test_paused_calls_of_a_namespace_leave_room_for_those_of_others_where_they_take_turns() -> None:
    world = World(a_core("fair", gpus=["g0"], settings=CoreSettings(max_waiting=10)))
    for owner, function in (("a", A), ("b", B)):
        world.send(TermsSet(owner, QUOTA))
        world.arrive(new(function, f"first of {owner}"))
        world.free("g0", world.now + 6.0)
    refused = outcomes(world.arrive(*(going_on(A, f"on{number}") for number in range(10))))
    assert set(refused.values()) == {RequestOutcome.QUEUE_FULL}
    assert outcomes(world.arrive(going_on(B, "other's"))) == {}


def test_those_that_a_quota_of_leases_holds_back_overtake_nobody_of_their_own() -> None:
    world = World(a_core("netgain", gpus=["g0"]))
    world.send(TermsSet("b", OwnerTerms(leases=1)))
    world.arrive(new(A, "busy"), *(new(B, f"b{number}") for number in range(12)))
    cluster, overtaken = world.core.cluster, []
    for _ in range(8):
        head = cluster.waiting.first(0)
        assert head is not None
        left = cluster.accepted - cluster.held - cluster.waiting.count
        overtaken.append(left - head.number)
        world.free("g0", world.now + 1.0)
        world.arrive(new(A, f"a{world.now}"))
    assert max(overtaken) <= 1, "of all those that came after it"


def test_calls_go_on_one_after_the_other() -> None:
    """What each will use is not known; all at once could use far more than there is."""
    world = used_up(gpus=1)
    world.arrive(new(B, "busy"))
    world.arrive(*(going_on(A, f"on{number}") for number in range(4)))
    world.send(TimerFired(), ROOM_S)
    assert world.core.cluster.held == 3
    assert placements(world.free("g0", ROOM_S + 1.0)) == [("on0", "g0")]
    assert world.core.cluster.held == 2
    assert placements(world.free("g0", ROOM_S + 4.0)) == [("on1", "g0")]
    assert world.core.cluster.held == 1
    actions = world.free("g0", ROOM_S + 9.0)
    assert placements(actions) == []  # on2 had its turn, and has lost it
    assert world.core.cluster.held == 2
    (room_s,) = timers(actions)
    assert placements(world.send(TimerFired(), room_s)) == [("on2", "g0")]


def test_call_goes_on_when_the_terms_leave_more_room() -> None:
    for terms in (None, OwnerTerms(), OwnerTerms(gpu_s=50.0, window_s=60.0)):
        world = used_up()
        world.arrive(going_on(A, "on"))
        assert placements(world.send(TermsSet("a", terms))) == [("on", "g0")]


def test_paused_call_that_ends_leaves_nothing() -> None:
    world = used_up()
    world.arrive(going_on(A, "cancelled"), going_on(A, "late", deadline_s=20.0))
    world.send(RequestCancelled(RequestId("cancelled")))
    expired = world.send(DeadlinePassed(RequestId("late"), 20.0), 20.0)
    assert outcomes(expired) == {"late": RequestOutcome.EXPIRED}
    assert (world.core.cluster.held, world.core.cluster.queued) == (0, 0)
    assert timers(world.send(TimerFired(), 21.0)) == []


def test_as_many_again_may_wait_when_they_go_on() -> None:
    world = World(a_core("lalbo3", gpus=()))
    world.send(TermsSet("a", OwnerTerms(waiting=2)))
    world.arrive(*(new(A, f"n{number}") for number in range(2)))
    refused = outcomes(world.arrive(new(A, "n2"), *(going_on(A, f"on{n}") for n in range(3))))
    assert set(refused) == {"n2", "on2"}


def test_no_more_calls_of_a_namespace_are_paused_than_may_be() -> None:
    """A tenant could say of any number of requests that their calls go on."""
    world = used_up()
    refused = outcomes(world.arrive(*(going_on(A, f"on{n}") for n in range(MOST_PAUSED + 2))))
    assert refused == dict.fromkeys(
        (f"on{MOST_PAUSED}", f"on{MOST_PAUSED + 1}"), RequestOutcome.OVER_QUOTA
    )
    refused = outcomes(world.arrive(going_on("a/g", "another's"), going_on(B, "other's")))
    assert refused == {"another's": RequestOutcome.OVER_QUOTA}


def test_explanation_says_what_held_a_call_back() -> None:
    world = used_up(settings=CoreSettings(explain=frozenset({RequestId("on")})))
    world.arrive(going_on(A, "on"))
    dispatch = only(Dispatch, world.send(TimerFired(), ROOM_S))
    assert dispatch.explanation is not None
    assert dispatch.explanation.held_s == pytest.approx(ROOM_S - 6.0)
    assert dispatch.explanation.held_for == "its quota of GPU time"


def test_others_are_expected_to_wait_no_longer_for_calls_that_are_paused() -> None:
    """Neither are the pauses taken for the time that a GPU needs for a request."""
    world = used_up(gpus=1)
    world.arrive(*(going_on(A, f"on{number}") for number in range(20)))
    world.arrive(*(new(B, f"b{number}") for number in range(4)), at=30.0)
    for at_s in (31.0, 32.0):
        world.free("g0", at_s)
    assert world.core.lifecycle.expected_wait_s(B) == pytest.approx(1.0)
