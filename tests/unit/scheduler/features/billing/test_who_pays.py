"""Who pays for what: users of a lease, users before, nobody."""

from collections import defaultdict
from math import inf
from typing import Any

import pytest
from msgspec.structs import replace

from cache_manager.model.ids import MIB, GpuId, ModelId, NodeId, Tier
from cache_manager.residency import KeptContext
from scheduler.cluster.request_queue import Pending
from scheduler.core.core import Core
from scheduler.features.billing.charges import (
    CONTEXT,
    DISK,
    GPU_TIME,
    HOST,
    IDLE,
    IN_USE,
    KEPT,
    KEPT_FROM_OTHERS,
    LOADING,
    NOBODY,
    WAITING,
)
from scheduler.features.billing.use_meter import UseMeter
from scheduler.model.actions import EndLease
from scheduler.model.events import (
    EvictAsked,
    GpuSnapshot,
    LeaseComputed,
    LeaseUsed,
    LiveLease,
    LoadFailed,
    ModelDemoted,
    ModelLoaded,
    ModelRegistered,
    NodeSnapshot,
    PrefetchAsked,
    RequestArrived,
    RequestCancelled,
    SlotFreed,
)
from scheduler.model.values import (
    AfterLoss,
    CallEnd,
    CoreSettings,
    LeaseId,
    LeaseUse,
    ModelSpec,
    RequestId,
    SlotId,
    StandingTerms,
)
from tests.kit.cores.builders import GIB, a_core, gpu, request

_S = 1_000_000
_Charged = dict[tuple[str, int], int]


def metered(core: Core) -> tuple[Core, UseMeter]:
    """A core and its meter."""
    return core, core.add(UseMeter(core.lifecycle, 0.0))


def charged(meter: UseMeter, now: float) -> _Charged:
    """What each function was charged for, in all places together."""
    sums: _Charged = defaultdict(int)
    for row in meter.collect(now)[0]:
        for charge, amount in enumerate(row.amounts):
            if amount:
                sums[row.function, charge] += amount
    return dict(sums)


def run(core: Core, name: str, function: str, begin: float, end: float, *models: str) -> None:
    """One request of a function, from its arrival at an idle slot to the slot's end."""
    core.handle(RequestArrived(replace(request(name, *models), function=function)), begin)
    lease = max(core.leases)
    core.handle(SlotFreed(core.leases[lease].slot.id, lease), end)


def test_function_pays_for_its_lease_and_for_the_idle_time_after_it() -> None:
    core, meter = metered(a_core())
    run(core, "r", "team/f", 10.0, 12.0)
    assert charged(meter, 15.0) == {
        ("team/f", GPU_TIME): 2 * _S,
        ("team/f", LOADING): 2 * _S,
        ("team/f", IN_USE): 2 * _S * GIB,
        ("team/f", IDLE): 3 * _S * GIB,
    }


def test_users_of_a_model_share_its_idle_time_from_their_first_use_on() -> None:
    core, meter = metered(a_core())
    run(core, "r0", "f", 0.0, 1.0)
    run(core, "r1", "g", 3.0, 4.0)
    found = charged(meter, 10.0)
    assert found["f", IDLE] == (2 + 3) * _S * GIB
    assert found["g", IDLE] == 3 * _S * GIB


def test_leases_that_use_a_model_together_share_it() -> None:
    core, meter = metered(a_core(gpus=[gpu("g0", slots=2)]))
    for name, function in (("r0", "f"), ("r1", "g")):
        core.handle(RequestArrived(replace(request(name), function=function)), 0.0)
    core.handle(SlotFreed(SlotId("g0.0"), LeaseId(1)), 2.0)
    core.handle(SlotFreed(SlotId("g0.1"), LeaseId(2)), 5.0)
    assert charged(meter, 5.0) == {
        ("f", GPU_TIME): 2 * _S,
        ("f", LOADING): 2 * _S,
        ("g", GPU_TIME): 5 * _S,
        ("f", IN_USE): _S * GIB,
        ("g", IN_USE): (1 + 3) * _S * GIB,
    }


