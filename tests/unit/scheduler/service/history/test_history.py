"""The history of requests: decisions, their outcomes, and when they are forgotten."""

import pytest
from msgspec.structs import replace

from cache_manager.model.ids import GpuId, ModelId, Tier
from scheduler.core.core import Core
from scheduler.features.billing.charges import GPU_TIME, KEPT
from scheduler.features.billing.use_meter import UseMeter
from scheduler.model.actions import Dispatch
from scheduler.model.events import (
    Event,
    GpuLost,
    LeaseComputed,
    LeaseReleased,
    LeaseUsed,
    LoadFailed,
    ModelLoaded,
    RequestArrived,
    RequestCancelled,
    RunFinished,
    SlotFreed,
)
from scheduler.model.values import (
    CallEnd,
    CoreSettings,
    GpuSpec,
    LeaseId,
    LeaseUse,
    RequestId,
    RequestOutcome,
    SlotId,
    StandingTerms,
)
from scheduler.service.history.history import Happened, History, Loaded, RequestRecord
from scheduler.service.http.operator_routes import uses_of
from tests.kit.cores.builders import a_core, gpu, request

G0, BERT = GpuId("g0"), ModelId("bert")


class Everyone:
    """Explains every request."""

    def __contains__(self, request: object) -> bool:
        return True


class Play:
    """A core whose every event a history observes."""

    def __init__(self, *specs: GpuSpec, limit: int = 100) -> None:
        settings = CoreSettings(explain=Everyone(), standing=StandingTerms(60.0, 100))
        self.core: Core = a_core(
            gpus=specs or (gpu("g0"),), models=("bert", "vit"), settings=settings
        )
        self.held: list[float] = []
        self.ends: list[RequestRecord] = []
        leases = self.core.leases
        self.history = History(limit, leases, self._freed, self.ends.append)

    def at(self, now_s: float, *events: Event) -> None:
        for event in events:
            self.history(now_s, event, self.core.handle(event, now_s), 0.0)

    def waits(self) -> list[float]:
        records = [record for record in reversed(self.history.latest(100)) if record.happened]
        return [record.happened[0].dispatched_s - record.arrived_s for record in records]

    def _freed(self, dispatch: Dispatch, happened: Happened, freed_s: float) -> None:
        del dispatch
        self.held.append(freed_s - happened.dispatched_s)

    def record(self, name: str) -> RequestRecord:
        record = self.history.get(RequestId(name))
        assert record is not None
        return record


def first_lease(play: Play, name: str) -> LeaseId:
    return play.record(name).happened[0].lease


def test_record_holds_the_decision_and_what_was_measured() -> None:
    play = Play()
    play.at(1.0, RequestArrived(request("r0")))
    play.at(3.5, ModelLoaded(G0, BERT, 2.5, Tier.DISK))
    play.at(4.0, RunFinished(SlotId("g0"), BERT, 1, 0.25), RunFinished(SlotId("g0"), BERT, 1, 0.5))
    lease = first_lease(play, "r0")
    play.at(5.0, LeaseReleased(lease), SlotFreed(SlotId("g0"), lease))
    record = play.record("r0")
    (happened,) = record.happened
    assert (happened.load_s, happened.loads) == (2.5, {BERT: Loaded(3.5, 2.5, Tier.DISK)})
    assert (happened.run_s, happened.runs, happened.freed_s) == (0.75, 2, 5.0)
    assert (record.outcome, record.ended_s) == (RequestOutcome.COMPLETED, 5.0)
    assert record.decided[0].action.explanation is not None
    assert play.waits() == [0.0]
    assert play.held == [4.0]
    assert play.ends == [record]


@pytest.mark.parametrize("loaded_again", [False, True])
def test_what_a_call_used_is_what_the_bill_says_when_its_lease_was_kept_after_it(
    *, loaded_again: bool
) -> None:
    play = Play()
    meter = play.core.add(UseMeter(play.core.lifecycle, 0.0))
    kept = replace(request("kept", "bert"), caller="gw", function="f")
    own = replace(request("own", "vit"), own=True, function="g")
    play.at(1.0, RequestArrived(kept), ModelLoaded(G0, BERT, 0.0, Tier.DISK))
    end = CallEnd(RequestId("kept"), 1.007)
    play.at(1.017, LeaseUsed(first_lease(play, "kept"), "f", (), (end,)))
    play.at(6.0, SlotFreed(SlotId("g0"), first_lease(play, "kept")))
    play.at(7.0, RequestArrived(own), ModelLoaded(G0, ModelId("vit"), 0.0, Tier.DISK))
    play.at(8.0, LeaseComputed(first_lease(play, "own"), 0.006))
    if loaded_again:  # for another lease, when the model's worker had died
        play.at(11.0, ModelLoaded(G0, ModelId("vit"), 3.0, Tier.DISK))
    play.at(12.008, LeaseComputed(first_lease(play, "own"), 0.002))
    play.at(12.008, SlotFreed(SlotId("g0"), first_lease(play, "own")))
    billed_us = {
        row.function: row.amounts[GPU_TIME] - row.amounts[KEPT] for row in meter.collect(12.008)[0]
    }
    assert billed_us == pytest.approx({"f": 7_000, "g": 8_000}, abs=2)
    for name, billed in (("kept", billed_us["f"]), ("own", billed_us["g"])):
        used_s = sum(used_s for _, used_s in uses_of(play.record(name), 12.008))
        assert used_s == pytest.approx(billed / 1e6, abs=3e-6)


