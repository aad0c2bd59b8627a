"""Weights, priorities and quotas of namespaces and functions, one at a time."""

from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType

import pytest
from msgspec.structs import replace

from cache_manager.model.ids import MIB, GpuId, ModelId, Tier
from scheduler.core.core import Core
from scheduler.features.tenants.owners import GpuWindow
from scheduler.features.tenants.tenancy import Tenancy
from scheduler.model.actions import Action, Demote, Dispatch, Finish, Prepare, Recall
from scheduler.model.events import (
    GpuSnapshot,
    LeaseComputed,
    LeaseUsed,
    LiveLease,
    ModelLoaded,
    NodeSnapshot,
    PinAsked,
    PolicySet,
    PrefetchAsked,
    RequestCancelled,
    SlotFreed,
    TermsSet,
)
from scheduler.model.owner_terms import OwnerTerms
from scheduler.model.values import (
    CallEnd,
    CoreSettings,
    LeaseId,
    LeaseUse,
    Request,
    RequestId,
    RequestOutcome,
    SlotId,
    StandingTerms,
)
from tests.kit.cores.builders import GIB, a_core, model, request
from tests.kit.cores.core_world import World, ended, only, placements

A, B = "a/f", "b/f"


def of(function: str, name: str, *models: str, priority: int = 0, **more: float) -> Request:
    """A request of a function."""
    asked = request(name, *models, priority=priority)
    return replace(asked, function=function, **more)


def fair(terms: Mapping[str, OwnerTerms] = MappingProxyType({}), *, gpus: int = 1) -> World:
    """A world where namespaces take turns, with models that are there after a load of 2 s."""
    core = a_core(
        "fair",
        gpus=[f"g{number}" for number in range(gpus)],
        models=["bert", "a/m", "b/m", "a/n"],
        parameters={"lead_s": 0.5},
    )
    world = World(core)
    for owner, found in terms.items():
        world.send(TermsSet(owner, found))
    return world


def served(world: World, count: int) -> list[str]:
    """The requests that get the one GPU next, each of which takes its estimate."""
    order: list[str] = []
    for _ in range(count):
        lease = world.leases[world.lease_on("g0")]
        order += lease.requests
        world.free("g0", lease.done_s)
    return order


# -- shares ---------------------------------------------------------------------------------------


def test_namespace_that_comes_late_goes_next_when_another_has_flooded_the_queue() -> None:
    world = fair()
    world.arrive(*(of(A, f"a{number}") for number in range(50)))
    served(world, 5)
    world.arrive(of(B, "b0"))
    assert "b0" in served(world, 3)


def test_namespace_has_saved_nothing_when_the_requests_of_another_went_at_once() -> None:
    world = fair()
    for number in range(20):
        world.arrive(of(A, f"early{number}"))
        world.free("g0", world.now + 1.0)
    world.arrive(*(of(function, f"{function[0]}{n}") for n in range(10) for function in (B, A)))
    given = Counter(name[0] for name in served(world, 10))
    assert given == {"a": 5, "b": 5}


def test_lalbo3_serves_the_flood_first_when_nobody_takes_turns() -> None:
    world = World(a_core("lalbo3", models=["bert"]))
    world.arrive(*(of(A, f"a{number}") for number in range(50)))
    world.arrive(of(B, "b0"))
    assert "b0" not in served(world, 40)


@pytest.mark.parametrize("weights", [(1, 1, 1), (1, 2, 4), (5, 1, 1)])
def test_namespaces_get_gpu_time_by_their_weights_when_all_ask_for_more(
    weights: tuple[int, ...],
) -> None:
    names = ("a", "b", "c")
    world = fair(
        {name: OwnerTerms(weight=weight) for name, weight in zip(names, weights, strict=True)}
    )
    world.arrive(*(of(f"{name}/f", f"{name}{n}") for name in names for n in range(140)))
    given = Counter(each[0] for each in served(world, 140))
    for name, weight in zip(names, weights, strict=True):
        assert given[name] / 140 == pytest.approx(weight / sum(weights), abs=0.02)