def test_leases_on_one_slot_share_its_time() -> None:
    core, meter = metered(a_core(gpus=[gpu("g0", leases=2)], models=("a", "b")))
    core.handle(RequestArrived(replace(request("r0", "a"), function="f")), 0.0)
    core.handle(RequestArrived(replace(request("r1", "b"), function="g")), 1.0)
    core.handle(SlotFreed(SlotId("g0"), LeaseId(1)), 4.0)
    found = charged(meter, 6.0)
    assert found["f", GPU_TIME] == (1 + 1.5) * _S
    assert found["g", GPU_TIME] == (1.5 + 2) * _S


def test_odd_units_are_not_lost_when_three_share() -> None:
    core, meter = metered(a_core(gpus=[gpu("g0", slots=3, memory_mb=1025)]))
    for number in range(3):
        core.handle(RequestArrived(replace(request(f"r{number}"), function=f"f{number}")), 0.0)
    found = charged(meter, 1e-6)
    assert [found[f"f{number}", IN_USE] for number in range(3)] == [
        GIB // 3 + 1,
        GIB // 3,
        GIB // 3,
    ]


def test_nobody_pays_for_what_was_prefetched_until_somebody_uses_it() -> None:
    core, meter = metered(a_core())
    core.handle(PrefetchAsked(ModelId("bert")), 0.0)
    core.handle(SlotFreed(SlotId("g0"), LeaseId(1)), 2.0)
    run(core, "r", "f", 5.0, 6.0)
    found = charged(meter, 8.0)
    assert found[NOBODY, GPU_TIME] == 2 * _S
    assert found[NOBODY, IDLE] == 3 * _S * GIB
    assert found["f", IDLE] == 2 * _S * GIB


# -- what the time of slots was spent with ------------------------------------------------------


def standing(load_s: float = 2.0, **more: Any) -> tuple[Core, UseMeter]:
    """A lease that its gateway may keep: its call arrived at 0, and its model is there then."""
    settings = CoreSettings(standing=StandingTerms(60.0, 100))
    core, meter = metered(a_core(settings=settings, **more))
    core.handle(RequestArrived(replace(request("r"), function="f", caller="gw")), 0.0)
    core.handle(ModelLoaded(GpuId("g0"), ModelId("bert"), load_s, Tier.ABSENT), load_s)
    return core, meter


def used(core: Core, now: float, *uses: LeaseUse, ended: float | None = None) -> None:
    ends = () if ended is None else (CallEnd(RequestId("r"), ended),)
    core.handle(LeaseUsed(LeaseId(1), "f", uses, ends), now)


def test_two_short_calls_are_milliseconds_and_the_rest_was_kept() -> None:
    core, meter = standing()
    used(core, 2.013, ended=2.003)
    used(core, 3.01, LeaseUse(RequestId("u"), 2.999, 3.0, 3.004))
    core.handle(SlotFreed(SlotId("g0"), LeaseId(1)), 7.003)
    assert charged(meter, 7.003) == {
        ("f", GPU_TIME): 7_003_000,
        ("f", LOADING): 2 * _S,
        ("f", KEPT): 5 * _S - 4_000,
        ("f", WAITING): 1_000,
        ("f", IN_USE): 7_003_000 * GIB,
    }


def test_lease_is_kept_between_calls_and_not_while_one_runs() -> None:
    core, meter = standing()
    used(core, 3.0, ended=3.0)
    used(core, 5.0, LeaseUse(RequestId("u"), 5.0, 5.0, None))
    assert charged(meter, 6.0)["f", KEPT] == 2 * _S
    assert ("f", KEPT) not in charged(meter, 9.0), "the call still runs"


def test_kept_time_is_counted_as_taken_from_others_only_while_somebody_waits() -> None:
    core, meter = standing(models=("bert", "other"))
    used(core, 3.0, ended=3.0)
    core.handle(RequestArrived(replace(request("o", "other"), function="g", caller="gw")), 6.0)
    core.handle(SlotFreed(SlotId("g0"), LeaseId(1)), 6.25)
    found = charged(meter, 6.25)
    assert (found["f", KEPT], found["f", KEPT_FROM_OTHERS]) == (3_250_000, 250_000)
    assert found["g", WAITING] == 250_000


