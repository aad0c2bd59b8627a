"""Records of calls: begun and ended, the last ones kept and shown, sampled ones exported."""

import json
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
from gateway_ext.tracing.journey import Journey
from gateway_ext.tracing.spans import GATEWAY, Facts, spans_of

_SERVER_ERROR = 500
# The bits of a random UUID: version 4, and the variant of its standard.
_NOT_OURS = ~((0xF << 76) | (0b11 << 62))
_UUID = (4 << 76) | (0b10 << 62)
_PARENT, _STATE = TRACEPARENT.encode(), TRACESTATE.encode()
_TRACES_PATH = "/system/traces"
_LATEST = 100


@dataclass(slots=True)
class TracedStep:
    """A step of work for a call, outside the call itself; its caller sets `facts` and `error`."""

    call_id: str
    name: str
    trace: TraceContext
    parent: str
    kind: SpanKind
    begin_ns: int
    began_s: float
    end_ns: int = 0
    facts: Facts = field(default_factory=dict)
    error: str = ""

    def span(self) -> Span:
        """A step in progress ends now."""
        return Span(
            trace_id=self.trace.trace_id,
            span_id=self.trace.span_id,
            parent_id=self.parent,
            name=self.name,
            service=GATEWAY,
            begin_ns=self.begin_ns,
            end_ns=self.end_ns or time.time_ns(),
            kind=self.kind,
            attributes={"gpufaas.call_id": self.call_id} | self.facts,
            error=self.error,
        )


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
        step = TracedStep(call_id, name, trace, parent, kind, time.time_ns(), time.monotonic())
        self._others.append(step)
        before = ABOUT.set(Work(step.trace, call_id))
        try:
            yield step
        except BaseException as error:
            step.error = str(error) or type(error).__name__
            raise
        finally:
            ABOUT.reset(before)
            step.end_ns = step.begin_ns + round((time.monotonic() - step.began_s) * 1e9)
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