def test_functions_of_a_namespace_share_its_part_by_their_own_weights() -> None:
    world = fair({"a/f": OwnerTerms(weight=3.0)})
    functions = ("a/f", "a/g", "b/f")
    world.arrive(*(of(name, f"{name}{n}") for name in functions for n in range(80)))
    given = Counter(each[:3] for each in served(world, 80))
    assert [given[name] for name in functions] == pytest.approx([30, 10, 40], abs=2)


def test_many_functions_have_no_more_than_one_when_they_are_of_one_namespace() -> None:
    world = fair()
    world.arrive(*(of(f"a/f{n}", f"a{n}") for n in range(60)))
    world.arrive(*(of(B, f"b{n}") for n in range(60)))
    given = Counter(each[0] for each in served(world, 40))
    assert given["a"] == pytest.approx(20, abs=2)


def test_long_runs_count_as_such_when_shares_are_of_gpu_time() -> None:
    core = a_core("fair", models=["bert", model("long", run_s=4.0)], parameters={"lead_s": 0.5})
    world = World(core)
    world.arrive(*(of(A, f"a{n}", "long") for n in range(40)))
    world.arrive(*(of(B, f"b{n}") for n in range(40)))
    given = Counter(each[0] for each in served(world, 40))
    assert given["b"] / given["a"] == pytest.approx(4.0, abs=1.0)


def test_what_was_used_counts_when_the_estimate_was_wrong() -> None:
    world = fair()
    world.arrive(*(of(A, f"a{n}") for n in range(40)), *(of(B, f"b{n}") for n in range(40)))
    given: Counter[str] = Counter()
    for _ in range(40):
        lease = world.leases[world.lease_on("g0")]
        owner = lease.requests[0][0]
        given[owner] += 1
        world.free("g0", world.now + (3.0 if owner == "a" else 1.0))  # estimated: 1 s
    assert given["b"] / given["a"] == pytest.approx(3.0, abs=0.5)


def test_idle_shares_are_used_by_others() -> None:
    world = fair({"b": OwnerTerms(weight=9.0)}, gpus=4)
    actions = world.arrive(*(of(A, f"a{n}") for n in range(9)))
    assert len({slot for _, slot in placements(actions) if not slot.startswith("queue")}) == 4


def test_namespace_saves_nothing_while_it_is_idle() -> None:
    world = fair()
    world.arrive(*(of(A, f"a{n}") for n in range(100)))
    served(world, 50)
    world.arrive(*(of(B, f"b{n}") for n in range(50)))
    given = Counter(each[0] for each in served(world, 20))
    assert given["b"] == pytest.approx(10, abs=2)


def test_policies_see_all_that_waits_when_the_lead_is_set_back_to_none() -> None:
    world = fair()
    world.arrive(*(of(A, f"a{n}") for n in range(20)), *(of(B, f"b{n}") for n in range(20)))
    assert world.core.cluster.held > 10
    world.send(PolicySet("lalbo3"))
    assert (world.core.cluster.held, world.core.layer(Tenancy).on) == (0, False)
    assert served(world, 5) == ["a0", "a1", "a2", "a3", "a4"]
    world.send(PolicySet("fair", {"lead_s": 0.5}))
    assert world.core.cluster.held > 10
    assert "b0" in served(world, 4)


def test_the_explanation_says_for_how_long_and_why_a_request_was_held_back() -> None:
    watched = CoreSettings(explain=frozenset({RequestId("a9")}))
    core = a_core("fair", parameters={"lead_s": 0.5}, settings=watched)
    world = World(core)
    world.arrive(*(of(A, f"a{n}") for n in range(10)), *(of(B, f"b{n}") for n in range(10)))
    while "a9" not in world.core.requests or world.core.requests[RequestId("a9")].lease is None:
        served(world, 1)
    found = next(
        action.explanation
        for actions in world.answers
        for action in actions
        if isinstance(action, Dispatch) and action.explanation is not None
    )
    assert found.held_s > 5.0
    assert found.held_for == "its namespace was ahead of its share"


# -- priorities and deadlines ---------------------------------------------------------------------