OVERLAPPING = (
    LeaseUse(RequestId("u2"), 4.25, 4.25, 5.0),
    *(LeaseUse(RequestId(f"u{number}"), 4.0, 4.0, 4.5) for number in range(2)),
)


@pytest.mark.parametrize("collected_s", [4.75, 6.0, 13.0])
def test_calls_that_run_at_once_compute_once(collected_s: float) -> None:
    core, meter = standing()
    used(core, 3.0, ended=3.0)
    early = charged(meter, 4.75) if collected_s < 5.0 else {}
    used(core, 5.0, *OVERLAPPING)
    found = charged(meter, collected_s) if collected_s == 6.0 else early
    core.handle(SlotFreed(SlotId("g0"), LeaseId(1)), 13.0)
    assert charged(meter, 13.0)["f", KEPT] + found.get(("f", KEPT), 0) == 9 * _S


def test_call_that_runs_beside_ended_ones_counts_from_their_ends() -> None:
    core, meter = standing()
    used(core, 3.0, ended=3.0)
    used(core, 6.0, LeaseUse(RequestId("v"), 4.5, 4.5, None), *OVERLAPPING)
    assert charged(meter, 6.0)["f", KEPT] == _S


def test_calls_of_one_lease_take_nothing_of_its_kept_time_when_others_share_the_slot() -> None:
    core, meter = standing(gpus=[gpu("g0", leases=2)], models=("bert", "other"))
    core.handle(RequestArrived(replace(request("o", "other"), function="g")), 2.0)
    used(core, 3.0, ended=3.0)
    used(core, 5.0, LeaseUse(RequestId("u"), 3.0, 3.0, 5.0))
    used(core, 9.0, LeaseUse(RequestId("v"), 9.0, 9.0, 9.0))
    assert charged(meter, 9.0)["f", KEPT] == 2 * _S


def test_kept_time_is_taken_from_others_once_when_they_wait_for_this_slot_and_any() -> None:
    core, meter = standing()
    used(core, 3.0, ended=3.0)
    cluster, slot = core.cluster, core.cluster.slots[SlotId("g0")]
    here, anywhere = [
        Pending(request(name), cluster.bundle((ModelId("bert"),)), 0, 0.0) for name in "ha"
    ]
    cluster.now = 4.0
    slot.local.add(here, 0, cluster.uncontended_s)
    cluster.waiting.add(anywhere, 0, 5.0)
    cluster.waiting.remove(anywhere, 7.0)
    cluster.now = 8.0
    slot.local.remove(here, cluster.uncontended_s)
    core.handle(SlotFreed(SlotId("g0"), LeaseId(1)), 13.0)
    found = charged(meter, 13.0)
    assert (found["f", KEPT], found["f", KEPT_FROM_OTHERS]) == (10 * _S, 4 * _S)


def own_process() -> tuple[Core, UseMeter]:
    """The lease of a function's own process, whose model is there at 2 s."""
    core, meter = metered(a_core(models=("bert", "other")))
    core.handle(RequestArrived(replace(request("r"), function="f", own=True)), 0.0)
    core.handle(ModelLoaded(GpuId("g0"), ModelId("bert"), 2.0, Tier.ABSENT), 2.0)
    return core, meter


_KEPT = (KEPT, KEPT_FROM_OTHERS)


def computed(core: Core, computed_s: float, now: float) -> None:
    """The node says for how long calls of the process have run since it last said so."""
    core.handle(LeaseComputed(LeaseId(1), computed_s), now)


def joined() -> tuple[Core, UseMeter]:
    """The lease of f's own process is a hit on what the lease of g loads, until 2 s."""
    core, meter = metered(a_core(gpus=[gpu("g0", slots=2)]))
    core.handle(RequestArrived(replace(request("r0"), function="g")), 0.0)
    core.handle(RequestArrived(replace(request("r1"), function="f", own=True)), 0.0)
    return core, meter


