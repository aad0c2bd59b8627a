"""Which collector is told of traces: by our settings, or by OpenTelemetry's own variables."""

import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from urllib.parse import unquote, urlsplit

from gpufaas.errors import CommandError
from gpufaas.otlp import Otlp, OtlpSettings
from gpufaas.settings import Tracing

_BASE, _TRACES = "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
_HEADERS, _TRACES_HEADERS = "OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS"
_PATH = "/v1/traces"


@asynccontextmanager
async def collector(tracing: Tracing, environment: Mapping[str, str]) -> AsyncIterator[Otlp | None]:
    """Whoever sends spans on, where an endpoint is configured; None where not."""
    settings = otlp_settings(tracing, environment)
    if settings is None:
        yield None
        return
    async with Otlp(settings) as sink:
        yield sink


def otlp_settings(tracing: Tracing, environment: Mapping[str, str]) -> OtlpSettings | None:
    """Where spans go; None where nothing is configured, or OTEL_SDK_DISABLED says so.

    Our own setting goes before the environment. CommandError where it cannot be.
    """
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    url = environment.get(_TRACES, "")
    base = tracing.endpoint or ("" if url else environment.get(_BASE, ""))
    if base:
        url = base if urlsplit(base).path.endswith(_PATH) else base.rstrip("/") + _PATH
    if not url:
        return None
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise CommandError(f"traces: {url!r} is no http:// or https:// URL of a collector")
    return OtlpSettings(url, _headers(tracing, environment), _version(), socket.gethostname())


def _headers(tracing: Tracing, environment: Mapping[str, str]) -> Mapping[str, str]:
    """Those of the file, which has a `Name: value` a line, before those of the environment."""
    text = environment.get(_TRACES_HEADERS) or environment.get(_HEADERS) or ""
    found = {}
    for pair in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = pair.partition("=")
        if not equals:
            raise CommandError(f"{_HEADERS}: name=value is wanted, separated by commas")
        found[name.strip()] = unquote(value.strip())
    if tracing.headers_file:
        found |= _in_file(Path(tracing.headers_file))
    return found


def _in_file(path: Path) -> Mapping[str, str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"[tracing] headers_file: {path}: {error}") from error
    pairs = [line.partition(":") for line in lines if line.strip()]
    if not all(colon for _, colon, _ in pairs):
        raise CommandError(f"[tracing] headers_file: {path}: a line is `Name: value`")
    return {name.strip(): value.strip() for name, _, value in pairs}


def _version() -> str:
    try:
        return version("gpufaas")
    except PackageNotFoundError:  # run from a folder that was not installed
        return ""
