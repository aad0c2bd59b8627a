"""HTTP to a Kubernetes API server; a list of all objects of a kind, a watch of their changes."""

import asyncio
import contextlib
import json
import logging
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import aiohttp

from common.time_limits import time_limit
from gateway_ext.errors import GatewayError, ProviderFailed
from gateway_ext.providers.http_api import (
    BAD,
    CONNECT_S,
    ServerAway,
    ServerRefused,
    all_lines,
    refusal,
    translated,
)

log = logging.getLogger(__name__)

Json = dict[str, Any]
T = TypeVar("T")

MERGE = "application/merge-patch+json"
ANSWER_S = 30.0
_GOODBYE_S = 0.25
_ABSENT, _CONFLICT, _INVALID = 404, 409, 422
_LONGEST_MESSAGE = 1000
_REFUSES = "Kubernetes refuses: "


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
        *,
        missing: GatewayError | None = None,
        exists: GatewayError | None = None,
        invalid: Callable[[str], GatewayError] | None = None,
    ) -> Json:
        """The object in the answer; 404 raises `missing`, 409 `exists`, if they are given.

        422 raises what `invalid` makes of the reason; ServerRefused and ServerAway say why else
        there is none.
        """
        try:
            async with self._answer(method, path, query, body, kind, within_s=ANSWER_S) as answer:
                text = await answer.read()
        except ServerRefused as refused:
            meaning = {_ABSENT: missing, _CONFLICT: exists}.get(refused.status)
            if refused.status == _INVALID and invalid is not None:
                meaning = invalid(refused.message)
            if meaning is None:
                raise
            raise meaning from refused
        return self.object_of(text)

    def lines(
        self, path: str, query: Mapping[str, str], quiet_s: float | None
    ) -> AsyncGenerator[bytes, None]:
        """ServerAway if nothing arrives for `quiet_s`."""
        return all_lines(self._answer("GET", path, query, quiet_s=quiet_s), path)

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
        with translated(self._away, "no answer in time"):
            async with time_limit(within_s), request as answer:
                if answer.status >= BAD:
                    raise _refusal(answer.status, await refusal(answer))
                yield answer

    def _away(self, why: str) -> ServerAway:
        return ServerAway(f"the Kubernetes API at {self.url} cannot be reached: {why}")

    def _token_now(self) -> str:
        """The kubelet replaces the file before its token ends."""
        try:
            return self._token.read_text(encoding="ascii").strip()
        except (OSError, ValueError) as error:
            raise ProviderFailed(f"{self._token}: {error}") from error

    def object_of(self, text: bytes) -> Json:
        """ProviderFailed if it is no JSON object."""
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ProviderFailed(f"{self.url} does not answer JSON") from error
        if not isinstance(value, dict):
            raise ProviderFailed(f"{self.url} does not answer a JSON object")
        return value


def _refusal(status: int, body: bytes) -> ServerRefused:
    try:
        message = str(json.loads(body).get("message", ""))
    except (ValueError, AttributeError, RecursionError):
        message = body.decode(errors="replace").strip()
    return ServerRefused(status, message[:_LONGEST_MESSAGE] or f"status {status}", _REFUSES)


_GONE = 410
_WATCH_S = 240  # after this time the API server ends a watch, and a new one goes on from there
_QUIET_S = 90.0  # the API server sends a bookmark each minute: silence is a broken connection
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_PAGE = "500"  # objects of one answer


@dataclass(eq=False)
class ObjectWatch(Generic[T]):
    """All objects at `path` with the labels of `selector`, as `read` understands them, by uid.

    `changed` is called with what an object was and is, None standing for absence. What `read`
    answers None to is passed over.
    """

    client: ClusterClient
    path: str
    selector: str
    read: Callable[[Json], T | None]
    changed: Callable[[T | None, T | None], None]
    _objects: dict[str, T] = field(default_factory=dict, init=False)
    _version: str = field(default="", init=False)
    _pause_s: float = field(default=_FIRST_PAUSE_S, init=False)
    _away: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._query = {"labelSelector": self.selector} if self.selector else {}

    async def list(self) -> None:
        """Ask for all objects; what was not heard of is reported as changes."""
        listed: dict[str, T | None] = {}
        query = {**self._query, "limit": _PAGE}
        while True:
            answer = await self.client.get(self.path, query)
            try:
                listed |= {_uid(raw): self.read(raw) for raw in answer["items"] or []}
                version = str(answer["metadata"]["resourceVersion"])
                query["continue"] = str(answer["metadata"].get("continue") or "")
            except (KeyError, TypeError, AttributeError) as error:
                raise ProviderFailed(f"{self.path} answers no list: {error!r}") from error
            if not query["continue"]:
                break
        self._version = version
        for uid in [uid for uid in self._objects if uid not in listed]:
            self._set(uid, None)
        for uid, value in listed.items():
            self._set(uid, value)

    async def follow(self) -> None:
        """Report every change from the list on, for ever."""
        while True:
            try:
                if not self._version:
                    await self.list()
                await self._watch()
                self._heard()
            except ServerAway as error:
                if not self._away:
                    log.warning("%s; retrying", error)
                self._away = True
            except ProviderFailed as error:
                # After `_GONE` the changes since the version that was seen last are forgotten.
                if not (isinstance(error, ServerRefused) and error.status == _GONE):
                    log.error("%s: %s", self.path, error)
                self._version = ""
            await asyncio.sleep(self._pause_s)
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    async def _watch(self) -> None:
        """One watch, until the API server ends it."""
        query = {
            **self._query,
            "watch": "1",
            "resourceVersion": self._version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(_WATCH_S),
        }
        lines = self.client.lines(self.path, query, _QUIET_S)
        async with contextlib.aclosing(lines) as events:
            async for event in events:
                if event.strip():
                    self._take(self.client.object_of(event))

    def _take(self, event: Json) -> None:
        try:
            kind, raw = event["type"], event["object"]
            if kind == "ERROR":
                why = f"its watch failed: {raw.get('message')}"
                raise ServerRefused(raw.get("code"), why, _REFUSES)
            version = str(raw["metadata"]["resourceVersion"])
            uid = "" if kind == "BOOKMARK" else _uid(raw)
            value = self.read(raw) if uid and kind != "DELETED" else None
        except (KeyError, TypeError, AttributeError) as error:
            raise ProviderFailed(f"its watch sends no event: {error!r}") from error
        self._heard()
        if uid:
            self._set(uid, value)
        self._version = version

    def _heard(self) -> None:
        """The watch works: the next interruption is told, and waited for, as the first one."""
        if self._away:
            log.info("%s answers again", self.path)
        self._pause_s, self._away = _FIRST_PAUSE_S, False

    def _set(self, uid: str, value: T | None) -> None:
        before = self._objects.pop(uid, None)
        if value is not None:
            self._objects[uid] = value
        if before != value:
            self.changed(before, value)


def _uid(raw: Json) -> str:
    return str(raw["metadata"]["uid"])