@pytest.mark.parametrize("load_s", [0.5, 30.0])
@pytest.mark.parametrize("ended", [False, True])
def test_own_process_waits_for_the_load_of_another_lease_and_computes_then(
    load_s: float, *, ended: bool
) -> None:
    core, meter = joined()
    if ended:  # its load goes on
        core.handle(SlotFreed(SlotId("g0.0"), LeaseId(1)), 0.25)
    core.handle(ModelLoaded(GpuId("g0"), ModelId("bert"), load_s, Tier.ABSENT), load_s)
    core.handle(LeaseComputed(LeaseId(2), 1.0), load_s + 1.5)
    core.handle(SlotFreed(SlotId("g0.1"), LeaseId(2)), load_s + 2.0)
    found = charged(meter, load_s + 2.0)
    parts = [found["f", charge] for charge in (GPU_TIME, LOADING, KEPT)]
    assert parts == [int((load_s + 2.0) * _S), int(load_s * _S), _S]


def test_own_process_waits_for_the_load_under_its_second_lease_too() -> None:
    core, meter = joined()
    core.handle(SlotFreed(SlotId("g0.0"), LeaseId(1)), 0.25)
    core.handle(SlotFreed(SlotId("g0.1"), LeaseId(2)), 0.5)
    core.handle(RequestArrived(replace(request("r2"), function="f", own=True)), 0.5)
    core.handle(ModelLoaded(GpuId("g0"), ModelId("bert"), 3.0, Tier.ABSENT), 3.0)
    core.handle(SlotFreed(core.leases[LeaseId(3)].slot.id, LeaseId(3)), 5.0)
    found = charged(meter, 5.0)
    assert [found["f", charge] for charge in (GPU_TIME, LOADING, KEPT)] == [5 * _S, 3 * _S, 2 * _S]


def test_own_process_learns_that_a_load_failed_whose_lease_has_ended() -> None:
    core, _ = joined()
    core.handle(SlotFreed(SlotId("g0.0"), LeaseId(1)), 0.25)
    failed = LoadFailed(GpuId("g0"), ModelId("bert"), "no such file", AfterLoss.FAIL, LeaseId(1))
    assert any(isinstance(action, EndLease) for action in core.handle(failed, 0.5))


def test_own_process_loads_no_longer_when_the_report_of_its_load_was_lost() -> None:
    core, meter = metered(a_core())
    core.handle(RequestArrived(replace(request("r"), function="f", own=True)), 0.0)
    live = LiveLease(LeaseId(1), SlotId("g0"), (ModelId("bert"),), (RequestId("r"),), own=True)
    found = GpuSnapshot(gpu("g0"), ((ModelId("bert"), GIB),), (live,))
    core.handle(NodeSnapshot(gpu("g0").node, (found,)), 3.0)
    core.handle(SlotFreed(SlotId("g0"), LeaseId(1)), 7.0)
    paid = charged(meter, 7.0)
    assert (paid["f", LOADING], paid["f", KEPT]) == (3 * _S, 4 * _S)


def test_what_was_collected_as_computing_is_repaid_when_its_gateway_reports_late() -> None:
    core, meter = standing()
    assert charged(meter, 6.0)["f", GPU_TIME] == 6 * _S
    used(core, 7.0, ended=2.5)
    found = charged(meter, 7.0)
    assert (found["f", GPU_TIME], found["f", KEPT]) == (_S, _S)
    used(core, 8.0, LeaseUse(RequestId("u"), 8.0, 8.0, None))
    found = charged(meter, 13.0)
    kept_us = _S + 3_500_000
    assert (found["f", GPU_TIME], found["f", KEPT]) == (6 * _S, kept_us), "5 s computed, 1.5 new"


