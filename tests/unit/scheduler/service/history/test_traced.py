"""The spans of requests, by what the core decided and nodes reported."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial

import pytest

from cache_manager.model.ids import GpuId, ModelId, Tier
from common.telemetry.traces import Span, TraceContext
from common.telemetry.work_context import ABOUT, Work
from scheduler.model.events import (
    Event,
    LeaseReleased,
    ModelLoaded,
    RequestArrived,
    RequestCancelled,
    RunFinished,
    SlotFreed,
)
from scheduler.model.values import CoreSettings, LeaseId, RequestId, SlotId
from scheduler.service.history.history import History, send_sampled, spans_of
from tests.kit.cores.builders import a_core, gpu, request

G0, BERT, SLOT = GpuId("g0"), ModelId("bert"), SlotId("g0")
TRACE = TraceContext("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", sampled=True)


class Kept:
    """A sink that makes spans when it is asked for them."""

    def __init__(self) -> None:
        self.made: list[Callable[[], Iterable[Span]]] = []

    def add(self, make: Callable[[], Iterable[Span]]) -> None:
        self.made.append(make)

    def counts(self) -> Mapping[str, int]:
        return {"sent": len(self.made)}

    def spans(self) -> list[Span]:
        return [span for make in self.made for span in make()]


class Play:
    """A core whose every event is followed; each takes a millisecond to be handled."""

    def __init__(self, limit: int = 100) -> None:
        self.now_s = 0.0
        self.sink = Kept()
        self.core = a_core(gpus=(gpu("g0"),), models=("bert", "vit"), settings=CoreSettings())
        ended = partial(send_sampled, self.sink, lambda: self.now_s)
        leases = self.core.leases
        self.history = History(limit, leases, lambda *_freed: None, ended)

    def at(self, now_s: float, *events: Event, trace: TraceContext | None = None) -> None:
        self.now_s = now_s
        before = ABOUT.set(None if trace is None else Work(trace))
        for event in events:
            actions = self.core.handle(event, now_s)
            self.history(now_s, event, actions, 0.001)
        ABOUT.reset(before)

    def lease(self, name: str) -> LeaseId:
        record = self.history.get(RequestId(name))
        assert record is not None
        return record.happened[-1].lease

    def spans(self, name: str) -> dict[str, Span]:
        record = self.history.get(RequestId(name))
        made = [] if record is None else spans_of(record, self.now_s)
        return {span.name: span for span in made}


def s(span: Span, other: Span) -> tuple[float, float]:
    """When a span began and ended, in seconds after another one's beginning."""
    return (span.begin_ns - other.begin_ns) / 1e9, (span.end_ns - other.begin_ns) / 1e9


def a_whole_life(play: Play, trace: TraceContext | None = TRACE) -> None:
    play.at(0.0, RequestArrived(request("other")))
    play.at(1.0, RequestArrived(request("r0")), trace=trace)
    play.at(2.0, ModelLoaded(G0, BERT, 2.0, Tier.DISK))
    play.at(3.0, LeaseReleased(play.lease("other")), SlotFreed(SLOT, play.lease("other")))
    play.at(4.0, RunFinished(SLOT, BERT, 1, 0.5))
    play.at(5.0, LeaseReleased(play.lease("r0")), SlotFreed(SLOT, play.lease("r0")))


def test_request_has_its_wait_its_decision_and_its_lease() -> None:
    play = Play()
    a_whole_life(play)
    spans = play.spans("r0")
    whole = spans["schedule"]
    assert (whole.trace_id, whole.parent_id) == (TRACE.trace_id, TRACE.span_id)
    assert s(whole, whole) == (0.0, 2.0)
    assert s(spans["queue"], whole) == (0.0, 2.0)
    assert s(spans["decision"], whole) == pytest.approx((2.0, 2.001))
    assert s(spans["held"], whole) == (2.0, 4.0)
    assert spans["held"].attributes["gpufaas.run_s"] == 0.5
    assert "gpufaas.expected_run_s" in spans["held"].attributes
    assert {span.parent_id for span in spans.values()} == {TRACE.span_id, whole.span_id}
    assert len({span.span_id for span in spans.values()}) == len(spans)


def test_load_ends_when_it_was_reported_and_is_of_who_did_it() -> None:
    play = Play()
    a_whole_life(play)
    spans = play.spans("other")
    load = spans["load"]
    assert load.parent_id == spans["held"].span_id
    assert load.service == "gpufaas-gpu-manager"
    assert s(load, spans["schedule"]) == (0.0, 2.0)
    assert load.attributes == {"gpufaas.model": "bert", "gpufaas.from": "disk"}


def test_sampled_request_is_reported_at_its_end() -> None:
    play = Play()
    a_whole_life(play)
    assert {span.name for span in play.sink.spans()} == {"schedule", "queue", "decision", "held"}
    assert {span.trace_id for span in play.sink.spans()} == {TRACE.trace_id}


@pytest.mark.parametrize("trace", [None, TRACE._replace(sampled=False)])
def test_request_that_is_not_sampled_is_not_exported_but_remembered(
    trace: TraceContext | None,
) -> None:
    play = Play()
    a_whole_life(play, trace)
    assert play.sink.made == []
    assert "held" in play.spans("r0")


def test_request_that_ends_without_a_lease_explains_why() -> None:
    play = Play()
    play.at(0.0, RequestArrived(request("other")))
    play.at(1.0, RequestArrived(request("r0")), trace=TRACE)
    play.at(3.0, RequestCancelled(RequestId("r0")))
    whole = play.spans("r0")["schedule"]
    assert whole.error.startswith("cancelled")
    assert s(whole, whole) == (0.0, 2.0)


def test_request_that_is_asked_for_again_stays_in_its_trace() -> None:
    play = Play()
    play.at(0.0, RequestArrived(request("r0")), trace=TRACE)
    play.at(1.0, RequestArrived(request("r0")), trace=TRACE._replace(trace_id=32 * "9"))
    assert play.spans("r0")["schedule"].trace_id == TRACE.trace_id


def test_oldest_are_forgotten() -> None:
    play = Play(limit=2)
    for number in range(3):
        play.at(number, RequestArrived(request(f"r{number}")), trace=TRACE)
    assert play.spans("r0") == {}
    assert play.spans("r1")
