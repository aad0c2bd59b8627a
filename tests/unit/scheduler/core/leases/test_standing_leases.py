"""Leases that their callers keep: while nobody else waits, with every call reported."""

import pytest
from msgspec.structs import replace

from cache_manager.model.ids import GpuId, ModelId, Tier
from scheduler import policies
from scheduler.core.core import Core
from scheduler.features.standing_leases import StandingLeases
from scheduler.model.actions import (
    Action,
    Dispatch,
    EndLease,
    Finish,
    Recall,
    Refuse,
    SetTimer,
    Taken,
)
from scheduler.model.events import (
    GpuDraining,
    LeaseReleased,
    LeaseUsed,
    ModelLoaded,
    RecallPassed,
    RequestCancelled,
    SlotFreed,
)
from scheduler.model.values import (
    CallEnd,
    CoreSettings,
    GpuSpec,
    LeaseId,
    LeaseUse,
    Request,
    RequestId,
    RequestOutcome,
    SlotId,
    StandingTerms,
)
from tests.kit.cores.action_digest import lived
from tests.kit.cores.builders import a_core, request
from tests.kit.cores.core_world import World, only, placements

TERMS = StandingTerms(5.0, 100)
SLICED = StandingTerms(5.0, 100, slice_s=0.03)


def a_world(
    *gpus: GpuSpec | str, terms: StandingTerms | None = TERMS, policy: str = "lalbo3"
) -> World:
    settings = CoreSettings(standing=terms)
    models = ("bert", "vgg")
    return World(a_core(policy, gpus=gpus or ("g0",), models=models, settings=settings))


def asked(name: str, *models: str, function: str = "f", caller: str = "gateway") -> Request:
    return replace(request(name, *models), function=function, caller=caller)


def given(world: World, name: str = "r0", function: str = "f") -> LeaseId:
    """A lease that stands, whose first call has ended."""
    dispatch = only(Dispatch, world.arrive(asked(name, function=function)))
    assert dispatch.stands == TERMS
    world.send(LeaseUsed(dispatch.lease, function, ends=(CallEnd(RequestId(name), world.now),)))
    return dispatch.lease


def use(name: str, *, began_s: float = 0.0, ended_s: float | None = None) -> LeaseUse:
    return LeaseUse(RequestId(name), began_s, began_s, ended_s)


def recalls(actions: list[Action]) -> list[LeaseId]:
    return [each.lease for each in actions if isinstance(each, Recall)]


def ends(world: World, lease: LeaseId, slot: str = "g0") -> list[Action]:
    """Its caller gives it back, and its node ends it."""
    return [*world.send(LeaseReleased(lease)), *world.send(SlotFreed(SlotId(slot), lease))]


# -- who gets one -----------------------------------------------------------------------------


def test_lease_does_not_stand_where_the_settings_say_so() -> None:
    dispatch = only(Dispatch, a_world(terms=None).arrive(asked("r0")))
    assert dispatch.stands is None


def test_lease_does_not_stand_for_a_caller_that_cannot_keep_it() -> None:
    assert only(Dispatch, a_world().arrive(asked("r0", caller=""))).stands is None


def test_lease_does_not_stand_while_somebody_else_waits() -> None:
    world = a_world()
    first = only(Dispatch, world.arrive(asked("r0", caller=""))).lease
    world.arrive(asked("r1"), asked("other", "vgg", function="other"))
    actions = ends(world, first)
    assert only(Dispatch, actions).stands is None


def test_lease_stands_while_only_its_own_kind_waits() -> None:
    world = a_world()
    dispatches = [
        each for each in world.arrive(asked("r0"), asked("r1")) if isinstance(each, Dispatch)
    ]
    assert [each.stands for each in dispatches] == [TERMS]
    assert not world.recalled


def contended(world: World) -> Dispatch:
    """A lease that is given while somebody else waits."""
    first = only(Dispatch, world.arrive(asked("r0", caller=""))).lease
    world.arrive(asked("r1"), asked("other", "vgg", function="other"))
    return only(Dispatch, ends(world, first))


def test_lease_stands_for_a_slice_while_somebody_else_waits() -> None:
    world = a_world(terms=SLICED)
    dispatch = contended(world)
    assert dispatch.stands == StandingTerms(0.03, 100, slice_s=0.03)
    assert not world.recalled
    uses = tuple(use(name, ended_s=0.0) for name in ("r2", "r3"))
    assert len(world.send(LeaseUsed(dispatch.lease, "f", uses))) == 4
    assert placements(ends(world, dispatch.lease)) == [("other", "g0")]


