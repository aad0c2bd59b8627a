"""Spans from a function's report: its handler, its graph calls, their workers' steps. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass

from common.telemetry.traces import Span, SpanKind
from gateway_ext.tracing import reported_trace
from gateway_ext.tracing.call_journey import BELOW, FUNCTION, HANDLER, Attempt, Journey
from gateway_ext.tracing.reported_trace import CallTimes, ReportedTrace

WORKER, SHIM = "gpufaas-worker", "gpufaas-shim"

Facts = dict[str, str | int | float | bool]

_US = 1_000
# A worker's steps of a graph call, in order: the letter in the report, and the name.
_WORK = (("w", "wait for the GPU"), ("i", "inputs"), ("k", "compute"), ("o", "outputs"))
_OF_A_CALL = 8  # span numbers reserved for one graph call
_MOST_LEASES = _OF_A_CALL - len(_WORK)
# Tolerance of the comparison: microseconds are cut off, and clocks are adjusted in tiny steps.
_CLOSE_NS = 1_000_000


def spans_below(journey: Journey, attempt: Attempt, begin_ns: int, end_ns: int) -> Iterator[Span]:
    """The spans of an attempt's report, if it has one, within the attempt's time."""
    report = reported_trace.read(attempt.trace_report)
    if report.handler is None:
        return
    shift_ns = _shift_ns(report.handler, begin_ns, end_ns)
    below = _Below(journey, attempt.number, shift_ns, begin_ns, end_ns)
    yield below.handler(report.handler, report)
    seen = set()
    for number, call in enumerate(report.calls):
        # A repeated id would make a cycle in the tree of spans.
        if call.span_id in seen or journey.has_span(call.span_id):
            continue
        seen.add(call.span_id)
        acquires = [each for each in report.acquires if each.parent == call.span_id]
        yield from below.call(call, acquires[:_MOST_LEASES], BELOW + number * _OF_A_CALL)


@dataclass(frozen=True, slots=True)
class _Below:
    """Makes the spans of one handler: all its times are of one clock, shifted by `shift_ns`.

    No span lies outside the attempt: a collector refuses whole batches for one impossible time.
    """

    journey: Journey
    attempt: int
    shift_ns: int
    begin_ns: int
    end_ns: int

    def handler(self, times: CallTimes, report: ReportedTrace) -> Span:
        facts: Facts = {
            "gpufaas.queued_s": times.number("q") / 1e6,
            "gpufaas.graph_calls": len(report.calls) + report.more_calls,
        }
        if times.number("b"):
            facts["gpufaas.batch"] = times.number("b")
        if report.more_calls:
            facts["gpufaas.calls_left_out"] = report.more_calls
            facts["gpufaas.calls_left_out_s"] = report.more_us / 1e6
        parent = self.journey.span_id(FUNCTION, self.attempt)
        span = self._span(HANDLER, parent, "handler", (times.begin_us, times.took_us))
        service = self.journey.function
        return span._replace(service=service, kind=SpanKind.SERVER, attributes=facts)

    def call(self, call: CallTimes, acquires: list[CallTimes], number: int) -> Iterator[Span]:
        """A graph call, the leases that it waited for, and the steps of its worker."""
        reason = call.facts.get("h")
        facts: Facts = {
            "gpufaas.model": call.facts.get("m", ""),
            "gpufaas.lease": call.number("l"),
            "gpufaas.batch": call.number("b"),
        }
        if reason is not None:
            facts = {"gpufaas.local": reason}
        parent = self.journey.span_id(HANDLER, self.attempt)
        name = "graph call" if reason is None else "graph run here"
        span = self._span(number, parent, name, (call.begin_us, call.took_us))
        yield span._replace(
            span_id=call.span_id,
            kind=SpanKind.CLIENT if reason is None else SpanKind.INTERNAL,
            attributes=facts,
            error=call.facts.get("e", ""),
        )
        for place, acquire in enumerate(acquires):
            yield self._acquire(call.span_id, acquire, number + len(_WORK) + place)
        yield from self._work(call, acquires, number)

    def _acquire(self, parent: str, times: CallTimes, number: int) -> Span:
        facts: Facts = {
            "gpufaas.lease": times.number("l"),
            "gpufaas.queue_s": times.number("q") / 1e6,
            "gpufaas.load_s": times.number("d") / 1e6,
        }
        if "r" in times.facts:
            facts["gpufaas.request"] = times.facts["r"]
        span = self._span(number, parent, "lease", (times.begin_us, times.took_us))
        return span._replace(kind=SpanKind.CLIENT, attributes=facts)

    def _work(self, call: CallTimes, acquires: list[CallTimes], number: int) -> Iterator[Span]:
        """Centre the worker's time in the call: assume that both transfers take the same time."""
        end_us = call.begin_us + call.took_us
        begin_us = max([call.begin_us, *(each.begin_us + each.took_us for each in acquires)])
        work_us = sum(call.number(letter) for letter, _ in _WORK)
        if not work_us:
            return
        at_us = begin_us + max(0, end_us - begin_us - work_us) // 2
        for place, (letter, name) in enumerate(_WORK):
            took_us = call.number(letter)
            span = self._span(number + place, call.span_id, name, (at_us, took_us))
            yield span._replace(service=WORKER)
            at_us += took_us

    def _span(self, number: int, parent_id: str, name: str, times_us: tuple[int, int]) -> Span:
        begin_us, took_us = times_us
        begin_ns = min(max(begin_us * _US + self.shift_ns, self.begin_ns), self.end_ns)
        return Span(
            trace_id=self.journey.trace_id,
            span_id=self.journey.span_id(number, self.attempt),
            parent_id=parent_id,
            name=name,
            service=SHIM,
            begin_ns=begin_ns,
            end_ns=min(begin_ns + took_us * _US, self.end_ns),
        )


def _shift_ns(handler: CallTimes, begin_ns: int, end_ns: int) -> int:
    """The offset of the function's clock: zero if its times fit into the call.

    If they do not, the clocks differ: request and response are assumed to take the same time.
    """
    reported_ns, took_ns = handler.begin_us * _US, handler.took_us * _US
    if begin_ns - _CLOSE_NS <= reported_ns and reported_ns + took_ns <= end_ns + _CLOSE_NS:
        return 0
    return begin_ns + max(0, end_ns - begin_ns - took_ns) // 2 - reported_ns