@pytest.mark.parametrize("collected_s", [None, 6.0])
def test_late_gateway_pays_for_what_it_kept_from_others(collected_s: float | None) -> None:
    core, meter = standing(models=("bert", "other"))
    core.handle(RequestArrived(replace(request("o", "other"), function="g", caller="gw2")), 3.0)
    early = {} if collected_s is None else charged(meter, collected_s)
    used(core, 9.0, ended=2.5)
    used(core, 9.0, LeaseUse(RequestId("u"), 9.0, 9.0, None))
    core.handle(SlotFreed(SlotId("g0"), LeaseId(1)), 16.0)
    paid = charged(meter, 16.0)
    kept, from_others = [early.get(("f", each), 0) + paid.get(("f", each), 0) for each in _KEPT]
    assert (kept, from_others) == (6_500_000, 6 * _S)


def test_late_gateway_pays_for_no_wait_before_its_lease() -> None:
    settings = CoreSettings(standing=StandingTerms(60.0, 100))
    core, meter = metered(a_core(settings=settings, models=("bert", "other")))
    core.handle(RequestArrived(replace(request("r0"), function="f")), 0.0)
    core.handle(RequestArrived(replace(request("o", "other"), function="g")), 1.0)
    core.handle(RequestCancelled(RequestId("o")), 2.0)
    core.handle(SlotFreed(SlotId("g0"), LeaseId(1)), 3.0)
    core.handle(RequestArrived(replace(request("r"), function="f", caller="gw")), 3.0)
    core.handle(LeaseUsed(LeaseId(2), "f", (), (CallEnd(RequestId("r"), 3.5),)), 9.0)
    core.handle(SlotFreed(SlotId("g0"), LeaseId(2)), 9.0)
    found = charged(meter, 9.0)
    assert (found["f", KEPT], found.get(("f", KEPT_FROM_OTHERS), 0)) == (5_500_000, 0)


def test_nothing_was_kept_when_the_lease_ends_before_its_load() -> None:
    core, meter = metered(a_core())
    core.handle(RequestArrived(replace(request("r"), function="f", own=True)), 0.0)
    computed(core, 5.0, 5.0)
    core.handle(SlotFreed(SlotId("g0"), LeaseId(1)), 6.0)
    found = charged(meter, 6.0)
    assert (found["f", LOADING], found.get(("f", KEPT), 0)) == (6 * _S, 0)


@pytest.mark.parametrize("until_s", [4.0, 7.0])
def test_own_process_keeps_from_others_what_they_wait(until_s: float) -> None:
    core, meter = own_process()
    core.handle(RequestArrived(replace(request("o", "other"), function="g", own=True)), 2.1)
    computed(core, 1.0, 3.0)
    if until_s < 7.0:
        core.handle(RequestCancelled(RequestId("o")), until_s)
    core.handle(SlotFreed(SlotId("g0"), LeaseId(1)), 7.0)
    found = charged(meter, 7.0)
    assert (found["f", KEPT], found["f", KEPT_FROM_OTHERS]) == (4 * _S, (until_s - 3.0) * _S)


@pytest.mark.parametrize("collected_s", [3.5, 4.0, 7.0])
@pytest.mark.parametrize("end_s", [4.25, 7.0])
def test_what_an_own_process_computed_was_kept_from_nobody_when_its_node_says_so_late(
    collected_s: float, end_s: float
) -> None:
    core, meter = own_process()
    core.handle(RequestArrived(replace(request("o", "other"), function="g", own=True)), 2.0)
    computed(core, 0.0, 3.0)
    early = charged(meter, 3.5) if collected_s == 3.5 else {}
    for _ in range(2):
        computed(core, 1.0, 4.0)
    found = charged(meter, 4.0) if collected_s == 4.0 else early
    core.handle(SlotFreed(SlotId("g0"), LeaseId(1)), end_s)
    paid = charged(meter, end_s)
    sums = [paid.get(("f", each), 0) + found.get(("f", each), 0) for each in _KEPT]
    assert sums == [(end_s - 4.0) * _S] * 2


def test_lease_that_a_functions_own_process_kept_was_kept_for_as_long_as_its_node_says() -> None:
    core, meter = own_process()
    computed(core, 0.007, 3.0)
    core.handle(SlotFreed(SlotId("g0"), LeaseId(1)), 7.007)
    found = charged(meter, 7.007)
    assert found["f", GPU_TIME] - found["f", LOADING] - found["f", KEPT] == 7_000


