"""The spans of a call: the gateway's own, and those that its function reported."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from urllib.parse import unquote

from common.telemetry.traces import Span, SpanKind
from gateway_ext.tracing.journey import (
    BELOW,
    FUNCTION,
    HANDLER,
    LEASE,
    RECEIVING,
    TURN,
    WHOLE,
    Attempt,
    Journey,
)

GATEWAY = "gpufaas-gateway"

Facts = dict[str, str | int | float | bool]

_SERVER_ERROR = 500
_NS = 1_000_000_000


def spans_of(journey: Journey, now_s: float) -> list[Span]:
    """All spans of a call; for a call in progress they end now, and are marked so."""
    return list(_CallSpans(journey, now_s).all())


@dataclass(frozen=True, slots=True)
class _CallSpans:
    journey: Journey
    now_s: float

    def all(self) -> Iterator[Span]:
        journey = self.journey
        yield self._whole()
        if journey.received_s:
            yield self._span(RECEIVING, "receive", journey.began_s, journey.received_s)
        for attempt in journey.attempts:
            yield from self._of(attempt)

    def _whole(self) -> Span:
        journey = self.journey
        error = journey.error
        if not error and journey.status >= _SERVER_ERROR:
            error = f"status {journey.status}"
        name, ended_s = f"call {journey.function}", journey.ended_s or self.now_s
        return self._span(WHOLE, name, journey.began_s, ended_s)._replace(
            parent_id=journey.parent,
            kind=SpanKind.CONSUMER if journey.by_gateway else SpanKind.SERVER,
            attributes=self._facts(),
            error=error,
        )

    def _facts(self) -> Facts:
        journey = self.journey
        facts: Facts = {
            "gpufaas.call_id": journey.call_id,
            "faas.name": journey.function,
            "http.request.method": journey.method,
            "gpufaas.gpu_function": journey.gpu,
        }
        if journey.ended_s:
            facts["http.response.status_code"] = journey.status
        else:
            facts["gpufaas.running"] = True
        if journey.stage:
            facts["gpufaas.stage"] = journey.stage
        elif journey.by_gateway:
            facts["gpufaas.async"] = True
        return facts

    def _of(self, attempt: Attempt) -> Iterator[Span]:
        number = attempt.number
        ended_s = attempt.ended_s or self.journey.ended_s or self.now_s
        seated_s = attempt.seated_s or ended_s
        turn = self._span(TURN, "wait for an instance", attempt.began_s, seated_s, number)
        why = attempt.error or self.journey.error
        yield turn if attempt.seated_s else turn._replace(error=why)
        if attempt.request is not None:
            leased_s = attempt.leased_s or ended_s
            yield self._span(LEASE, "lease", seated_s, leased_s, number)._replace(
                kind=SpanKind.CLIENT,
                attributes=_leased(attempt),
                error="" if attempt.leased_s else why,
            )
        if attempt.asked_s:
            called = self._called(attempt, ended_s)
            yield called
            yield from spans_below(self.journey, attempt, called.begin_ns, called.end_ns)

    def _called(self, attempt: Attempt, ended_s: float) -> Span:
        facts: Facts = {"gpufaas.instance": attempt.instance}
        error = attempt.error
        if not attempt.answered_s:
            error = error or self.journey.error
        else:
            facts["gpufaas.first_byte_s"] = round(attempt.answered_s - attempt.asked_s, 6)
        span = self._span(FUNCTION, "function", attempt.asked_s, ended_s, attempt.number)
        return span._replace(kind=SpanKind.CLIENT, attributes=facts, error=error)

    def _span(self, number: int, name: str, begin_s: float, end_s: float, attempt: int = 0) -> Span:
        return Span(
            trace_id=self.journey.trace_id,
            span_id=self.journey.span_id(number, attempt),
            parent_id=self.journey.span_id(WHOLE),
            name=name,
            service=GATEWAY,
            begin_ns=self._wall_ns(begin_s),
            end_ns=self._wall_ns(max(begin_s, end_s)),
        )

    def _wall_ns(self, at_s: float) -> int:
        return self.journey.began_ns + round((at_s - self.journey.began_s) * _NS)


def _leased(attempt: Attempt) -> Facts:
    facts: Facts = {"gpufaas.request": str(attempt.request)}
    placement = attempt.placement
    if placement is None:
        return facts
    return facts | {
        "gpufaas.lease": placement.lease,
        "gpufaas.gpu": placement.gpu,
        "gpufaas.node": placement.node,
        "gpufaas.hit": placement.hit,
        "gpufaas.expected_load_s": placement.estimate.load_s,
        "gpufaas.expected_run_s": placement.estimate.run_s,
    }


# A function's report of its time in the header X-Gpu-Trace (docs/tracing.md). It is not trusted:
# unreadable parts are left out.

_VERSION = "1"
_NUMBER = re.compile(r"\d{1,18}", re.ASCII)
_SPAN_ID = re.compile(r"(?!0{16})[0-9a-f]{16}", re.ASCII)
_MOST_ENTRIES = 200
_MOST_CHARACTERS = 128


@dataclass(frozen=True, slots=True)
class CallTimes:
    """When an operation began by the function's clock, and how long it took, in microseconds.

    `facts` are numbers and names by single letters; `parent` is the id of the graph call that the
    operation belongs to.
    """

    begin_us: int
    took_us: int
    span_id: str = ""
    parent: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)

    def number(self, name: str) -> int:
        """0 if it is missing or no number."""
        return _number(self.facts.get(name, "0")) or 0


@dataclass(slots=True)
class ReportedTrace:
    """The report of one response."""

    handler: CallTimes | None = None
    calls: list[CallTimes] = field(default_factory=list)
    acquires: list[CallTimes] = field(default_factory=list)
    more_calls: int = 0
    more_us: int = 0


def read_report(header: bytes) -> ReportedTrace:
    """The readable part of the report."""
    report = ReportedTrace()
    version, *entries = header.decode("latin-1").split(" ", _MOST_ENTRIES)
    if version != _VERSION:
        return report
    for entry in entries:
        letter, *parts = entry.split(";")
        if letter == "x":
            counts = [_number(part) or 0 for part in (*parts, "", "")]
            report.more_calls, report.more_us = counts[:2]
        elif (times := _times(letter, parts)) is None:
            continue
        elif letter == "h":
            report.handler = times
        elif letter == "c":
            report.calls.append(times)
        elif letter == "a":
            report.acquires.append(times)
    return report


def _times(letter: str, parts: list[str]) -> CallTimes | None:
    """`h;begin;took;...`, `c;span;begin;took;...`, `a;parent;begin;took;...`."""
    named = parts.pop(0) if letter != "h" and parts else ""
    if letter != "h" and not _SPAN_ID.fullmatch(named):
        return None
    begin_us, took_us = [_number(part) for part in (*parts, "", "")][:2]
    if begin_us is None or took_us is None:
        return None
    span_id, parent = (named, "") if letter == "c" else ("", named)
    return CallTimes(begin_us, took_us, span_id, parent, dict(_facts(parts[2:])))


def _facts(parts: list[str]) -> Iterator[tuple[str, str]]:
    for part in parts:
        name, _, value = part.partition("=")
        shown = unquote(value)
        if len(name) == 1 and len(shown) <= _MOST_CHARACTERS and shown.isprintable():
            yield name, shown


def _number(text: str) -> int | None:
    return int(text) if _NUMBER.fullmatch(text) else None


WORKER, SHIM = "gpufaas-worker", "gpufaas-shim"

_US = 1_000
# A worker's steps of a graph call, in order: the letter in the report, and the name.
_WORK = (("w", "wait for the GPU"), ("i", "inputs"), ("k", "compute"), ("o", "outputs"))
_OF_A_CALL = 8  # span numbers reserved for one graph call
_MOST_LEASES = _OF_A_CALL - len(_WORK)
# Tolerance of the comparison: microseconds are cut off, and clocks are adjusted in tiny steps.
_CLOSE_NS = 1_000_000


def spans_below(journey: Journey, attempt: Attempt, begin_ns: int, end_ns: int) -> Iterator[Span]:
    """The spans of an attempt's report, if it has one, within the attempt's time."""
    report = read_report(attempt.trace_report)
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
        acquires = [acquire for acquire in report.acquires if acquire.parent == call.span_id]
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
        span = self._span(HANDLER, parent, "handler", times.begin_us, times.took_us)
        service = self.journey.function
        return span._replace(service=service, kind=SpanKind.SERVER, attributes=facts)

    def call(self, call: CallTimes, acquires: list[CallTimes], number: int) -> Iterator[Span]:
        """A graph call, the leases that it waited for, and the steps of its worker."""
        name, kind = "graph call", SpanKind.CLIENT
        facts: Facts = {
            "gpufaas.model": call.facts.get("m", ""),
            "gpufaas.lease": call.number("l"),
            "gpufaas.batch": call.number("b"),
        }
        if (reason := call.facts.get("h")) is not None:
            name, kind, facts = "graph run here", SpanKind.INTERNAL, {"gpufaas.local": reason}
        parent, error = self.journey.span_id(HANDLER, self.attempt), call.facts.get("e", "")
        span = self._span(number, parent, name, call.begin_us, call.took_us)
        yield span._replace(span_id=call.span_id, kind=kind, attributes=facts, error=error)
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
        span = self._span(number, parent, "lease", times.begin_us, times.took_us)
        return span._replace(kind=SpanKind.CLIENT, attributes=facts)

    def _work(self, call: CallTimes, acquires: list[CallTimes], number: int) -> Iterator[Span]:
        """Centre the worker's time in the call: assume that both transfers take the same time."""
        end_us = call.begin_us + call.took_us
        leased_us = [acquire.begin_us + acquire.took_us for acquire in acquires]
        begin_us = max([call.begin_us, *leased_us])
        work_us = sum(call.number(letter) for letter, _ in _WORK)
        if not work_us:
            return
        at_us = begin_us + max(0, end_us - begin_us - work_us) // 2
        for place, (letter, name) in enumerate(_WORK):
            took_us = call.number(letter)
            span = self._span(number + place, call.span_id, name, at_us, took_us)
            yield span._replace(service=WORKER)
            at_us += took_us

    def _span(self, number: int, parent_id: str, name: str, begin_us: int, took_us: int) -> Span:
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
