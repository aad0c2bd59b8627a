"""HTTP to a Docker Engine: over its socket or TCP, in an API version that both sides support.

ProviderFailed
├── EngineAway      it cannot be reached, or the connection broke
└── EngineRefused   it answered with an error
"""

import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from common.time_limits import time_limit
from gateway_ext.errors import BadRequest, ProviderFailed

# Docker 20.10 supports 1.41; 1.47 is the newest version that was tested.
_OLDEST, _NEWEST = (1, 41), (1, 47)
_CONNECT_S, _ANSWER_S = 5.0, 60.0
_BAD = 400
_LONGEST_MESSAGE = 1000


class EngineAway(ProviderFailed):
    """The Engine cannot be reached, or the connection broke."""

    def __init__(self, url: str, why: str) -> None:
        super().__init__(f"the Docker Engine at {url} cannot be reached: {why}")


class EngineRefused(ProviderFailed):
    """The Engine answered with an error; `status` is 0 within a stream."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class EngineTransport:
    """Connections to one Engine, made when they are needed."""

    def __init__(self, url: str, tls: Path | None = None) -> None:
        self.url = url
        self._base, self._socket = _parsed(url, private=tls is not None)
        self._tls = tls
        self._session: aiohttp.ClientSession | None = None
        self._version = ""

    def open(self) -> None:
        """Allow requests; needs a running event loop."""
        self._session = aiohttp.ClientSession(
            connector=self._connector(),
            timeout=aiohttp.ClientTimeout(None, sock_connect=_CONNECT_S),
            auto_decompress=False,
        )

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()

    async def call(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: object = None,
        within_s: float = _ANSWER_S,
    ) -> Any:
        """The answer, read as JSON; None if it is empty."""
        async with self.stream(method, path, query, body, within_s=within_s) as content:
            try:
                async with time_limit(within_s):
                    text = await content.read()
            except TimeoutError as error:
                raise EngineAway(self.url, f"no answer within {within_s:g} s") from error
        try:
            return json.loads(text) if text.strip() else None
        except (ValueError, RecursionError) as error:
            raise ProviderFailed(f"the Docker Engine at {self.url} does not answer JSON") from error

    @contextlib.asynccontextmanager
    async def stream(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: object = None,
        *,
        headers: Mapping[str, str] | None = None,
        within_s: float = _ANSWER_S,
    ) -> AsyncIterator[aiohttp.StreamReader]:
        """The body of the answer as it arrives; `within_s` bounds the time until it begins."""
        version = self._version or await self._negotiated(within_s)
        with self._translated(within_s):
            content = await self._response(
                f"/v{version}{path}", method, query, body, headers, within_s
            )
        try:
            with self._translated(within_s):
                yield content.content
        finally:
            content.close()

    async def _negotiated(self, within_s: float) -> str:
        with self._translated(within_s):
            found = await self._response("/_ping", "GET", None, None, None, within_s)
            found.release()
        version = found.headers.get("API-Version", "")
        try:
            theirs = tuple(int(part) for part in version.split("."))
        except ValueError:
            raise ProviderFailed(f"{self.url} is no Docker Engine: it names no version") from None
        if theirs < _OLDEST:
            least = ".".join(map(str, _OLDEST))
            raise ProviderFailed(
                f"the Docker Engine at {self.url} speaks {version} of its API;"
                f" {least} (Docker 20.10) is the least that is needed"
            )
        self._version = ".".join(map(str, min(theirs, _NEWEST)))
        return self._version

    async def _response(
        self,
        path: str,
        method: str,
        query: Mapping[str, str] | None,
        body: object,
        headers: Mapping[str, str] | None,
        within_s: float,
    ) -> aiohttp.ClientResponse:
        assert self._session is not None, "opened before"
        raw = body if isinstance(body, bytes) else None
        sent = headers or ({"Content-Type": "application/x-tar"} if raw else {})
        async with time_limit(within_s):
            found = await self._session.request(
                *(method, f"{self._base}{path}"),
                params=query,
                data=raw,
                json=None if raw is not None else body,
                headers=sent,
            )
            if found.status >= _BAD:
                raise EngineRefused(found.status, _message(await found.read()))
        return found

    @contextlib.contextmanager
    def _translated(self, within_s: float) -> Iterator[None]:
        """Raise EngineAway for errors of the connection."""
        try:
            yield
        except TimeoutError as error:
            raise self._away(f"no answer within {within_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise self._away(str(error) or type(error).__name__) from error

    def _away(self, why: str) -> EngineAway:
        self._version = ""  # it may come back as another release
        return EngineAway(self.url, why)

    def _connector(self) -> aiohttp.BaseConnector:
        if self._socket:
            return aiohttp.UnixConnector(self._socket, limit=0)
        return aiohttp.TCPConnector(limit=0, ssl=self._secured() if self._tls else True)

    def _secured(self) -> ssl.SSLContext:
        """The folder holds ca.pem, cert.pem and key.pem, as DOCKER_CERT_PATH does."""
        assert self._tls is not None, "called only with a folder of certificates"
        try:
            context = ssl.create_default_context(cafile=self._tls / "ca.pem")
            context.load_cert_chain(self._tls / "cert.pem", self._tls / "key.pem")
        except OSError as error:
            raise BadRequest(f"docker_tls_dir: {self._tls}: {error}") from error
        return context


def _parsed(url: str, *, private: bool) -> tuple[str, str]:
    """The base URL of requests, and the path of the socket if there is one."""
    parts = urlsplit(url)
    if parts.scheme == "unix" and parts.path and not parts.netloc:
        return "http://docker", parts.path
    if parts.scheme == "tcp" and parts.netloc and parts.path in {"", "/"}:
        return f"{'https' if private else 'http'}://{parts.netloc}", ""
    raise BadRequest(f"docker_url: {url!r}: unix:///path or tcp://host:port is expected")


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["message"]).strip()[:_LONGEST_MESSAGE]
    except (ValueError, TypeError, KeyError, RecursionError):
        return body.decode(errors="replace").strip()[:_LONGEST_MESSAGE] or "no reason given"