def computing(meter: UseMeter, before_us: int, now: float) -> int:
    """The microseconds that were computed until now."""
    found = charged(meter, now)
    parts = [found.get(("f", charge), 0) for charge in (GPU_TIME, LOADING, KEPT)]
    return before_us + parts[0] - parts[1] - parts[2]


def test_calls_that_a_gateway_reports_are_split_right_at_each_second() -> None:
    core, meter = standing()
    used(core, 2.013, ended=2.003)
    computed_us = 0
    for second in range(3, 70):
        if second == 5:
            used(core, 4.2, LeaseUse(RequestId("u"), 4.1, 4.1, None))
        if second == 65:
            core.handle(LeaseUsed(LeaseId(1), "f", (), (CallEnd(RequestId("u"), 64.1),)), 64.11)
        computed_us = computing(meter, computed_us, float(second))
        assert computed_us == pytest.approx(3_000 + min(60, max(0, second - 4.1)) * _S, abs=2)


@pytest.mark.parametrize("late_s", [0, 1, 20])
def test_long_call_of_an_own_process_is_charged_once_whenever_its_node_reports(late_s: int) -> None:
    core, meter = own_process()
    computed_us = 0
    for second in range(3, 70):
        now = float(second)
        reported_s = now - late_s
        if 4.0 <= reported_s <= 48.0:
            computed(core, 1.0, now)
        computed_us = computing(meter, computed_us, now)
        assert computed_us == min(45, max(0, second - late_s - 3)) * _S
    core.handle(SlotFreed(SlotId("g0"), LeaseId(1)), 70.0)
    assert computing(meter, computed_us, 70.0) == 45 * _S


def test_report_that_comes_with_the_end_of_the_lease_is_charged_when_all_was_collected() -> None:
    core, meter = own_process()
    computed_us = computing(meter, 0, 9.0)
    computed(core, 7.0, 9.0)
    core.handle(SlotFreed(SlotId("g0"), LeaseId(1)), 9.0)
    assert (computed_us, computing(meter, 0, 9.0)) == (0, 7 * _S)


@pytest.mark.parametrize("asks_again", [False, True])
def test_tail_of_an_own_processs_lease_is_kept_when_another_leader_takes_over(
    *, asks_again: bool
) -> None:
    core, meter = metered(a_core(gpus=()))
    live = LiveLease(LeaseId(1), SlotId("g0"), (ModelId("bert"),), (RequestId("r"),), own=True)
    found = GpuSnapshot(gpu("g0"), ((ModelId("bert"), GIB),), (live,))
    core.handle(NodeSnapshot(gpu("g0").node, (found,)), 1.0)
    if asks_again:
        core.handle(RequestArrived(replace(request("r"), function="f", own=True)), 1.5)
    computed(core, 0.25, 2.0)
    early = charged(meter, 4.0)
    computed(core, 0.5, 5.0)
    core.handle(SlotFreed(SlotId("g0"), LeaseId(1)), 6.0)
    paid = charged(meter, 6.0)
    sums = {
        charge: sum(each.get((who, charge), 0) for each in (early, paid) for who in ("f", NOBODY))
        for charge in (GPU_TIME, KEPT)
    }
    assert (sums[GPU_TIME], sums[GPU_TIME] - sums[KEPT]) == (5 * _S, 750_000)
    assert early["f" if asks_again else NOBODY, KEPT] > 2 * _S


@pytest.mark.parametrize("computed_s", [inf, 1e300, -5.0])
def test_node_cannot_say_that_more_was_computed_than_there_was(computed_s: float) -> None:
    core, meter = own_process()
    for _ in range(2):
        computed(core, computed_s, 3.0)
    core.handle(SlotFreed(SlotId("g0"), LeaseId(1)), 5.0)
    assert charged(meter, 5.0)["f", KEPT] == (2 * _S if computed_s > 0 else 3 * _S)