def test_request_of_higher_priority_goes_before_those_that_came_a_moment_earlier() -> None:
    world = fair()
    world.arrive(*(of(A, f"a{n}") for n in range(8)), of(A, "urgent", priority=5))
    assert served(world, 2) == ["a0", "urgent"]


def test_owner_of_higher_priority_goes_first_but_others_are_not_starved() -> None:
    world = fair({"b": OwnerTerms(priority=10)})
    world.arrive(*(of(A, f"a{n}") for n in range(40)), *(of(B, f"b{n}") for n in range(40)))
    given = [each[0] for each in served(world, 40)]
    head = given[1:].index("a")
    assert 5 <= head <= 12  # a head start of 10 s
    assert given[1 + head :].count("a") == pytest.approx((39 - head) / 2, abs=2)


def test_request_goes_first_when_little_is_left_of_its_time() -> None:
    world = fair()
    world.arrive(*(of(A, f"a{n}") for n in range(8)), of(A, "soon", slo_s=2.0))
    world.arrive(of(A, "later", slo_s=60.0))
    assert served(world, 2) == ["a0", "soon"]
    assert "later" not in served(world, 7)


# -- quotas ---------------------------------------------------------------------------------------


def quotas(
    core_models: tuple[str, ...] = ("bert", "a/m", "a/n", "b/m"), **terms: OwnerTerms
) -> World:
    world = World(a_core("lalbo3", gpus=["g0", "g1"], models=core_models))
    for owner, found in terms.items():
        world.send(TermsSet(owner.replace("__", "/"), found))
    return world


def over(actions: list[Action]) -> Mapping[str, str]:
    """The reasons for which requests were over a quota."""
    return {
        each.request: each.reason
        for each in actions
        if isinstance(each, Finish) and each.outcome is RequestOutcome.OVER_QUOTA
    }


@pytest.mark.parametrize("owner", ["a", "a/f"])
def test_request_is_refused_when_as_many_wait_as_its_quota_allows(owner: str) -> None:
    world = World(a_core("lalbo3"))
    world.send(TermsSet(owner, OwnerTerms(waiting=2)))
    actions = world.arrive(*(of(A, f"a{n}") for n in range(4)), of(B, "b0"))
    assert over(actions) == {"a3": f"quota waiting of {owner}: 2 of 2 requests wait"}
    world.free("g0")
    assert not over(world.arrive(of(A, "a4")))


def test_leases_beyond_a_quota_wait_until_one_ends() -> None:
    world = quotas(a=OwnerTerms(leases=1))
    actions = world.arrive(of(A, "a0"), of(A, "a1"), of(B, "b0"))
    assert placements(actions) == [("a0", "g0"), ("b0", "g1")]
    assert world.core.cluster.held == 1
    assert placements(world.free("g0")) == [("a1", "g0")]


def test_quota_of_a_function_holds_beside_that_of_its_namespace() -> None:
    world = quotas(a=OwnerTerms(leases=2), a__f=OwnerTerms(leases=1))
    placed = placements(world.arrive(of("a/f", "f0"), of("a/f", "f1"), of("a/g", "g0")))
    assert [name for name, _ in placed] == ["f0", "g0"]


def test_request_is_refused_when_the_gpu_time_of_the_window_is_used_up() -> None:
    world = quotas(a=OwnerTerms(gpu_s=5.0, window_s=60.0))
    assert not over(world.arrive(of(A, "a0")))  # 2 s load, 1 s run
    world.free("g0", 4.0)
    finish = only(Finish, world.arrive(of(A, "a1"), of(A, "a2"))[-1:])
    assert finish.outcome is RequestOutcome.OVER_QUOTA
    assert "quota gpu_s of a: 4.0 of 5 s of GPU time used in 60 s" in finish.reason
    assert finish.again_s == pytest.approx(60.0, abs=4.1)
    world.free("g0", 5.0)
    assert not over(world.arrive(of(A, "a3"), at=67.0))


def gpu_time_used_s(world: World) -> float:
    owner = world.core.layer(Tenancy).owners.spaces["a"]
    return owner.seen_s(world.now)


