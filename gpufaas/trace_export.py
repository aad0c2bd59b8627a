"""Spans to a collector: OTLP over HTTP in JSON, from a bounded queue, beside the process's work.

docs/decisions/ compares the cost of OpenTelemetry's own exporter.
"""

import asyncio
import contextlib
import json
import logging
import socket
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self
from urllib.parse import unquote

import aiohttp

from common.build_identity import release
from common.tasks import error_of
from common.telemetry.traces import Attributes, Span
from common.time_limits import time_limit
from gpufaas.errors import CommandError
from gpufaas.options.configuration import TraceSettings
from gpufaas.remote.http_request import HttpUrl, http_url

log = logging.getLogger(__name__)

_RETRIED_STATUSES = frozenset({429, 502, 503, 504})
_FIRST_REFUSAL = 300
_STATUS_ERROR = 2
_WARNING_EVERY_S = 60.0


@dataclass(frozen=True, slots=True)
class ExportSettings:
    """Where and how spans are sent.

    `url` appears in log lines, so credentials belong in the headers. A part is one call (or
    request) with all its spans: `most_parts` may wait, `batch_parts` are sent at once.
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
    first_pause_s: float = 0.5
    closing_s: float = 2.0


class SpanExporter:
    """Sends spans while the context lasts; at its end, the rest is sent within `closing_s`."""

    def __init__(self, settings: ExportSettings) -> None:
        # Spans that were sent and that failed; parts that found the queue full, before their spans
        # were made.
        self._counts = {"sent": 0, "failed": 0, "dropped": 0}
        self._settings = settings
        self._parts: deque[Callable[[], Iterable[Span]]] = deque()
        self._batch_ready = asyncio.Event()
        self._closing = asyncio.Event()
        self._session: aiohttp.ClientSession | None = None
        self._sending: asyncio.Task[None] | None = None
        self._warned_s = -_WARNING_EVERY_S

    def add(self, make: Callable[[], Iterable[Span]]) -> None:
        if len(self._parts) >= self._settings.most_parts:
            self._counts["dropped"] += 1
            self._warn("too many wait")
            return
        self._parts.append(make)
        if len(self._parts) >= self._settings.batch_parts:
            self._batch_ready.set()

    def counts(self) -> Mapping[str, int]:
        return dict(self._counts)

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=self._settings.timeout_s),
            headers={"Content-Type": "application/json", **self._settings.headers},
        )
        self._sending = asyncio.create_task(self._send_batches())
        self._sending.add_done_callback(_log_failure)
        return self

    async def __aexit__(self, *failure: object) -> None:
        assert self._sending is not None, "the context was entered"
        assert self._session is not None, "the context was entered"
        self._closing.set()
        self._batch_ready.set()
        _, late = await asyncio.wait({self._sending}, timeout=self._settings.closing_s)
        if late:
            self._sending.cancel()
            await asyncio.wait(late)
            self._warn("the collector did not take them before the end")
        self._counts["dropped"] += len(self._parts)
        self._parts.clear()
        await self._session.close()

    async def _send_batches(self) -> None:
        """Send full batches at once and others once a period; when closing, empty the queue."""
        while not (self._closing.is_set() and not self._parts):
            with contextlib.suppress(TimeoutError):
                async with time_limit(self._settings.every_s):
                    await self._batch_ready.wait()
            while self._parts:
                await self._send_batch()
            if not self._closing.is_set():
                self._batch_ready.clear()

    async def _send_batch(self) -> None:
        encoded: dict[str, list[str]] = {}
        count = 0
        failure = "the batch was cut off"
        try:
            for _ in range(min(len(self._parts), self._settings.batch_parts)):
                for span in self._parts.popleft()():
                    count += 1
                    encoded.setdefault(span.service, []).append(encoded_span(span))
                await asyncio.sleep(0)  # calls go first
            failure = await self._post(encoded_request(encoded, self._settings))
        finally:
            self._counts["failed" if failure else "sent"] += count
            if failure:
                self._warn(failure)

    async def _post(self, body: bytes) -> str:
        """Send a request, repeatedly if the collector is busy; the failure's reason, or empty."""
        assert self._session is not None, "the context was entered"
        failure, pause_s = "", self._settings.first_pause_s
        for attempt in range(self._settings.attempts):
            if attempt:
                await asyncio.sleep(pause_s)
                pause_s *= 2
            try:
                async with self._session.post(self._settings.url, data=body) as response:
                    if response.status < _FIRST_REFUSAL:
                        return ""
                    failure = f"{self._settings.url} answers {response.status}"
                    if response.status not in _RETRIED_STATUSES:
                        return failure
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                failure = f"{self._settings.url}: {type(error).__name__}: {error}"
        return failure

    def _warn(self, reason: str) -> None:
        """At most once a minute, so that an absent collector does not fill the log."""
        if time.monotonic() - self._warned_s < _WARNING_EVERY_S:
            return
        self._warned_s = time.monotonic()
        log.warning("traces are dropped: %s", reason)