def test_request_of_an_earlier_leaders_lease_pays_once_it_is_known() -> None:
    core, meter = metered(a_core(gpus=()))
    bert = (ModelId("bert"), GIB)
    live = LiveLease(LeaseId(7), SlotId("g0"), (ModelId("bert"),), (RequestId("r"),))
    found = GpuSnapshot(gpu("g0"), (bert,), (live,))
    core.handle(NodeSnapshot(gpu("g0").node, (found,)), 1.0)
    core.handle(RequestArrived(replace(request("r"), function="f")), 3.0)
    paid = charged(meter, 8.0)
    assert (paid[NOBODY, GPU_TIME], paid["f", GPU_TIME]) == (2 * _S, 5 * _S)
    assert (paid[NOBODY, IN_USE], paid["f", IN_USE]) == (2 * _S * GIB, 5 * _S * GIB)


def test_stored_weights_are_paid_by_who_used_them_on_that_node() -> None:
    core, meter = metered(a_core(models=()))
    spec = ModelSpec(ModelId("bert"), GIB, weights_bytes=300 * MIB)
    core.handle(ModelRegistered(spec), 0.0)
    node = NodeId("node-of-g0")
    core.handle(ModelDemoted(node, None, ModelId("bert"), Tier.HOST), 0.0)
    run(core, "r", "f", 2.0, 3.0)
    core.handle(ModelDemoted(node, None, ModelId("bert"), Tier.DISK), 7.0)
    found = charged(meter, 10.0)
    assert found[NOBODY, HOST] == 2 * _S * 300 * MIB
    assert found["f", HOST] == 5 * _S * 300 * MIB
    assert found["f", DISK] == 3 * _S * 300 * MIB


def test_empty_process_is_paid_by_who_used_its_model() -> None:
    core, meter = metered(a_core())
    run(core, "r", "f", 0.0, 1.0)
    core.handle(EvictAsked(ModelId("bert")), 2.0)
    cache = core.cluster.gpus[GpuId("g0")].cache
    cache.contexts[ModelId("bert")] = KeptContext(ModelId("bert"), 500 * MIB, 2.0)
    meter.changes.note(cache.id, ModelId("bert"))
    meter.after_event()
    rows, spans = meter.collect(6.0)
    assert sum(row.amounts[CONTEXT] for row in rows if row.function == "f") == 4 * _S * 500 * MIB
    (span,) = spans
    held = sum(sum(row.amounts[IN_USE : CONTEXT + 1]) for row in rows)
    assert held + span.unused_byte_us == span.byte_us == 6 * _S * 8 * GIB


A, B, OF_OTHERS = ModelId("t/a"), ModelId("t/b"), ModelId("u/c")


def sharing(*processes: tuple[int, tuple[ModelId, ...]]) -> tuple[Core, UseMeter]:
    """A core whose one GPU holds three models of two tenants, in these processes of several."""
    core, meter = metered(a_core(gpus=(), models=(A, B, OF_OTHERS)))
    meter.remember({A: ["t/f"], B: ["t/g"], OF_OTHERS: ["u/h"]}, 0.0)
    report(core, 0.0, *processes)
    return core, meter


def report(core: Core, at: float, *processes: tuple[int, tuple[ModelId, ...]]) -> None:
    spec = gpu("g0")
    held = tuple((each, GIB) for each in (A, B, OF_OTHERS))
    core.handle(NodeSnapshot(spec.node, (GpuSnapshot(spec, held, shared=processes),)), at)


def idle_and_unused(meter: UseMeter, now: float) -> tuple[dict[str, int], int]:
    """What was charged for idle memory, and the memory that nobody used; together all there is."""
    rows, (span,) = meter.collect(now)
    idle = {row.function: row.amounts[IDLE] for row in rows if row.amounts[IDLE]}
    assert sum(idle.values()) + span.unused_byte_us == span.byte_us
    return idle, span.unused_byte_us


def test_models_of_a_tenant_share_the_context_of_their_process_to_the_byte() -> None:
    _, meter = sharing((301, (A, B)), (200, (OF_OTHERS,)))
    idle, unused = idle_and_unused(meter, 2.0)
    assert idle == {
        "t/f": 2 * _S * (GIB + 151), "t/g": 2 * _S * (GIB + 150), "u/h": 2 * _S * (GIB + 200),
    }  # fmt: skip
    assert unused == 2 * _S * (5 * GIB - 501)