def kept_from(at_s: float, policy: str = "lalbo3") -> World:
    """A lease of a's on the only GPU, without a call from then on; its load was over at 2 s."""
    settings = CoreSettings(standing=StandingTerms(60.0, 1000))
    world = World(a_core(policy, models=["a/m", "b/m"], settings=settings))
    world.send(TermsSet("a", OwnerTerms(gpu_s=30.0)))
    world.arrive(replace(of(A, "a0", "a/m"), caller="gw"))
    world.send(ModelLoaded(GpuId("g0"), ModelId("a/m"), 2.0, Tier.ABSENT), 2.0)
    world.send(LeaseUsed(LeaseId(1), A, (), (CallEnd(RequestId("a0"), at_s),)), at_s)
    return world


def own_lease(terms: OwnerTerms | None = None) -> World:
    """The lease of a process of a's own on the only GPU; its load was over at 2 s."""
    world = World(a_core("lalbo3", models=["a/m", "b/m"]))
    if terms is not None:
        world.send(TermsSet("a", terms))
    world.arrive(replace(of(A, "a0", "a/m"), own=True))
    world.send(ModelLoaded(GpuId("g0"), ModelId("a/m"), 2.0, Tier.ABSENT), 2.0)
    return world


def test_kept_time_counts_for_no_quota_when_nobody_waits() -> None:
    world = kept_from(3.0)
    world.now = 20.0
    assert gpu_time_used_s(world) == pytest.approx(3.0)
    world.send(LeaseUsed(LeaseId(1), A, (LeaseUse(RequestId("u"), 20.0, 20.0, 20.5),)), 21.0)
    assert gpu_time_used_s(world) == pytest.approx(3.5), "calls count when they are reported"
    running = LeaseUse(RequestId("v"), 22.0, 22.0, None)
    world.send(LeaseUsed(LeaseId(1), A, (running,)), 22.0)
    world.now = 24.0
    assert gpu_time_used_s(world) == pytest.approx(5.5)
    world.send(SlotFreed(SlotId("g0"), LeaseId(1)), 25.0)
    assert gpu_time_used_s(world) == pytest.approx(6.5)


def test_kept_time_counts_for_a_quota_while_others_wait_for_the_slot() -> None:
    world = kept_from(3.0)
    world.arrive(replace(of(B, "b0", "b/m"), caller="gw"), at=10.0)
    world.send(SlotFreed(SlotId("g0"), LeaseId(1)), 12.0)
    assert gpu_time_used_s(world) == pytest.approx(5.0)


def test_calls_that_run_at_once_count_once_for_a_quota() -> None:
    world = kept_from(3.0)
    uses = [LeaseUse(RequestId(f"u{n}"), 4.0, 4.0, 5.0 - n / 10) for n in range(5)]
    world.send(LeaseUsed(LeaseId(1), A, (*uses, LeaseUse(RequestId("v"), 2.0, 2.0, 4.5))), 5.0)
    assert gpu_time_used_s(world) == pytest.approx(3.0 + 2.0), "v ran before it seemed to rest"
    world.send(LeaseUsed(LeaseId(1), A, (LeaseUse(RequestId("w"), 4.5, 4.5, None),)), 6.0)
    assert gpu_time_used_s(world) == pytest.approx(3.0 + 3.0)


def test_quota_gets_back_what_a_functions_own_process_kept() -> None:
    world = own_lease(OwnerTerms(gpu_s=30.0))
    world.now = 4.0
    assert gpu_time_used_s(world) == pytest.approx(2.0), "no tail of a lease holds it back"
    world.send(LeaseComputed(LeaseId(1), 0.5), 4.5)
    world.send(SlotFreed(SlotId("g0"), LeaseId(1)), 7.5)
    assert gpu_time_used_s(world) == pytest.approx(2.5)


def test_quota_that_comes_later_counts_no_tail_of_a_functions_own_process() -> None:
    world = own_lease()
    world.send(TermsSet("a", OwnerTerms(gpu_s=30.0)), 3.0)
    world.send(LeaseComputed(LeaseId(1), 0.5), 4.5)
    world.send(SlotFreed(SlotId("g0"), LeaseId(1)), 7.5)
    assert gpu_time_used_s(world) == pytest.approx(0.5)


