"""Which collector is told of traces: by our settings, or by OpenTelemetry's own variables."""

import re
import socket
from base64 import b64encode
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from urllib.parse import SplitResult, unquote, unquote_to_bytes, urlsplit

from gpufaas.errors import CommandError
from gpufaas.otlp import Otlp, OtlpSettings
from gpufaas.settings import Tracing

_BASE, _TRACES = "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
_HEADERS, _TRACES_HEADERS = "OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS"
_PATH = "/v1/traces"
_AUTHORIZATION = "Authorization"
# Whatever may be a user and a password, where a URL is too odd to be taken apart.
_PERHAPS_SECRET = re.compile(r"^([a-zA-Z]+://)?.*@", re.DOTALL)


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
        url = base if _parts(base).path.endswith(_PATH) else base.rstrip("/") + _PATH
    if not url:
        return None
    parts = _parts(url)
    login, _, place = parts.netloc.rpartition("@")
    headers = _headers(tracing, environment)
    if login and _AUTHORIZATION.lower() not in map(str.lower, headers):
        headers = {**headers, _AUTHORIZATION: _basic(login)}
    shown = parts._replace(netloc=place).geturl()
    return OtlpSettings(shown, headers, _version(), socket.gethostname())


def _parts(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        if parts.scheme in {"http", "https"} and parts.hostname and parts.port != 0:
            return parts
    except ValueError:  # as from a port that is no number; its text has the URL in it
        pass
    named = _PERHAPS_SECRET.sub(r"\1...@", url)
    raise CommandError(f"traces: {named!r} is no http:// or https:// URL of a collector")


def _basic(login: str) -> str:
    """A URL's `user:password` as a header: URLs are shown, headers are not."""
    user, _, password = login.partition(":")
    said = unquote_to_bytes(user) + b":" + unquote_to_bytes(password)
    return "Basic " + b64encode(said).decode()


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
