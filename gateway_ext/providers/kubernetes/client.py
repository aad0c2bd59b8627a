"""HTTP to a Kubernetes API server.

ProviderFailed
├── ClusterAway      it cannot be reached, or the connection broke
└── ClusterRefused   it answered with an error
"""

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp

from common.time_limits import time_limit
from gateway_ext.errors import ProviderFailed

Json = dict[str, Any]

MERGE = "application/merge-patch+json"
ANSWER_S = 30.0
_CONNECT_S = 5.0
_GOODBYE_S = 0.25
_LONGEST_LINE_BYTES = 8 << 20  # etcd stores no object as large
_LONGEST_MESSAGE, _LONGEST_REFUSAL_BYTES = 1000, 1 << 20
_BAD = 400


class ClusterAway(ProviderFailed):
    """The API server cannot be reached, or the connection broke."""

    def __init__(self, url: str, why: str) -> None:
        super().__init__(f"the Kubernetes API at {url} cannot be reached: {why}")


class ClusterRefused(ProviderFailed):
    """The API server answered with an error; `reason` is its word for the kind of error."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"Kubernetes refuses: {message}")
        self.status = status
        self.reason = reason
        self.message = message


class ClusterClient:
    """One API server, asked with the token of a service account."""

    def __init__(self, url: str, credentials: Path) -> None:
        self.url = url.rstrip("/")
        self._token = credentials / "token"
        self._authority = credentials / "ca.crt"
        self._session: aiohttp.ClientSession | None = None

    def open(self) -> None:
        """Needs a running event loop."""
        secured: ssl.SSLContext | bool = True
        if self.url.startswith("https:"):
            try:
                secured = ssl.create_default_context(cafile=self._authority)
            except OSError as error:
                raise ProviderFailed(f"{self._authority}: {error.strerror or error}") from error
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=secured),
            timeout=aiohttp.ClientTimeout(None, sock_connect=_CONNECT_S),
        )

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            # The library does not wait until connections with TLS have said goodbye.
            await asyncio.sleep(_GOODBYE_S)

    async def get(self, path: str, query: Mapping[str, str] | None = None) -> Json:
        return await self.call("GET", path, query)

    async def call(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: object = None,
        kind: str = "application/json",
    ) -> Json:
        """The object in the answer; ClusterRefused and ClusterAway say why there is none."""
        with self._translated():
            async with (
                time_limit(ANSWER_S),
                self._answer(method, path, query, body, kind) as answer,
            ):
                text = await answer.read()
        return self._object(text)

    async def events(
        self, path: str, query: Mapping[str, str], quiet_s: float
    ) -> AsyncGenerator[Json, None]:
        """ClusterAway if nothing arrives for `quiet_s`."""
        async with contextlib.aclosing(self.lines(path, query, quiet_s)) as lines:
            async for line in lines:
                if line.strip():
                    yield self._object(line)

    async def lines(
        self, path: str, query: Mapping[str, str], quiet_s: float | None = None
    ) -> AsyncGenerator[bytes, None]:
        timeout = aiohttp.ClientTimeout(None, sock_connect=_CONNECT_S, sock_read=quiet_s)
        with self._translated():
            async with self._answer("GET", path, query, timeout=timeout) as answer:
                rest = b""
                async for part in answer.content.iter_any():
                    *lines, rest = (rest + part).split(b"\n")
                    for line in lines:
                        yield line
                    if len(rest) > _LONGEST_LINE_BYTES:
                        raise ProviderFailed(f"{path} sends lines without an end")
                if rest:
                    yield rest

    @contextlib.asynccontextmanager
    async def _answer(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: object = None,
        kind: str = "application/json",
        timeout: aiohttp.ClientTimeout | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        assert self._session is not None, "opened before"
        headers = {"Accept": "application/json"}
        if self.url.startswith("https:"):
            headers["Authorization"] = f"Bearer {await asyncio.to_thread(self._token_now)}"
        if body is not None:
            headers["Content-Type"] = kind
        async with self._session.request(
            method,
            self.url + path,
            params=query,
            data=None if body is None else json.dumps(body).encode(),
            headers=headers,
            allow_redirects=False,
            timeout=timeout or self._session.timeout,
        ) as answer:
            if answer.status >= _BAD:
                raise _refusal(answer.status, await _beginning(answer))
            yield answer

    def _token_now(self) -> str:
        """The kubelet replaces the file before its token ends."""
        try:
            return self._token.read_text(encoding="ascii").strip()
        except (OSError, ValueError) as error:
            raise ProviderFailed(f"{self._token}: {error}") from error

    def _object(self, text: bytes) -> Json:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ProviderFailed(f"{self.url} does not answer JSON") from error
        if not isinstance(value, dict):
            raise ProviderFailed(f"{self.url} does not answer a JSON object")
        return value

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError as error:
            raise ClusterAway(self.url, "no answer in time") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ClusterAway(self.url, str(error) or type(error).__name__) from error


async def _beginning(answer: aiohttp.ClientResponse) -> bytes:
    beginning = b""
    async for part in answer.content.iter_any():
        beginning += part
        if len(beginning) > _LONGEST_REFUSAL_BYTES:
            break
    return beginning


def _refusal(status: int, body: bytes) -> ClusterRefused:
    try:
        refusal = json.loads(body)
        reason, message = str(refusal.get("reason", "")), str(refusal.get("message", ""))
    except (ValueError, AttributeError, RecursionError):
        reason, message = "", body.decode(errors="replace").strip()
    return ClusterRefused(status, reason, message[:_LONGEST_MESSAGE] or f"status {status}")
