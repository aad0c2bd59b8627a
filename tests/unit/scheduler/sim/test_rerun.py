"""A recorded run under another policy, one thing at a time: what happens again, and when."""

import pytest
from msgspec.structs import replace

from cache_manager.model.ids import GpuId, ModelId, NodeId
from scheduler import policies
from scheduler.model.actions import Dispatch
from scheduler.model.events import (
    GpuJoined,
    GpuLost,
    GpuSnapshot,
    LeaseReleased,
    LeaseUsed,
    LeaseWanted,
    LiveLease,
    LoadFailed,
    NodeSnapshot,
    PolicySet,
    RequestArrived,
    RequestCancelled,
    RunFailed,
    RunFinished,
    SlotFreed,
)
from scheduler.model.values import (
    CallEnd,
    LeaseUse,
    RequestId,
    RequestOutcome,
    SlotId,
    StandingTerms,
)
from tests.kit.cores.builders import gpu, request
from tests.kit.cores.written_recordings import Recording, against, outlook, rebuilt, rerun, two_gpus

pytestmark = pytest.mark.group("replay", seconds=160)


def test_hold_counts_from_when_the_model_is_there_and_loads_take_their_average() -> None:
    recording = two_gpus()
    for at_s, name, load_s in ((1.0, "r0", 2.0), (11.0, "r1", 4.0)):
        lease = recording.asks(at_s, name, "a")
        spot = recording.core.leases[lease].slot.id
        recording.loads(at_s + load_s, spot, "a", load_s)
        recording.frees(at_s + load_s + 0.5, spot, lease)
    found = against(recording, "lalb")
    assert found.happened.hit_ratio == 0.0  # lb goes by turns
    assert found.happened.avg_latency_s == pytest.approx((2.5 + 4.5) / 2)
    assert found.recorded.figures.avg_latency_s == pytest.approx(3.5)
    assert outlook(found, "lalb").hit_ratio == 0.5
    assert outlook(found, "lalb").avg_latency_s == pytest.approx((3.5 + 0.5) / 2)
    assert (outlook(found, "lalb").elsewhere, outlook(found, "lalb").evictions) == (1, 0)


def test_caller_gives_up_as_long_after_its_arrival_as_it_did() -> None:
    recording = two_gpus()
    held = [recording.asks(1.0 + n, f"h{n}", f"m{n}") for n in range(2)]
    waiting = request("w", "c", arrived_s=3.0)
    recording.happens(3.0, RequestArrived(waiting))
    recording.happens(5.0, RequestCancelled(RequestId("w")))
    for n, lease in enumerate(held):
        spot = recording.core.leases[lease].slot.id
        recording.loads(9.0, spot, f"m{n}", 5.0)
        recording.frees(10.0, spot, lease)
    found = against(recording, "rr")
    for figures in (found.happened, found.recorded.figures, outlook(found, "rr")):
        assert (figures.completed, figures.ended_otherwise) == (2, {"cancelled": 1})
    assert found.unmeasured_holds == 1


def test_deadline_passes_at_its_time_though_it_was_not_recorded() -> None:
    """Under the recorded policy there was a GPU in time; with fewer GPUs there is none."""
    recording = two_gpus()
    first = recording.asks(1.0, "r0", "a", deadline_s=20.0)
    second = recording.asks(2.0, "r1", "b", deadline_s=5.5)
    for name, lease, at_s in (("a", first, 9.0), ("b", second, 4.0)):
        spot = recording.core.leases[lease].slot.id
        recording.loads(at_s - 0.5, spot, name, 1.0)
        recording.frees(at_s, spot, lease)
    world = rebuilt(recording)
    (at_s, everything) = world.outside[0]
    assert isinstance(everything, NodeSnapshot)
    world.outside[0] = at_s, replace(everything, gpus=everything.gpus[:1])
    watch = rerun(world, world.beginning.core())
    assert watch.outcomes == {RequestOutcome.COMPLETED: 1, RequestOutcome.EXPIRED: 1}
    found = against(recording, "lalb")
    assert found.recorded.figures.completed == outlook(found, "lalb").completed == 2


