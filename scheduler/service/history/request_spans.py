"""The spans of requests: their waits, the decisions about them, and the use of their leases."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from common.telemetry.traces import Sink, Span, SpanKind
from scheduler.model.actions import Dispatch, EnqueueLocally
from scheduler.model.values import LeaseId, RequestOutcome
from scheduler.service.history.history import Happened, RequestRecord

SCHEDULER, MANAGER = "gpufaas-scheduler", "gpufaas-gpu-manager"

Facts = dict[str, str | int | float | bool]

_SPAN_IDS = 1 << 64
_NS = 1_000_000_000


def spans_of(record: RequestRecord, now_s: float) -> list[Span]:
    """The spans of a request up to now, by the clock of its record."""
    return list(_RequestSpans(record, now_s, time.time_ns() - round(now_s * _NS)).all())


def send_sampled(sink: Sink | None, now_s: Callable[[], float], record: RequestRecord) -> None:
    """A request has ended: if its trace is sampled, have the sink make its spans."""
    if sink is not None and record.trace.sampled:
        sink.add(lambda: spans_of(record, now_s()))


@dataclass(frozen=True, slots=True)
class _RequestSpans:
    """Makes the spans of one request; `epoch_ns` is the wall clock's time at the clock's 0."""

    record: RequestRecord
    now_s: float
    epoch_ns: int

    def all(self) -> Iterator[Span]:
        record = self.record
        end_s = record.granted_s or record.ended_s or self.now_s
        whole = self._span(0, record.trace.span_id, "schedule", (record.arrived_s, end_s))
        failed = record.outcome not in {None, RequestOutcome.COMPLETED}
        yield whole._replace(
            kind=SpanKind.SERVER,
            attributes=self._facts(),
            error=f"{record.outcome}: {record.reason}" if failed else "",
        )
        times = (record.arrived_s, end_s)
        yield self._span(1, whole.span_id, "queue", times)
        for number, decided in enumerate(record.decided):
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
        for place, (model, loaded) in enumerate(happened.loads.items()):
            times = (loaded.at_s - loaded.load_s, loaded.at_s)
            load = self._span(number + 1 + place, span.span_id, "load", times)
            source: Facts = {"gpufaas.model": model, "gpufaas.from": loaded.source.name.lower()}
            yield load._replace(service=MANAGER, attributes=source)

    def _expected(self, lease: LeaseId) -> Facts:
        for decided in self.record.decided:
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
            trace_id=self.record.trace.trace_id,
            span_id=f"{(self.record.span_seed + number) % _SPAN_IDS or 1:016x}",
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
