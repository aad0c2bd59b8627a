"""A collector of traces on loopback: it takes what OpenTelemetry's exporters send, strictly."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.kit.waiting import PATIENCE_S

_KINDS = range(1, 6)


@dataclass(frozen=True)
class Kept:
    """One span as it arrived."""

    service: str
    trace_id: str
    span_id: str
    parent_id: str
    name: str
    begin_ns: int
    end_ns: int
    attributes: Mapping[str, Any]
    error: str


@dataclass
class Collector:
    """What came; `answers` are the statuses of the next answers, 200 where there are no more."""

    url: str = ""
    spans: list[Kept] = field(default_factory=list)
    headers: list[Mapping[str, str]] = field(default_factory=list)
    answers: list[int] = field(default_factory=list)
    open: asyncio.Event = field(default_factory=asyncio.Event)

    def of(self, trace_id: str) -> list[Kept]:
        return [span for span in list(self.spans) if span.trace_id == trace_id]

    async def take(self, request: web.Request) -> web.Response:
        """POST /v1/traces."""
        await self.open.wait()
        self.headers.append(dict(request.headers))
        status = self.answers.pop(0) if self.answers else 200
        if status == web.HTTPOk.status_code:
            self.spans += _read(await request.json())
        return web.json_response({}, status=status)


@asynccontextmanager
async def a_collector() -> AsyncIterator[Collector]:
    """One in this loop."""
    collector = Collector()
    collector.open.set()
    app = web.Application()
    app.router.add_post("/v1/traces", collector.take)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    collector.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield collector
    finally:
        collector.open.set()
        await runner.cleanup()


@contextmanager
def collecting() -> Iterator[Collector]:
    """One in a thread of its own, for tests that have no loop."""
    found: list[Collector] = []
    ready, loop = threading.Event(), asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        async with a_collector() as collector:
            found.append(collector)
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert ready.wait(PATIENCE_S), "it does not start"
        yield found[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


def _read(said: Mapping[str, Any]) -> Iterator[Kept]:
    for resource in said["resourceSpans"]:
        service = _attributes(resource["resource"]["attributes"])["service.name"]
        for scope in resource["scopeSpans"]:
            assert scope["scope"]["name"] == "gpufaas"
            for span in scope["spans"]:
                yield _span(service, span)


def _span(service: str, span: Mapping[str, Any]) -> Kept:
    assert len(bytes.fromhex(span["traceId"])) == 16
    assert len(bytes.fromhex(span["spanId"])) == 8
    assert span["kind"] in _KINDS
    begin_ns, end_ns = int(span["startTimeUnixNano"]), int(span["endTimeUnixNano"])
    assert isinstance(span["startTimeUnixNano"], str), "JSON's numbers are too short for it"
    assert begin_ns <= end_ns, span
    return Kept(
        service=service,
        trace_id=span["traceId"],
        span_id=span["spanId"],
        parent_id=span["parentSpanId"],
        name=span["name"],
        begin_ns=begin_ns,
        end_ns=end_ns,
        attributes=_attributes(span["attributes"]),
        error=span["status"].get("message", "") if span["status"].get("code") == 2 else "",
    )


def _attributes(pairs: list[Mapping[str, Any]]) -> Mapping[str, Any]:
    found = {}
    for pair in pairs:
        ((kind, value),) = pair["value"].items()
        found[pair["key"]] = int(value) if kind == "intValue" else value
    return found