def test_doubt_about_slices_is_another_one() -> None:
    world = a_world(terms=SLICED)
    first = contended(world)
    ends(world, first.lease)
    ends(world, LeaseId(first.lease + 1))
    assert only(Dispatch, world.arrive(asked("r2"))).stands == SLICED
    world.arrive(asked("r3"), asked("r4", function="g"))
    assert only(Dispatch, ends(world, LeaseId(first.lease + 2))).stands is None


def test_recalled_lease_has_its_slice_before_its_node_is_told() -> None:
    world = a_world(terms=SLICED)
    only(Dispatch, world.arrive(asked("r0")))
    timer = only(SetTimer, world.arrive(asked("other", function="g")))
    assert timer.at_s == pytest.approx(world.now + 0.28)


@pytest.mark.parametrize(
    "other",
    [
        asked("r1", function="g"),
        asked("r1", "vgg"),
        asked("r1", caller="another gateway"),
        asked("r1", caller=""),
    ],
)
def test_lease_is_recalled_when_somebody_else_waits(other: Request) -> None:
    world = a_world()
    lease = given(world)
    actions = world.arrive(other)
    assert recalls(actions) == [lease]
    assert placements(ends(world, lease)) == [("r1", "g0")]


# -- recalls ----------------------------------------------------------------------------------


def test_one_lease_is_recalled_for_each_request_the_least_recently_used_first() -> None:
    world = a_world("g0", "g1", "g2", policy="lb")
    leases = {}
    for name in ("a", "b", "c"):
        dispatch = only(Dispatch, world.arrive(asked(name, function=name)))
        leases[name] = dispatch.lease
        world.send(ModelLoaded(dispatch.gpu, ModelId("bert"), 0.0, Tier.ABSENT))
    for name in ("b", "c", "a"):
        world.send(LeaseUsed(leases[name], name, (use(f"{name}1", ended_s=0.0),)))
    first = world.arrive(asked("d", "vgg", function="d"))
    assert recalls(first) == [leases["b"]]
    assert recalls(world.arrive(asked("e", "vgg", function="e"))) == [leases["c"]]


def test_node_is_told_when_a_recalled_lease_is_not_given_back() -> None:
    world = a_world()
    lease = given(world)
    actions = world.arrive(asked("other", function="g"))
    timer = only(SetTimer, actions)
    assert timer.event == RecallPassed(lease)
    order = only(EndLease, world.send(timer.event, at=timer.at_s))
    assert (order.lease, order.recalled) == (lease, True)


def test_recall_that_was_obeyed_gives_no_further_order() -> None:
    world = a_world()
    lease = given(world)
    world.arrive(asked("other", function="g"))
    world.send(LeaseReleased(lease))
    assert world.send(RecallPassed(lease)) == []
    world.send(SlotFreed(SlotId("g0"), lease))
    assert world.send(RecallPassed(lease)) == []


def test_leases_of_a_draining_gpu_are_recalled() -> None:
    world = a_world()
    lease = given(world)
    assert recalls(world.send(GpuDraining(GpuId("g0")))) == [lease]


def test_caller_is_told_when_its_lease_has_ended_by_itself() -> None:
    world = a_world()
    lease = given(world)
    assert recalls(world.send(SlotFreed(SlotId("g0"), lease))) == [lease]


def test_lease_given_back_needs_no_recall() -> None:
    world = a_world()
    lease = given(world)
    assert recalls(ends(world, lease)) == []
    assert recalls(world.arrive(asked("other", function="g"))) == []


def test_leases_kept_in_vain_stand_less_and_less_often() -> None:
    world = a_world()
    stood = []
    for number in range(12):
        dispatch = only(Dispatch, world.arrive(asked(f"r{number}")))
        stood.append(dispatch.stands is not None)
        ends(world, dispatch.lease)
    assert [place for place, stands in enumerate(stood) if stands] == [0, 2, 5, 10]


def test_lease_that_was_used_again_ends_the_doubt() -> None:
    world = a_world()
    ends(world, given(world, "r0"))
    ends(world, only(Dispatch, world.arrive(asked("r1"))).lease)
    lease = given(world, "r2")
    world.send(LeaseUsed(lease, "f", (use("r3", ended_s=0.0),)))
    ends(world, lease)
    assert only(Dispatch, world.arrive(asked("r4"))).stands == TERMS


# -- what ran ---------------------------------------------------------------------------------