def test_lease_that_was_given_back_early_is_wanted_again() -> None:
    recording = two_gpus()
    lease = recording.asks(1.0, "r0", "a")
    recording.loads(2.0, "g0", "a", 1.0)
    recording.happens(3.0, LeaseReleased(lease, may_return=True), SlotFreed(SlotId("g0"), lease))
    again = recording.handle(LeaseWanted(RequestId("r0")), 4.0)
    second = next(each.lease for each in again if isinstance(each, Dispatch))
    spot = recording.core.leases[second].slot.id
    if spot != "g0":
        recording.loads(5.0, spot, "a", 1.0)
    recording.frees(6.0, spot, second)
    found = against(recording, "lalb")
    assert found.happened.leases == found.recorded.figures.leases == 2
    assert found.recorded.figures.avg_latency_s == pytest.approx(5.0)
    assert outlook(found, "lalb").leases == 2
    assert outlook(found, "lalb").hit_ratio == 0.5


def test_request_that_was_done_after_an_early_return_ends_when_it_did() -> None:
    recording = two_gpus()
    lease = recording.asks(1.0, "r0", "a")
    recording.loads(2.0, "g0", "a", 1.0)
    recording.happens(3.0, LeaseReleased(lease, may_return=True), SlotFreed(SlotId("g0"), lease))
    recording.happens(7.0, LeaseReleased(lease))
    found = against(recording, "lalb")
    assert found.happened.avg_latency_s == pytest.approx(6.0)
    assert outlook(found, "lalb").avg_latency_s == pytest.approx(6.0)


def test_failures_happen_again() -> None:
    recording = two_gpus()
    broken = recording.asks(1.0, "r0", "broken")
    failed = LoadFailed(GpuId("g0"), ModelId("broken"), "no such file", lease=broken)
    recording.happens(2.0, failed, SlotFreed(SlotId("g0"), broken))
    lease = recording.asks(3.0, "r1", "a")
    spot = recording.core.leases[lease].slot.id
    recording.loads(4.0, spot, "a", 1.0)
    recording.happens(5.0, RunFailed(lease, "out of memory"), SlotFreed(spot, lease))
    found = against(recording, "lalb")
    for figures in (found.happened, found.recorded.figures, outlook(found, "lalb")):
        assert (figures.completed, figures.ended_otherwise) == (0, {"failed": 2})


def test_gpu_that_was_lost_is_lost_and_its_end_is_not_that_of_the_recording() -> None:
    recording = two_gpus()
    lease = recording.asks(1.0, "r0", "a")
    recording.happens(2.0, GpuLost(GpuId("g0")))
    other = recording.asks(3.0, "r1", "a")
    recording.loads(4.0, "g1", "a", 1.0)
    recording.frees(5.0, "g1", other)
    recording.happens(6.0, NodeSnapshot(NodeId("n0"), ()))  # as a leaving node reports
    assert lease != other
    found = against(recording, "rr")
    for figures in (found.happened, found.recorded.figures, outlook(found, "rr")):
        assert (figures.completed, figures.ended_otherwise) == (1, {"failed": 1})


def test_node_that_reports_itself_again_reports_the_state_of_the_rerun() -> None:
    """Its recorded report names leases and residents of another life."""
    recording = two_gpus()
    lease = recording.asks(1.0, "r0", "a")
    recording.loads(2.0, "g0", "a", 1.0)
    specs = [gpu(f"g{n}", node="n0", memory_mb=1500) for n in range(2)]
    live = LiveLease(lease, SlotId("g0"), (ModelId("a"),), (RequestId("r0"),))
    size = recording.core.cluster.gpus[GpuId("g0")].cache.residents[ModelId("a")].bytes
    truth = (GpuSnapshot(specs[0], ((ModelId("a"), size),), (live,)), GpuSnapshot(specs[1]))
    recording.happens(2.5, NodeSnapshot(NodeId("n0"), truth))
    recording.frees(3.0, "g0", lease)
    found = against(recording, *policies.available())
    for each in (found.recorded, *found.others):
        assert (each.figures.completed, each.figures.leases) == (1, 1), each.policy
        assert each.figures.avg_latency_s == pytest.approx(2.0)


def test_request_that_was_refused_and_sent_again_is_sent_once_where_it_is_taken() -> None:
    recording = two_gpus(max_waiting=1)
    held = [recording.asks(1.0 + n / 10, f"h{n}", f"m{n}") for n in range(2)]
    recording.happens(2.0, RequestArrived(request("w0", "m0", arrived_s=2.0)))
    late = request("w1", "m1", arrived_s=2.5)
    recording.happens(2.5, RequestArrived(late))
    for n, lease in enumerate(held):
        spot = recording.core.leases[lease].slot.id
        recording.loads(3.0, spot, f"m{n}", 2.0)
        recording.frees(4.0 + n, spot, lease)
    recording.happens(6.0, RequestArrived(late))
    for lease, found_lease in list(recording.core.leases.items()):
        recording.frees(7.0, found_lease.slot.id, lease)
    found = against(recording)
    assert found.happened.requests == found.recorded.figures.requests == 5
    assert found.happened.ended_otherwise == {"queue full": 1}
    world = rebuilt(recording)
    watch = rerun(world, replace(world.beginning, max_waiting=10).core())
    assert (watch.requests, watch.outcomes) == (4, {RequestOutcome.COMPLETED: 4})


