"""Where spans are sent: our own settings first, then OpenTelemetry's variables."""

import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote

from common.build_identity import release
from gpufaas.daemons.trace_export import ExportSettings, SpanExporter
from gpufaas.errors import CommandError
from gpufaas.options.configuration import TraceSettings
from gpufaas.options.http_url import HttpUrl, http_url

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