def test_quota_counts_a_long_call_of_a_functions_own_process_while_it_runs() -> None:
    world = own_lease(OwnerTerms(gpu_s=30.0))
    for at_s in (3.0, 4.0, 9.0):
        world.send(LeaseComputed(LeaseId(1), at_s - max(2.0, world.now)), at_s)
        assert gpu_time_used_s(world) == pytest.approx(at_s)
    world.send(LeaseComputed(LeaseId(1), 1e300), 10.0)
    world.send(SlotFreed(SlotId("g0"), LeaseId(1)), 10.0)
    assert gpu_time_used_s(world) == pytest.approx(10.0), "never more than there was"


@pytest.mark.parametrize("waited_s", [0.0, 3.0])
def test_quota_does_not_count_what_was_kept_from_nobody_when_its_gateway_reports_late(
    waited_s: float,
) -> None:
    world = kept_from(3.0)
    world.send(LeaseUsed(LeaseId(1), A, (LeaseUse(RequestId("u"), 4.0, 4.0, None),)), 4.0)
    if waited_s:
        world.arrive(replace(of(B, "b0", "b/m"), caller="gw"), at=9.0 - waited_s)
    world.send(LeaseUsed(LeaseId(1), A, (), (CallEnd(RequestId("u"), 4.5),)), 9.0)
    assert gpu_time_used_s(world) == pytest.approx(3.0 + 0.5 + waited_s)


def test_quota_does_not_get_back_what_was_kept_while_others_waited() -> None:
    world = own_lease(OwnerTerms(gpu_s=30.0))
    world.arrive(of(B, "b0", "b/m"), at=4.5)
    world.send(LeaseComputed(LeaseId(1), 0.5), 2.5)
    world.send(SlotFreed(SlotId("g0"), LeaseId(1)), 7.5)
    assert gpu_time_used_s(world) == pytest.approx(2.5 + 3.0)


def test_quota_counts_no_time_twice_when_calls_are_reported_late() -> None:
    world = own_lease(OwnerTerms(gpu_s=30.0))
    world.arrive(of(B, "b0", "b/m"), at=2.0)
    world.send(LeaseComputed(LeaseId(1), 0.0), 3.0)
    assert gpu_time_used_s(world) == pytest.approx(3.0)
    for _ in range(2):
        world.send(LeaseComputed(LeaseId(1), 1.0), 4.0)
    assert gpu_time_used_s(world) == pytest.approx(4.0)
    world.send(SlotFreed(SlotId("g0"), LeaseId(1)), 7.0)
    assert gpu_time_used_s(world) == pytest.approx(7.0), "all of it was kept from others"


def test_quota_gets_back_all_that_was_kept_when_requests_share_the_lease() -> None:
    world = quotas(a=OwnerTerms(gpu_s=60.0))
    world.arrive(replace(of(A, "a0", "a/m"), own=True))
    lease = world.core.leases[LeaseId(1)]
    world.core.layer(Tenancy).rejoined(lease, lease.requests[0])
    world.send(ModelLoaded(GpuId("g0"), ModelId("a/m"), 2.0, Tier.ABSENT), 2.0)
    world.send(LeaseComputed(LeaseId(1), 2.0), 4.0)
    world.send(SlotFreed(SlotId("g0"), LeaseId(1)), 12.0)
    assert gpu_time_used_s(world) == pytest.approx(12.0 - 8.0)