def test_lease_pays_for_its_models_part_of_the_context() -> None:
    core, meter = sharing((300, (A, B)))
    run(core, "r", "t/f", 1.0, 3.0, A)
    assert charged(meter, 3.0)["t/f", IN_USE] == 2 * _S * (GIB + 150)


def test_context_is_split_anew_when_a_model_joins_the_process_or_leaves_it() -> None:
    core, meter = sharing((300, (A,)))
    core.handle(ModelLoaded(GpuId("g0"), B, 1.0, Tier.HOST, shares=True), 2.0)
    idle, _ = idle_and_unused(meter, 4.0)
    assert idle["t/f"] == 4 * _S * GIB + 2 * _S * 300 + 2 * _S * 150
    assert idle["t/g"] == 4 * _S * GIB + 2 * _S * 150
    core.handle(EvictAsked(A), 4.0)
    assert idle_and_unused(meter, 5.0)[0]["t/g"] == _S * (GIB + 300)


def test_models_with_processes_of_their_own_pay_for_no_other_process() -> None:
    core, meter = sharing((300, (A,)))
    core.handle(ModelLoaded(GpuId("g0"), B, 1.0, Tier.HOST), 0.0)
    assert idle_and_unused(meter, 1.0)[0]["t/g"] == _S * GIB


def test_nobody_pays_for_a_process_that_its_last_model_has_left() -> None:
    core, meter = sharing((300, (A,)))
    core.handle(EvictAsked(A), 0.0)
    assert idle_and_unused(meter, 1.0)[0] == {"t/g": _S * GIB, "u/h": _S * GIB}
    report(core, 1.0)
    assert idle_and_unused(meter, 2.0)[0]["t/f"] == _S * GIB


def test_model_that_leaves_for_its_shared_process_pays_for_no_part_of_it() -> None:
    _, meter = sharing((6 * GIB, (A, B)))
    idle, unused = idle_and_unused(meter, 1.0)
    assert (idle, unused) == ({"t/g": 7 * GIB * _S, "u/h": GIB * _S}, 0)


def test_weights_stored_after_the_model_left_are_paid_by_who_used_it() -> None:
    core, meter = metered(a_core())
    run(core, "r", "f", 0.0, 1.0)
    core.handle(EvictAsked(ModelId("bert")), 2.0)
    core.handle(ModelDemoted(NodeId("node-of-g0"), None, ModelId("bert"), Tier.HOST), 3.0)
    found = charged(meter, 5.0)
    assert found["f", HOST] == 2 * _S * GIB
    assert (NOBODY, HOST) not in found


def test_users_of_earlier_terms_pay_for_what_nodes_report_to_a_new_leader() -> None:
    core, meter = metered(a_core(gpus=()))
    meter.remember({ModelId("bert"): ["f", "g"]}, 0.0)
    spec, bert = gpu("g0"), ModelId("bert")
    stored = ((bert, Tier.HOST),)
    core.handle(NodeSnapshot(spec.node, (GpuSnapshot(spec, ((bert, GIB),)),), stored), 1.0)
    half = 2 * _S * GIB
    assert charged(meter, 5.0) == {
        ("f", IDLE): half, ("g", IDLE): half, ("f", HOST): half, ("g", HOST): half,
    }  # fmt: skip


def test_users_of_earlier_terms_do_not_pay_for_a_later_load() -> None:
    core, meter = metered(a_core())
    meter.remember({ModelId("bert"): ["f"]}, 0.0)
    run(core, "r", "g", 70.0, 71.0)
    assert ("f", IDLE) not in charged(meter, 80.0)


def test_time_that_goes_back_is_charged_to_nobody_twice() -> None:
    core, meter = metered(a_core())
    run(core, "r0", "f", 5.0, 7.0)
    run(core, "r1", "f", 6.0, 6.5)
    assert charged(meter, 8.0)["f", GPU_TIME] == 2 * _S
