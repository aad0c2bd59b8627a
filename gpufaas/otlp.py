"""Spans to a collector: OpenTelemetry's protocol over HTTP, in JSON, beside everything else."""

import asyncio
import contextlib
import json
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import aiohttp

from scheduler.traces import Attributes, Span

log = logging.getLogger(__name__)

_AGAIN = frozenset({429, 502, 503, 504})
_FIRST_REFUSAL = 300
_ERROR = 2
_COMPLAIN_S = 60.0


@dataclass(frozen=True, slots=True)
class OtlpSettings:
    """Where spans go, and how: what the collector does not take in time is dropped.

    `url` is named in log lines: who we are belongs to the headers.
    `most_parts` is how many calls (and the like) may wait with all their spans, `batch_parts` how
    many are sent at once.
    """

    url: str
    headers: Mapping[str, str] = field(default_factory=dict)
    version: str = ""
    node: str = ""
    most_parts: int = 4_096
    batch_parts: int = 64
    every_s: float = 1.0
    timeout_s: float = 5.0
    attempts: int = 4
    pause_s: float = 0.5
    farewell_s: float = 2.0


@dataclass(slots=True)
class Sent:
    """What became of spans; `dropped_parts` found the queue full, before they were made."""

    spans: int = 0
    failed_spans: int = 0
    dropped_parts: int = 0


class Otlp:
    """Sends spans on for as long as the context lasts, and what waits then within `farewell_s`."""

    def __init__(self, settings: OtlpSettings) -> None:
        self.sent = Sent()
        self._settings = settings
        self._parts: deque[Callable[[], Iterable[Span]]] = deque()
        self._some = asyncio.Event()
        self._closing = asyncio.Event()
        self._session: aiohttp.ClientSession | None = None
        self._sending: asyncio.Task[None] | None = None
        self._complained_s = -_COMPLAIN_S

    def add(self, make: Callable[[], Iterable[Span]]) -> None:
        """See `scheduler.traces.Sink`."""
        if len(self._parts) >= self._settings.most_parts:
            self.sent.dropped_parts += 1
            self._complain("too many wait")
            return
        self._parts.append(make)
        if len(self._parts) >= self._settings.batch_parts:
            self._some.set()

    def counts(self) -> Mapping[str, int]:
        """See `scheduler.traces.Sink`."""
        sent = self.sent
        return {
            "sent": sent.spans,
            "failed": sent.failed_spans,
            "dropped": sent.dropped_parts,
        }

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=self._settings.timeout_s),
            headers={"Content-Type": "application/json", **self._settings.headers},
        )
        self._sending = asyncio.create_task(self._send_on())
        self._sending.add_done_callback(_broke)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._sending is not None, "it was entered"
        assert self._session is not None, "it was entered"
        self._closing.set()
        self._some.set()
        _, late = await asyncio.wait({self._sending}, timeout=self._settings.farewell_s)
        if late:
            self._sending.cancel()
            await asyncio.wait(late)
            self._complain("the collector did not take them before the end")
        self.sent.dropped_parts += len(self._parts)
        self._parts.clear()
        await self._session.close()

    async def _send_on(self) -> None:
        """A batch after the other; after the last one, where that is wanted."""
        while not (self._closing.is_set() and not self._parts):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.every_s):
                    await self._some.wait()
            while self._parts:
                await self._batch()
            if not self._closing.is_set():
                self._some.clear()

    async def _batch(self) -> None:
        spans: list[Span] = []
        why = "the batch was cut off"
        try:
            for _ in range(min(len(self._parts), self._settings.batch_parts)):
                spans += self._parts.popleft()()
                await asyncio.sleep(0)  # calls go first
            why = await self._delivered(encoded(spans, self._settings))
        finally:
            if why:
                self.sent.failed_spans += len(spans)
                self._complain(why)
            else:
                self.sent.spans += len(spans)

    async def _delivered(self, body: bytes) -> str:
        """Empty, or why it was not."""
        assert self._session is not None, "it was entered"
        why, pause_s = "", self._settings.pause_s
        for attempt in range(self._settings.attempts):
            if attempt:
                await asyncio.sleep(pause_s)
                pause_s *= 2
            try:
                async with self._session.post(self._settings.url, data=body) as answer:
                    if answer.status < _FIRST_REFUSAL:
                        return ""
                    why = f"{self._settings.url} answers {answer.status}"
                    if answer.status not in _AGAIN:
                        return why
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                why = f"{self._settings.url}: {type(error).__name__}: {error}"
        return why

    def _complain(self, why: str) -> None:
        """Once in a while: a collector that is gone is no reason to fill a log."""
        if time.monotonic() - self._complained_s < _COMPLAIN_S:
            return
        self._complained_s = time.monotonic()
        log.warning("traces are dropped: %s", why)


def _broke(sending: asyncio.Task[None]) -> None:
    """A fault of ours costs traces, and no call."""
    error = None if sending.cancelled() else sending.exception()
    if error is not None:
        log.error("traces are sent no more", exc_info=error)


def encoded(spans: Sequence[Span], settings: OtlpSettings) -> bytes:
    """An ExportTraceServiceRequest, by the services that the spans are of."""
    by_service: dict[str, list[Span]] = {}
    for span in spans:
        by_service.setdefault(span.service, []).append(span)
    scope = {"name": "gpufaas", "version": settings.version}
    resources = [
        {
            "resource": {"attributes": _attributes(_resource(service, settings))},
            "scopeSpans": [{"scope": scope, "spans": [_span(each) for each in of_it]}],
        }
        for service, of_it in by_service.items()
    ]
    return json.dumps({"resourceSpans": resources}, separators=(",", ":")).encode()


def _resource(service: str, settings: OtlpSettings) -> Attributes:
    found = {"service.name": service}
    if settings.version:
        found["service.version"] = settings.version
    return found | ({"host.name": settings.node} if settings.node else {})


def _span(span: Span) -> dict[str, Any]:
    status = {"code": _ERROR, "message": span.error} if span.error else {}
    return {
        "traceId": span.trace_id,
        "spanId": span.span_id,
        "parentSpanId": span.parent_id,
        "name": span.name,
        "kind": int(span.kind),
        "startTimeUnixNano": str(span.begin_ns),
        "endTimeUnixNano": str(span.end_ns),
        "attributes": _attributes(span.attributes),
        "status": status,
    }


def _attributes(found: Attributes) -> list[dict[str, Any]]:
    return [{"key": name, "value": _value(value)} for name, value in found.items()]


def _value(value: str | float | bool) -> dict[str, Any]:  # noqa: FBT001 - one of the kinds of values
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    return {"stringValue": value}