def test_lease_that_never_ended_keeps_its_gpu_and_is_not_counted() -> None:
    recording = two_gpus()
    recording.asks(1.0, "stuck", "a")
    for number in range(3):
        lease = recording.asks(2.0 + 10 * number, f"r{number}", "b")
        recording.loads(3.0 + 10 * number, "g1", "b", 1.0)
        recording.frees(4.0 + 10 * number, "g1", lease)
    found = against(recording, "lalb", "rr")
    for figures in (found.happened, found.recorded.figures, outlook(found, "lalb")):
        assert (figures.completed, figures.unfinished, figures.leases) == (3, 1, 4)
    assert outlook(found, "rr").unfinished == 1


def test_run_takes_as_long_as_it_does_on_the_other_type_of_gpu() -> None:
    recording = Recording("lb")
    fast, slow = gpu("g0", gpu_type="fast"), gpu("g1", gpu_type="slow")
    recording.happens(0.0, GpuJoined(fast), GpuJoined(slow))
    for number, (spot, run_s) in enumerate([("g0", 1.0), ("g1", 3.0)] * 2):
        at_s = 10.0 * (number + 1)
        lease = recording.asks(at_s, f"r{number}", "a")
        assert recording.core.leases[lease].slot.id == spot
        if number < 2:
            recording.loads(at_s + 1.0, spot, "a", 1.0)
            at_s += 1.0
        recording.happens(at_s + run_s, RunFinished(SlotId(spot), ModelId("a"), 1, run_s))
        recording.frees(at_s + run_s + 0.5, spot, lease)
    found = against(recording, "lalb")
    assert found.happened.avg_latency_s == pytest.approx((2.5 + 4.5 + 1.5 + 3.5) / 4)
    reported = outlook(found, "lalb")  # all on g0
    assert reported.hit_ratio == 0.75
    assert reported.avg_latency_s == pytest.approx((2.5 + 1.5 * 3) / 4)


def test_policy_changes_count_for_the_recorded_column_alone() -> None:
    recording = two_gpus("rr")
    recording.happens(0.5, PolicySet("lalb"))
    for number in range(2):
        at_s = 10.0 * (number + 1)
        lease = recording.asks(at_s, f"r{number}", "a")
        if number == 0:
            recording.loads(at_s + 1, "g0", "a", 1.0)
        recording.frees(at_s + 2, "g0", lease)
    found = against(recording, "rr")
    assert found.policy_changes == 1
    assert found.recorded.figures.hit_ratio == found.happened.hit_ratio == 0.5
    assert outlook(found, "rr").hit_ratio == 0.0


def test_calls_under_a_kept_lease_have_leases_of_their_own_elsewhere() -> None:
    recording = two_gpus("lalb", standing=StandingTerms(60.0, 100))
    asked = replace(request("r0", "a", arrived_s=1.0), caller="gateway")
    granted = recording.handle(RequestArrived(asked), 1.0)
    dispatch = next(each for each in granted if isinstance(each, Dispatch))
    lease, spot = dispatch.lease, dispatch.slot
    recording.loads(2.0, spot, "a", 1.0)
    uses = tuple(
        LeaseUse(RequestId(f"u{number}"), 3.0 + number, 3.0 + number, 3.5 + number)
        for number in range(3)
    )
    recording.happens(
        6.0,
        LeaseUsed(lease, asked.function, uses[:2], (CallEnd(RequestId("r0"), 2.5),)),
        LeaseUsed(lease, asked.function, (replace(uses[2], ended_s=None),)),
    )
    recording.happens(7.0, LeaseUsed(lease, asked.function, (), (CallEnd(RequestId("u2"), 5.5),)))
    recording.frees(20.0, spot, lease)
    found = against(recording, "lalb")
    for figures in (found.happened, found.recorded.figures, outlook(found, "lalb")):
        assert figures.completed == 4
        assert figures.leases == 4
        assert figures.hit_ratio == 0.75
        assert figures.avg_latency_s == pytest.approx((1.5 + 3 * 0.5) / 4)