def test_what_an_own_process_used_has_its_wait_for_the_load_of_another_lease_in_it() -> None:
    play = Play(gpu("g0", slots=2))
    meter = play.core.add(UseMeter(play.core.lifecycle, 0.0))
    own = replace(request("own"), own=True, function="f")
    play.at(0.0, RequestArrived(request("r0")), RequestArrived(own))
    play.at(2.5, ModelLoaded(G0, BERT, 2.5, Tier.ABSENT))
    play.at(4.0, LeaseComputed(first_lease(play, "own"), 0.5))
    play.at(6.0, SlotFreed(SlotId("g0.1"), first_lease(play, "own")))
    (billed_us,) = [
        row.amounts[GPU_TIME] - row.amounts[KEPT]
        for row in meter.collect(6.0)[0]
        if row.function == "f"
    ]
    used_s = sum(used_s for _, used_s in uses_of(play.record("own"), 6.0))
    assert used_s == pytest.approx(billed_us / 1e6) == pytest.approx(3.0)


def test_load_of_another_lease_is_not_counted() -> None:
    """A hit on a model that an earlier lease loads has loaded nothing itself."""
    play = Play(gpu("g0", leases=2))
    play.at(0.0, RequestArrived(request("r0")), RequestArrived(request("r1")))
    play.at(2.0, ModelLoaded(G0, BERT, 2.0, Tier.ABSENT))
    assert play.record("r0").happened[0].load_s == 2.0
    assert play.record("r1").happened[0].load_s == 0.0


def test_waiting_is_counted_from_the_arrival_of_a_request_that_was_asked_for_again() -> None:
    play = Play()
    play.at(7.0, RequestArrived(request("r0", arrived_s=2.0)))
    assert play.waits() == [5.0]


def test_asking_again_keeps_the_record() -> None:
    play = Play()
    play.at(0.0, RequestArrived(request("r0")), RequestArrived(request("r0")))
    assert len(play.record("r0").decided) == 1


def test_request_with_an_earlier_id_starts_again() -> None:
    play = Play()
    play.at(0.0, RequestArrived(request("r0")), RequestCancelled(RequestId("r0")))
    assert play.record("r0").outcome is RequestOutcome.CANCELLED
    play.at(9.0, RequestArrived(request("r0")))
    assert (play.record("r0").outcome, play.record("r0").arrived_s) == (None, 9.0)


def test_refused_event_leaves_no_record() -> None:
    play = Play()
    play.at(0.0, RequestArrived(replace(request("r0"), models=())))
    assert play.history.get(RequestId("r0")) is None


def test_failed_load_is_remembered() -> None:
    play = Play()
    play.at(0.0, RequestArrived(request("r0")))
    play.at(1.0, LoadFailed(G0, BERT, "no such file"))
    record = play.record("r0")
    assert record.happened[0].failed_loads == {BERT: "no such file"}
    assert record.outcome is RequestOutcome.FAILED


def test_lease_that_went_with_its_gpu_is_never_freed() -> None:
    play = Play(gpu("g0"), gpu("g1"))
    play.at(0.0, RequestArrived(request("r0")))
    lost = play.record("r0").happened[0]
    play.at(1.0, GpuLost(lost.gpu))
    play.at(2.0, SlotFreed(lost.slot, lost.lease))
    assert lost.freed_s is None
    assert play.held == []


@pytest.mark.parametrize("limit", [1, 3])
def test_oldest_records_are_forgotten_beyond_the_limit(limit: int) -> None:
    play = Play(limit=limit)
    for number in range(5):
        play.at(float(number), RequestArrived(request(f"r{number}")))
    kept = [record.request.id for record in play.history.latest(10)]
    assert kept == [f"r{number}" for number in (4, 3, 2, 1, 0)][:limit]


def test_watcher_receives_decisions_until_it_leaves() -> None:
    play = Play()
    reported: list[object] = []
    play.history.watch(RequestId("r0"), reported.append)
    play.at(0.0, RequestArrived(request("r0")), RequestArrived(request("r1")))
    play.history.unwatch(RequestId("r0"), reported.append)
    assert [decided.action.slot for decided in reported] == ["g0"]  # type: ignore[attr-defined] # Decided


def test_calls_under_a_kept_lease_have_records_of_their_own() -> None:
    play = Play()
    play.at(1.0, RequestArrived(replace(request("r0"), caller="gateway")))
    lease = first_lease(play, "r0")
    play.at(2.0, ModelLoaded(G0, BERT, 1.0, Tier.DISK))
    uses = (LeaseUse(RequestId("u0"), 3.0, 3.1, 3.4), LeaseUse(RequestId("u1"), 3.2, 3.4))
    play.at(3.5, LeaseUsed(lease, "f", uses, (CallEnd(RequestId("r0"), 2.5),)))
    play.at(3.6, RunFinished(SlotId("g0"), BERT, 1, 0.25))
    play.at(4.0, LeaseUsed(lease, "f", ends=(CallEnd(RequestId("u1"), 3.9),)))
    play.at(4.1, RunFinished(SlotId("g0"), BERT, 1, 0.5))
    play.at(9.0, LeaseReleased(lease), SlotFreed(SlotId("g0"), lease))
    rows = [play.record(name) for name in ("r0", "u0", "u1")]
    assert [row.outcome for row in rows] == [RequestOutcome.COMPLETED] * 3
    assert [(row.arrived_s, row.granted_s, row.ended_s) for row in rows] == [
        (1.0, 1.0, 2.5),
        (3.0, 3.1, 3.4),
        (3.2, 3.4, 3.9),
    ]
    # What ran since the last report is a mean over all calls since then.
    assert [row.happened[0].run_s for row in rows] == [0.25, 0.25, 0.75]
    assert [row.happened[0].freed_s for row in rows] == [2.5, 3.4, 3.9]
    assert play.held == [8.0]
    assert play.waits() == [0.0, pytest.approx(0.1), pytest.approx(0.2)]