@pytest.mark.parametrize("comes", [False, True])
def test_lease_that_stood_aside_leaves_no_rate_when_its_call_had_ended(*, comes: bool) -> None:
    settings = CoreSettings(standing=StandingTerms(60.0, 1000))
    world = World(a_core("lalbo3", gpus=["g0", "g1"], models=["a/m", "a/n"], settings=settings))
    world.send(TermsSet("a", OwnerTerms(gpu_s=300.0)))
    world.arrive(of(A, "n0", "a/n"), replace(of(A, "a0", "a/m"), caller="gw"))
    world.send(LeaseUsed(LeaseId(2), A, (), (CallEnd(RequestId("a0"), 2.0),)), 2.0)
    known, held = world.core.cluster.gpus[GpuId("g1")], world.leases[LeaseId(2)]
    model = ModelId("a/m")
    snapshot = GpuSnapshot(
        known.spec,
        ((model, GIB),),
        (LiveLease(held.id, held.slot, (model,), ()),),
        loading=(model,),
        stuck=((model, 5.0),),
    )
    world.send(NodeSnapshot(known.spec.node, (snapshot,)), 8.0)
    assert world.core.leases[held.id].beside
    if comes:
        world.send(ModelLoaded(GpuId("g1"), model, 9.0, Tier.ABSENT), 9.0)
    world.send(SlotFreed(held.slot, held.id), 10.0)
    owner = world.core.layer(Tenancy).owners.spaces["a"]
    assert (owner.rate, owner.leases) == (1.0, 1)


def test_many_short_calls_of_small_functions_do_not_use_up_a_quota() -> None:
    """As 21 of 60 did, of 7 ms each, with 30 s of GPU time a minute."""
    world = kept_from(2.007)
    for number in range(60):
        at_s = 3.0 + number / 3
        use = LeaseUse(RequestId(f"u{number}"), at_s, at_s, at_s + 0.007)
        world.send(LeaseUsed(LeaseId(1), A, (use,)), at_s + 0.017)
    assert gpu_time_used_s(world) == pytest.approx(2.007 + 60 * 0.007)


def test_kept_lease_is_recalled_when_its_calls_have_used_up_the_gpu_time() -> None:
    settings = CoreSettings(standing=StandingTerms(60.0, 1000))
    world = World(a_core("lalbo3", settings=settings))
    world.send(TermsSet("a", OwnerTerms(gpu_s=10.0)))
    dispatch = only(Dispatch, world.arrive(replace(of(A, "a0"), caller="gw"))[1:])
    assert dispatch.stands is not None
    used = LeaseUse(RequestId("u0"), 4.0, 4.0, 5.0)
    assert not any(
        isinstance(each, Recall)
        for each in world.send(LeaseUsed(dispatch.lease, A, (used,)), at=5.0)
    )
    late = LeaseUse(RequestId("u1"), 9.0, 9.0, 11.0)
    assert Recall(dispatch.lease) in world.send(LeaseUsed(dispatch.lease, A, (late,)), at=11.0)


def test_own_idle_model_leaves_when_a_load_exceeds_the_resident_bytes() -> None:
    world = quotas(a=OwnerTerms(resident_bytes=1500 * MIB))
    world.arrive(of(A, "a0", "a/m"))
    world.free("g0")
    actions = world.arrive(of(A, "a1", "a/n"))
    demote = only(Demote, [each for each in actions if isinstance(each, Demote)])
    assert (demote.model, demote.gpu) == ("a/m", "g0")
    assert [name for name, _ in placements(actions)] == ["a1"]


def test_request_waits_when_the_resident_bytes_are_in_use() -> None:
    world = quotas(a=OwnerTerms(resident_bytes=1500 * MIB))
    actions = world.arrive(of(A, "a0", "a/m"), of(A, "a1", "a/n"), of(B, "b0", "b/m"))
    assert placements(actions) == [("a0", "g0"), ("b0", "g1")]
    actions = world.free("g0")
    assert placements(actions) == [("a1", "g0")]
    assert (
        "a/m" not in world.core.cluster.index.gpus[world.leases[world.lease_of("a1")].gpu].residents
    )


def test_request_is_refused_when_its_models_alone_exceed_the_resident_bytes() -> None:
    world = quotas(a=OwnerTerms(resident_bytes=1000 * MIB))
    assert "quota resident_bytes of a" in over(world.arrive(of(A, "a0", "a/m")))["a0"]
    assert not over(world.arrive(of(B, "b0", "b/m")))


def test_prefetches_and_pins_keep_the_resident_bytes() -> None:
    world = quotas(a=OwnerTerms(resident_bytes=1500 * MIB))
    world.arrive(of(A, "a0", "a/m"))
    for event in (PrefetchAsked(ModelId("a/n")), PinAsked(ModelId("a/n"), GpuId("g1"))):
        assert not any(isinstance(each, Prepare) for each in world.send(event))
    world.free("g0")
    assert any(isinstance(each, Prepare) for each in world.send(PrefetchAsked(ModelId("a/n"))))


