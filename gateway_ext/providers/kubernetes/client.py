"""HTTP to a Kubernetes API server.

ProviderFailed
├── ClusterAway      it cannot be reached, or the connection broke
└── ClusterRefused   it answered with an error
"""

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp

from common.time_limits import time_limit
from gateway_ext.errors import ProviderFailed
from gateway_ext.providers import http_api
from gateway_ext.providers.http_api import BAD, CONNECT_S, refusal, translated

Json = dict[str, Any]

MERGE = "application/merge-patch+json"
ANSWER_S = 30.0
_GOODBYE_S = 0.25
_LONGEST_LINE_BYTES = 8 << 20  # etcd stores no object as large
_LONGEST_MESSAGE = 1000


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
            timeout=aiohttp.ClientTimeout(None, sock_connect=CONNECT_S),
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
        async with self._answer(method, path, query, body, kind, within_s=ANSWER_S) as answer:
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
        self, path: str, query: Mapping[str, str], quiet_s: float | None
    ) -> AsyncGenerator[bytes, None]:
        def refuse() -> None:
            raise ProviderFailed(f"{path} sends lines without an end")

        async with self._answer("GET", path, query, quiet_s=quiet_s) as answer:
            parts = http_api.lines(answer.content, _LONGEST_LINE_BYTES, refuse)
            async with contextlib.aclosing(parts) as lines:
                async for line in lines:
                    yield line

    @contextlib.asynccontextmanager
    async def _answer(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: object = None,
        kind: str = "application/json",
        *,
        within_s: float | None = None,
        quiet_s: float | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        assert self._session is not None, "opened before"
        headers = {"Accept": "application/json"}
        if self.url.startswith("https:"):
            headers["Authorization"] = f"Bearer {await asyncio.to_thread(self._token_now)}"
        if body is not None:
            headers["Content-Type"] = kind
        timeout = aiohttp.ClientTimeout(None, sock_connect=CONNECT_S, sock_read=quiet_s)
        request = self._session.request(
            method,
            self.url + path,
            params=query,
            data=None if body is None else json.dumps(body).encode(),
            headers=headers,
            allow_redirects=False,
            timeout=timeout,
        )
        with translated(lambda why: ClusterAway(self.url, why), "no answer in time"):
            async with time_limit(within_s), request as answer:
                if answer.status >= BAD:
                    raise _refusal(answer.status, await refusal(answer))
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


def _refusal(status: int, body: bytes) -> ClusterRefused:
    try:
        refusal = json.loads(body)
        reason, message = str(refusal.get("reason", "")), str(refusal.get("message", ""))
    except (ValueError, AttributeError, RecursionError):
        reason, message = "", body.decode(errors="replace").strip()
    return ClusterRefused(status, reason, message[:_LONGEST_MESSAGE] or f"status {status}")
