"""The spans of requests: their waits, the decisions about them, and the use of their leases."""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import getrandbits
from typing import Any, NamedTuple

from cache_manager.model.ids import Tier
from common.telemetry.traces import Sink, Span, SpanKind, TraceContext, trace_of
from common.telemetry.work_context import ABOUT
from scheduler.model.actions import (
    Action,
    Dispatch,
    EnqueueLocally,
    Finish,
    Prepare,
    Refuse,
    Taken,
)
from scheduler.model.events import Event, ModelLoaded, RequestArrived
from scheduler.model.values import LeaseId, RequestId, RequestOutcome
from scheduler.service.history.history import Happened, History, RequestRecord

SCHEDULER, MANAGER = "gpufaas-scheduler", "gpufaas-gpu-manager"

Facts = dict[str, str | int | float | bool]

_MOST_DECISIONS = 32
_SPAN_IDS = 1 << 64
_NS = 1_000_000_000
_UNTRACED = TraceContext("0" * 32, "")


class _Decided(NamedTuple):
    """A decision, when it was made, and how long making it took."""

    at_s: float
    took_s: float
    action: Dispatch | EnqueueLocally


class _Loaded(NamedTuple):
    """A load that a lease waited for, and when it was reported."""

    at_s: float
    event: ModelLoaded


@dataclass(slots=True)
class _Traced:
    """One request: the trace that it belongs to, if any, and facts that the history lacks."""

    trace: TraceContext
    seed: int
    decided: list[_Decided] = field(default_factory=list)
    loaded: dict[LeaseId, list[_Loaded]] = field(default_factory=dict)
    ended: bool = False


class RequestTraces:
    """Follows the same requests as the history; sends the spans of sampled ones to the sink."""

    def __init__(
        self, history: History, limit: int, now_s: Callable[[], float], sink: Sink | None
    ) -> None:
        self._history = history
        self._limit = limit
        self._now_s = now_s
        self._sink = sink
        # As in the history: the oldest one leaves at every call.
        self._traced: OrderedDict[RequestId, _Traced] = OrderedDict()
        self._loading: dict[LeaseId, tuple[Prepare, list[_Loaded]]] = {}
        self._took_s = 0.0
        self._happens: Mapping[type, Callable[[Any, float], None]] = {
            RequestArrived: self._arrived,
            ModelLoaded: self._loaded,
        }
        self._decides: Mapping[type, Callable[[Any, float], None]] = {
            Prepare: self._prepared,
            Dispatch: self._dispatched,
            Taken: self._taken,
            EnqueueLocally: self._enqueued,
            Finish: self._finished,
        }

    def __call__(self, now: float, event: Event, actions: Sequence[Action], took_s: float) -> None:
        """One event was handled in this time; the history has taken it in already."""
        self._took_s = took_s
        happens = self._happens.get(type(event))
        if happens is not None and not (actions and isinstance(actions[0], Refuse)):
            happens(event, now)
        for action in actions:
            decides = self._decides.get(type(action))
            if decides is not None:
                decides(action, now)

    def spans(self, request: RequestId) -> list[Span]:
        """The spans of a request; none if it was forgotten or never seen."""
        traced, record = self._traced.get(request), self._history.get(request)
        return [] if traced is None or record is None else self._made(traced, record)

    def _made(self, traced: _Traced, record: RequestRecord) -> list[Span]:
        now_s = self._now_s()
        return list(_RequestSpans(traced, record, now_s, time.time_ns() - round(now_s * _NS)).all())

    def _arrived(self, event: RequestArrived, now: float) -> None:
        del now
        request = event.request.id
        traced = self._traced.pop(request, None)
        if traced is not None and not traced.ended:  # the same request asked again
            self._traced[request] = traced
            return
        work = ABOUT.get()
        trace = _UNTRACED if work is None or work.trace is None else work.trace
        self._keep(request, trace)

    def _keep(self, request: RequestId, trace: TraceContext) -> _Traced:
        traced = self._traced[request] = _Traced(trace, getrandbits(64))
        if len(self._traced) > self._limit:
            self._traced.popitem(last=False)
        return traced

    def _loaded(self, event: ModelLoaded, now: float) -> None:
        for prepared, loads in self._loading.values():
            wanted = any(load.model == event.model for load in prepared.loads)
            if prepared.gpu == event.gpu and wanted:
                loads.append(_Loaded(now, event))

    def _prepared(self, action: Prepare, now: float) -> None:
        del now
        if not action.prefetch:
            self._loading[action.lease] = (action, [])
            if len(self._loading) > self._limit:
                del self._loading[next(iter(self._loading))]

    def _dispatched(self, action: Dispatch, now: float) -> None:
        _, loads = self._loading.get(action.lease, (None, []))
        for request in action.requests:
            traced = self._traced.get(request)
            if traced is not None and action.lease not in traced.loaded:
                traced.loaded[action.lease] = loads
                self._note(traced, action, now)

    def _taken(self, action: Taken, now: float) -> None:
        del now
        trace = trace_of(action.parent, "") if action.parent else None
        traced = self._keep(action.request.id, trace or _UNTRACED)
        traced.loaded[action.dispatch.lease] = []
        traced.decided.append(_Decided(action.began_s, 0.0, action.dispatch))

    def _enqueued(self, action: EnqueueLocally, now: float) -> None:
        traced = self._traced.get(action.request)
        if traced is not None:
            self._note(traced, action, now)

    def _note(self, traced: _Traced, action: Dispatch | EnqueueLocally, now: float) -> None:
        if len(traced.decided) < _MOST_DECISIONS:
            traced.decided.append(_Decided(now, self._took_s, action))

    def _finished(self, action: Finish, now: float) -> None:
        del now
        traced, record = self._traced.get(action.request), self._history.get(action.request)
        if traced is None:
            return
        traced.ended = True
        for lease in traced.loaded:
            self._loading.pop(lease, None)
        if self._sink is not None and traced.trace.sampled and record is not None:
            self._sink.add(partial(self._made, traced, record))