def test_waiting_requests_are_held_back_when_a_quota_of_leases_is_set() -> None:
    world = quotas()
    world.arrive(of(A, "a0"), of(A, "a1", "a/m"), of(A, "a2"), of(A, "a3"))
    world.send(TermsSet("a", OwnerTerms(leases=1)))
    assert world.core.cluster.held == 2
    assert not placements(world.free("g1"))
    world.send(TermsSet("a", None))
    assert world.core.cluster.held == 0
    assert not world.core.layer(Tenancy).on


def test_cancelled_request_that_is_held_back_leaves_nothing() -> None:
    world = quotas(a=OwnerTerms(leases=0))
    world.arrive(of(A, "a0"))
    assert world.core.cluster.queued == 1
    assert ended(world.send(RequestCancelled(RequestId("a0")))) == {"a0": RequestOutcome.CANCELLED}
    assert (world.core.cluster.queued, world.core.cluster.held) == (0, 0)


def test_a_flood_does_not_fill_the_queue_when_namespaces_take_turns() -> None:
    settings = CoreSettings(max_waiting=30)
    world = World(a_core("fair", parameters={"lead_s": 1.0}, settings=settings))
    refused = ended(world.arrive(*(of(A, f"a{n}") for n in range(60))))
    assert set(refused.values()) == {RequestOutcome.QUEUE_FULL}
    assert not ended(world.arrive(*(of(B, f"b{n}") for n in range(5))))


def test_namespace_waits_no_longer_than_it_may_when_later_requests_go_before_its_own() -> None:
    """One request of the heavier namespace waits at any time, and most turns are its."""
    world = fair({"b": OwnerTerms(weight=3.0)})
    waiting: dict[str, float] = {}
    waits_s: list[float] = []
    for step in range(200):
        if not any(name.startswith("b") for name in waiting):
            world.arrive(of(B, f"b{step}"))
            waiting[f"b{step}"] = world.now
        if not ended(world.arrive(of(A, f"a{step}", max_wait_s=10.0))):
            waiting[f"a{step}"] = world.now
        begun_s = world.now
        for name in served(world, 1):
            waited_s = begun_s - waiting.pop(name)
            waits_s += [waited_s] if name.startswith("a") else []
    assert len(waits_s) > 40
    assert max(waits_s) <= 12.0


def test_owners_are_forgotten_when_they_have_nothing_to_do() -> None:
    world = fair()
    for number in range(2500):
        name = f"r{number}"
        world.arrive(of(f"t{number}/f", name))
        lease = world.lease_on("g0")
        world.send(SlotFreed(world.leases[lease].slot, lease), world.now + 1.0)
    assert len(world.core.layer(Tenancy).owners.functions) < 300


# -- windows --------------------------------------------------------------------------------------


def test_window_counts_running_leases_and_forgets_what_is_old() -> None:
    window = GpuWindow(60.0, 0.0)
    assert window.used_s(2.0, 10.0) == pytest.approx(20.0)
    assert window.used_s(0.0, 65.0) == pytest.approx(20.0, abs=14.0)
    assert window.used_s(0.0, 71.1) == 0.0
    assert window.used_s(1.0, 1000.0) == pytest.approx(60.5, abs=0.6)


def test_window_says_when_it_has_room() -> None:
    window = GpuWindow(60.0, 0.0)
    window.used_s(1.0, 10.0)
    again_s = window.frees_in_s(4.0, 10.0)
    assert again_s is not None
    assert window.used_s(0.0, 10.0 + again_s) <= 6.0
    assert window.frees_in_s(11.0, 10.0) is None


def test_the_core_has_the_terms_that_were_set_last() -> None:
    core: Core = quotas(a=OwnerTerms(leases=1), b=OwnerTerms(weight=2.0)).core
    core.handle(TermsSet("a", None), 1.0)
    assert dict(core.layer(Tenancy).owners.terms) == {"b": OwnerTerms(weight=2.0)}