def test_call_that_has_ended_is_a_hit_that_completed() -> None:
    world = a_world()
    lease = given(world)
    world.now = 3.0
    actions = world.send(LeaseUsed(lease, "f", (LeaseUse(RequestId("r1"), 1.0, 2.0, 2.5, "t"),)))
    taken, finish = actions
    assert isinstance(taken, Taken)
    assert (taken.request.arrived_s, taken.began_s, taken.parent) == (1.0, 2.0, "t")
    assert (taken.request.function, taken.request.models) == ("f", ("bert",))
    assert (taken.dispatch.lease, taken.dispatch.hit) == (lease, True)
    assert finish == Finish(RequestId("r1"), RequestOutcome.COMPLETED, "", 2.5)
    assert not world.core.requests


def test_call_that_runs_is_known_until_it_ends() -> None:
    world = a_world()
    lease = given(world)
    world.send(LeaseUsed(lease, "f", (use("r1"),)))
    assert list(world.core.requests) == ["r1"]
    world.now = 2.0
    ending = world.send(LeaseUsed(lease, "f", ends=(CallEnd(RequestId("r1"), 1.5),)))
    assert ending == [Finish(RequestId("r1"), RequestOutcome.COMPLETED, "", 1.5)]
    assert world.send(LeaseUsed(lease, "f", ends=(CallEnd(RequestId("r1"), 1.5),))) == []


def test_running_call_ends_with_its_lease() -> None:
    world = a_world()
    lease = given(world)
    world.send(LeaseUsed(lease, "f", (use("r1"),)))
    actions = ends(world, lease)
    assert Finish(RequestId("r1"), RequestOutcome.COMPLETED) in actions
    assert not world.core.requests


def test_calls_count_as_uses_of_the_slot_and_its_model() -> None:
    world = a_world("g0", "g1")
    lease = given(world)
    world.send(ModelLoaded(GpuId("g0"), ModelId("bert"), 0.0, Tier.ABSENT))
    world.now = 9.0
    uses = tuple(use(f"r{number}", began_s=8.0, ended_s=8.5) for number in range(1, 4))
    world.send(LeaseUsed(lease, "f", uses))
    cluster = world.core.cluster
    assert cluster.slots[SlotId("g0")].frequency == 4
    assert cluster.gpus[GpuId("g0")].cache.residents[ModelId("bert")].used_s == 9.0
    assert cluster.accepted == 4


def test_report_is_taken_when_the_lease_has_just_ended() -> None:
    world = a_world()
    lease = given(world)
    world.send(SlotFreed(SlotId("g0"), lease))
    taken, finish = world.send(LeaseUsed(lease, "f", (use("r1", ended_s=0.0),)))
    assert isinstance(taken, Taken)
    assert isinstance(finish, Finish)


def test_report_is_refused_when_the_lease_has_ended_long_ago_and_others_since() -> None:
    """What is kept of a lease for late reports is kept for a minute, and not by its number."""
    world = a_world()
    lease = given(world)
    world.send(SlotFreed(SlotId("g0"), lease))
    world.now += 61.0
    later = given(world, "r1", function="g")
    world.send(SlotFreed(SlotId("g0"), later))
    assert only(Refuse, world.send(LeaseUsed(lease, "f", (use("r2", ended_s=0.0),)))).reason
    taken = world.send(LeaseUsed(later, "g", (use("r3", ended_s=0.0),)))
    assert only(Taken, taken).request.id == "r3"


def test_report_is_refused_when_the_lease_was_never_given() -> None:
    world = a_world()
    assert only(Refuse, world.send(LeaseUsed(LeaseId(99), "f", (use("r1"),)))).reason


def test_call_whose_id_is_in_use_is_not_counted() -> None:
    world = a_world()
    lease = given(world)
    world.arrive(asked("r1"))
    assert world.send(LeaseUsed(lease, "f", (use("r1", ended_s=0.0),))) == []


def test_cancelling_the_running_call_ends_its_lease_and_tells_its_caller() -> None:
    world = a_world()
    lease = given(world)
    world.send(LeaseUsed(lease, "f", (use("r1"),)))
    actions = world.send(RequestCancelled(RequestId("r1")))
    assert only(EndLease, actions).lease == lease
    assert recalls(actions) == [lease]


# -- replay -----------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", policies.available())
def test_random_lives_have_leases_that_stand(policy: str) -> None:
    actions = [each for answer in lived(policy, seed=3, count=2500).answers for each in answer]
    for kind in (Taken, Recall):
        assert sum(isinstance(each, kind) for each in actions) > 5, kind


def test_core_without_standing_leases_keeps_no_books() -> None:
    core: Core = a_world(terms=None).core
    world = World(core)
    world.arrive(asked("r0"), asked("r1"), asked("r2", function="g"))
    assert not core.layer(StandingLeases).kept_leases
    assert core.layer(StandingLeases).waiting == {}