@dataclass(frozen=True, slots=True)
class _RequestSpans:
    """Makes the spans of one request; `epoch_ns` is the wall clock's time at the clock's 0."""

    traced: _Traced
    record: RequestRecord
    now_s: float
    epoch_ns: int

    def all(self) -> Iterator[Span]:
        record = self.record
        end_s = record.granted_s or record.ended_s or self.now_s
        whole = self._span(0, self.traced.trace.span_id, "schedule", (record.arrived_s, end_s))
        failed = record.outcome not in {None, RequestOutcome.COMPLETED}
        yield whole._replace(
            kind=SpanKind.SERVER,
            attributes=self._facts(),
            error=f"{record.outcome}: {record.reason}" if failed else "",
        )
        times = (record.arrived_s, end_s)
        yield self._span(1, whole.span_id, "queue", times)
        for number, decided in enumerate(self.traced.decided):
            times = (decided.at_s, decided.at_s + decided.took_s)
            span = self._span(2 + number, whole.span_id, "decision", times)
            yield span._replace(attributes=_decision(decided.action))
        for number, happened in enumerate(record.happened):
            yield from self._lease(happened, whole.span_id, (1 + number) * 1_000)

    def _facts(self) -> Facts:
        request, record = self.record.request, self.record
        facts: Facts = {
            "gpufaas.request": request.id,
            "faas.name": request.function,
            "gpufaas.models": ",".join(request.models),
            "gpufaas.batch": request.batch,
        }
        if record.outcome is not None:
            facts["gpufaas.outcome"] = str(record.outcome)
        return facts

    def _lease(self, happened: Happened, parent: str, number: int) -> Iterator[Span]:
        freed_s = happened.freed_s or self.record.ended_s or self.now_s
        facts: Facts = {
            "gpufaas.lease": happened.lease,
            "gpufaas.gpu": happened.gpu,
            "gpufaas.slot": happened.slot,
        }
        if happened.runs:  # the runs of short leases are reported after the lease's end
            facts |= {"gpufaas.run_s": happened.run_s, "gpufaas.runs": happened.runs}
        if happened.missing:
            facts["gpufaas.load_s"] = happened.load_s
        span = self._span(number, parent, "held", (happened.dispatched_s, freed_s))
        yield span._replace(attributes=facts | self._expected(happened.lease))
        for place, (at_s, event) in enumerate(self.traced.loaded.get(happened.lease, ())):
            load = self._span(number + 1 + place, span.span_id, "load", (at_s - event.load_s, at_s))
            tier: Tier = event.source
            loaded: Facts = {"gpufaas.model": event.model, "gpufaas.from": tier.name.lower()}
            yield load._replace(service=MANAGER, attributes=loaded)

    def _expected(self, lease: LeaseId) -> Facts:
        for decided in self.traced.decided:
            action = decided.action
            if isinstance(action, Dispatch) and action.lease == lease:
                return {
                    "gpufaas.node": action.node,
                    "gpufaas.expected_load_s": action.estimate.load_s,
                    "gpufaas.expected_run_s": action.estimate.run_s,
                }
        return {}

    def _span(self, number: int, parent_id: str, name: str, times_s: tuple[float, float]) -> Span:
        begin_s, end_s = times_s
        return Span(
            trace_id=self.traced.trace.trace_id,
            span_id=f"{(self.traced.seed + number) % _SPAN_IDS or 1:016x}",
            parent_id=parent_id,
            name=name,
            service=SCHEDULER,
            begin_ns=self.epoch_ns + round(begin_s * _NS),
            end_ns=self.epoch_ns + round(max(begin_s, end_s) * _NS),
        )


def _decision(action: Dispatch | EnqueueLocally) -> Facts:
    facts: Facts = {"gpufaas.slot": action.slot, "gpufaas.rule": action.rule}
    if isinstance(action, Dispatch):
        facts |= {"gpufaas.gpu": action.gpu, "gpufaas.hit": action.hit}
    why = action.explanation
    if why is not None:
        facts |= {
            "gpufaas.policy": why.policy,
            "gpufaas.queue_length": why.queue_length,
            "gpufaas.ahead": why.ahead,
            "gpufaas.visits": why.visits,
            "gpufaas.candidates": len(why.candidates),
            "gpufaas.victims": ",".join(why.victims),
        }
    return facts