def _log_failure(sending: asyncio.Task[None]) -> None:
    """A bug of ours ends the export of spans; calls continue."""
    if (error := error_of(sending)) is not None:
        log.error("traces are not sent any more", exc_info=error)


def encoded_request(spans_by_service: Mapping[str, list[str]], settings: ExportSettings) -> bytes:
    scope = _json({"name": "gpufaas", "version": settings.version})
    resources = ",".join(
        f'{{"resource":{_json({"attributes": _attributes(_resource(service, settings))})},'
        f'"scopeSpans":[{{"scope":{scope},"spans":[{",".join(spans)}]}}]}}'
        for service, spans in spans_by_service.items()
    )
    return f'{{"resourceSpans":[{resources}]}}'.encode()


def encoded_span(span: Span) -> str:
    """A span as JSON; encoded one by one, so that no batch holds up the event loop."""
    status = {"code": _STATUS_ERROR, "message": span.error} if span.error else {}
    return _json(
        {
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
    )


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"))


def _resource(service: str, settings: ExportSettings) -> Attributes:
    facts = (("service.version", settings.version), ("host.name", settings.node))
    return {"service.name": service, **{name: value for name, value in facts if value}}


def _attributes(attributes: Attributes) -> list[dict[str, Any]]:
    return [{"key": name, "value": _value(value)} for name, value in attributes.items()]


def _value(value: str | float | bool) -> dict[str, Any]:  # noqa: FBT001 - one of the kinds of values
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    return {"stringValue": value}


_BASE, _TRACES = "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
_HEADERS, _TRACES_HEADERS = "OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS"
_PATH = "/v1/traces"
_AUTHORIZATION = "Authorization"


@asynccontextmanager
async def span_exporter(
    tracing: TraceSettings, environment: Mapping[str, str]
) -> AsyncIterator[SpanExporter | None]:
    """A running exporter; None if no endpoint is configured."""
    settings = export_settings(tracing, environment)
    if settings is None:
        yield None
        return
    async with SpanExporter(settings) as exporter:
        yield exporter


def export_settings(
    tracing: TraceSettings, environment: Mapping[str, str]
) -> ExportSettings | None:
    """The exporter's settings; None if no endpoint is configured or OTEL_SDK_DISABLED is set.

    Our own endpoint takes precedence over the environment's. CommandError for an invalid value.
    """
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    url = _endpoint(tracing, environment)
    if url is None:
        return None
    headers = _headers(tracing, environment)
    if url.authorization and _AUTHORIZATION.lower() not in map(str.lower, headers):
        headers = {**headers, _AUTHORIZATION: url.authorization}
    return ExportSettings(str(url), headers, release(), socket.gethostname())


def _endpoint(tracing: TraceSettings, environment: Mapping[str, str]) -> HttpUrl | None:
    """OpenTelemetry's variable for traces is a complete URL; the path is added to the others."""
    complete = environment.get(_TRACES)
    base = tracing.endpoint or ("" if complete else environment.get(_BASE, ""))
    if base:
        url = http_url(base, "traces")
        if url.path.endswith(_PATH):
            return url
        return replace(url, path=url.path.rstrip("/") + _PATH)
    return http_url(complete, "traces") if complete else None


def _headers(tracing: TraceSettings, environment: Mapping[str, str]) -> Mapping[str, str]:
    """The headers of the file, before those of the environment."""
    text = environment.get(_TRACES_HEADERS) or environment.get(_HEADERS) or ""
    headers = {}
    for pair in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = pair.partition("=")
        if not equals:
            raise CommandError(f"{_HEADERS}: name=value is expected, separated by commas")
        headers[name.strip()] = unquote(value.strip())
    if tracing.headers_file:
        headers |= _headers_in_file(Path(tracing.headers_file))
    return headers


def _headers_in_file(path: Path) -> Mapping[str, str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(
            f"[tracing] headers_file: {path}: {getattr(error, 'strerror', error)}"
        ) from error
    pairs = [line.partition(":") for line in lines if line.strip()]
    if not all(colon for _, colon, _ in pairs):
        raise CommandError(f"[tracing] headers_file: {path}: a line is `Name: value`")
    return {name.strip(): value.strip() for name, _, value in pairs}
