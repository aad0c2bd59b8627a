"""Records of calls: begun and ended, the last ones kept and shown, sampled ones exported."""

import json
import re
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from random import getrandbits, random
from typing import Any
from urllib.parse import unquote

from common.http.asgi import Header, Receive, Scope, Send, send_response, send_text
from common.telemetry.metrics import MetricFamily, gauge
from common.telemetry.traces import (
    NO_COUNTS,
    TRACEPARENT,
    TRACESTATE,
    Sink,
    Span,
    SpanKind,
    TraceContext,
    plain_span,
    trace_of,
)
from common.telemetry.work_context import ABOUT, Work
from gateway_ext import metrics
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

_SERVER_ERROR = 500
# The bits of a random UUID: version 4, and the variant of its standard.
_NOT_OURS = ~((0xF << 76) | (0b11 << 62))
_UUID = (4 << 76) | (0b10 << 62)
_PARENT, _STATE = TRACEPARENT.encode(), TRACESTATE.encode()
_TRACES_PATH = "/system/traces"
_LATEST = 100


GATEWAY = "gpufaas-gateway"

Facts = dict[str, str | int | float | bool]
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


@dataclass(slots=True)
class TracedStep:
    """A step of work for a call, outside the call itself; its caller sets `facts` and `error`."""

    call_id: str
    trace: TraceContext
    begun: Span  # it has no end yet
    began_s: float
    end_ns: int = 0
    facts: Facts = field(default_factory=dict)
    error: str = ""

    def span(self) -> Span:
        """A step in progress ends now."""
        end_ns, facts = self.end_ns or time.time_ns(), {"gpufaas.call_id": self.call_id}
        return self.begun._replace(end_ns=end_ns, attributes=facts | self.facts, error=self.error)


class CallTracer:
    """The traces of one gateway; `sink` receives the sampled ones, if there is a sink.

    `keep` plain calls that succeeded are remembered, and as many others: calls of GPU functions,
    async calls and failures are not displaced by plain successful calls. `ratio` is the share of
    the calls without a trace that is sampled.
    """

    def __init__(self, sink: Sink | None = None, *, keep: int = 2_000, ratio: float = 1.0) -> None:
        self._sink = sink
        self._keep = keep
        self._ratio = ratio
        self._plain: deque[Journey] = deque(maxlen=keep)
        self._others: deque[Journey | TracedStep] = deque(maxlen=keep)

    def begin(
        self, call_id: str, function: str, method: str, headers: tuple[bytes, bytes], *, gpu: bool
    ) -> Journey:
        """Begin the record of a call; `headers` are its traceparent and tracestate.

        A call without an id gets one: a UUID, whose digits also name its trace if it has none.
        """
        context = _context_of(headers) if headers[0] else None
        own = f"{getrandbits(128) & _NOT_OURS | _UUID:032x}"
        if not call_id:
            call_id = f"{own[:8]}-{own[8:12]}-{own[12:16]}-{own[16:20]}-{own[20:]}"
        trace_id = own if context is None else context.trace_id
        sampled = self._chosen() if context is None else context.sampled
        seed = getrandbits(64)
        journey = Journey(call_id, function, method, trace_id, seed, gpu=gpu, sampled=sampled)
        if context is not None:
            journey.parent, journey.state = context.span_id, context.state
        (self._others if gpu else self._plain).append(journey)
        return journey

    def ended(self, journey: Journey, status: int, error: str = "") -> None:
        """Record the end of a call."""
        journey.ended_s = time.monotonic()
        journey.status, journey.error = status, error
        failed = bool(error) or status >= _SERVER_ERROR
        if failed and not journey.gpu:
            self._others.append(journey)
        if journey.sampled and self._sink is not None:
            self._sink.add(partial(spans_of, journey, journey.ended_s))

    @contextmanager
    def step(
        self, call_id: str, name: str, headers: tuple[bytes, bytes], kind: SpanKind
    ) -> Iterator[TracedStep]:
        """Trace a step of work for a call, below the given context."""
        context = _context_of(headers) if headers[0] else None
        span_id = f"{getrandbits(64) or 1:016x}"
        if context is None:
            trace = TraceContext(f"{getrandbits(128) or 1:032x}", span_id, self._chosen())
            parent = ""
        else:
            trace, parent = context._replace(span_id=span_id), context.span_id
        begin_ns, began_s = time.time_ns(), time.monotonic()
        begun = Span(trace.trace_id, span_id, parent, name, GATEWAY, begin_ns, 0, kind)
        step = TracedStep(call_id, trace, begun, began_s)
        self._others.append(step)
        before = ABOUT.set(Work(step.trace, call_id))
        try:
            yield step
        except BaseException as error:
            step.error = str(error) or type(error).__name__
            raise
        finally:
            ABOUT.reset(before)
            step.end_ns = begin_ns + round((time.monotonic() - began_s) * 1e9)
            if step.trace.sampled and self._sink is not None:
                self._sink.add(lambda: [step.span()])

    def spans(self, call_id: str) -> list[Span]:
        """All remembered spans of a call, in the order in which they began."""
        spans: list[Span] = []
        seen: set[int] = set()
        for noted in (*self._plain, *self._others):
            if noted.call_id != call_id or id(noted) in seen:
                continue
            seen.add(id(noted))
            spans += (
                spans_of(noted, time.monotonic()) if isinstance(noted, Journey) else [noted.span()]
            )
        return sorted(spans, key=lambda span: span.begin_ns)

    def latest(self, most: int) -> list[Mapping[str, str | int | float | bool]]:
        """The calls that arrived last, the latest first."""
        calls = [*self._plain, *(call for call in self._others if isinstance(call, Journey))]
        unique = {id(call): call for call in calls}.values()
        newest = sorted(unique, key=lambda call: -call.began_s)[:most]
        return [
            {
                "call_id": call.call_id,
                "trace_id": call.trace_id,
                "function": call.function,
                "status": call.status,
                "took_s": round((call.ended_s or time.monotonic()) - call.began_s, 6),
                "running": not call.ended_s,
                "failed": bool(call.error),
            }
            for call in newest
        ]

    def families(self) -> Iterator[MetricFamily]:
        counts = NO_COUNTS if self._sink is None else self._sink.counts()
        yield gauge(metrics.TRACE_SPANS, [((name,), count) for name, count in counts.items()])

    async def show(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application of /system/traces and /system/traces/CALL_ID."""
        del receive
        if scope["method"] not in {"GET", "HEAD"}:
            await send_text(send, 405, "GET is expected", [(b"allow", b"GET, HEAD")])
            return
        raw: bytes = scope.get("raw_path") or scope["path"].encode()
        call_id = unquote(raw.decode("latin-1").removeprefix(_TRACES_PATH).strip("/"))
        status, memory = 200, self._memory()
        shown: dict[str, Any]
        if not call_id:
            shown = {"calls": self.latest(_LATEST)}
        elif spans := self.spans(call_id):
            shown = {"call_id": call_id, "spans": [plain_span(span) for span in spans]}
        else:
            status, shown = 404, {"error": "unknown", "message": _unknown(call_id, **memory)}
        body = json.dumps(shown | {"memory": memory}).encode()
        await send_response(send, status, body, ((b"content-type", b"application/json"),))

    def _memory(self) -> dict[str, Any]:
        """How many calls are remembered, and the age of the oldest in seconds; None without one."""
        oldest_s = min(
            (ring[0].began_s for ring in (self._plain, self._others) if ring), default=None
        )
        since_s = None if oldest_s is None else time.monotonic() - oldest_s
        calls = len(self._plain) + len(self._others)
        return {"calls": calls, "most": self._keep, "since_s": since_s}

    def _chosen(self) -> bool:
        """Whether a trace that begins here is sampled; never without a collector."""
        if self._sink is None:
            return False
        return self._ratio >= 1 or random() < self._ratio


def trace_headers_in(headers: Iterable[Header]) -> tuple[bytes, bytes]:
    values = dict(headers)
    return values.get(_PARENT, b""), values.get(_STATE, b"")


def carrying(headers: Iterable[Header], trace: TraceContext) -> list[Header]:
    """The headers, with this trace in place of any other."""
    kept = [header for header in headers if header[0] not in {_PARENT, _STATE}]
    kept.append((_PARENT, trace.header.encode()))
    return [*kept, (_STATE, trace.state.encode("latin-1"))] if trace.state else kept


def _context_of(headers: tuple[bytes, bytes]) -> TraceContext | None:
    return trace_of(headers[0].decode("latin-1"), headers[1].decode("latin-1"))


def _unknown(call_id: str, calls: int, most: int, since_s: float | None) -> str:
    ago = "" if since_s is None else f", the oldest of which came {since_s:.0f} s ago"
    return (
        f"call {call_id} is unknown: this gateway remembers {calls} calls{ago} "
        f"(at most {most} plain ones and {most} others), and none from before its start"
    )
