"""Knows all objects of one kind, and hears of each change: a list, then a watch from there on."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Generic, TypeVar

from gateway_ext.errors import ProviderFailed
from gateway_ext.providers.kubernetes.client import (
    ClusterAway,
    ClusterClient,
    ClusterRefused,
    Json,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

_GONE = 410
_WATCH_S = 240  # after this time the API server ends a watch, and a new one goes on from there
_QUIET_S = 90.0  # the API server sends a bookmark each minute: silence is a broken connection
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_PAGE = "500"  # objects of one answer


class ObjectWatch(Generic[T]):
    """All objects at `path` with the labels of `selector`, as `read` understands them, by uid.

    `changed` is called with what an object was and is, None standing for absence. What `read`
    answers None to is passed over.
    """

    def __init__(
        self,
        client: ClusterClient,
        path: str,
        selector: str,
        read: Callable[[Json], T | None],
        changed: Callable[[T | None, T | None], None],
    ) -> None:
        self._client = client
        self._path = path
        self._query = {"labelSelector": selector} if selector else {}
        self._read = read
        self._changed = changed
        self._objects: dict[str, T] = {}
        self._version = ""
        self._pause_s, self._away = _FIRST_PAUSE_S, False

    async def list(self) -> None:
        """Ask for all objects; what was not heard of is reported as changes."""
        listed: dict[str, T | None] = {}
        query = {**self._query, "limit": _PAGE}
        while True:
            answer = await self._client.get(self._path, query)
            try:
                listed |= {_uid(raw): self._read(raw) for raw in answer["items"] or []}
                version = str(answer["metadata"]["resourceVersion"])
                query["continue"] = str(answer["metadata"].get("continue") or "")
            except (KeyError, TypeError, AttributeError) as error:
                raise ProviderFailed(f"{self._path} answers no list: {error!r}") from error
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
            except ClusterAway as error:
                if not self._away:
                    log.warning("%s; retrying", error)
                self._away = True
            except ProviderFailed as error:
                # After `_GONE` the changes since the version that was seen last are forgotten.
                if not (isinstance(error, ClusterRefused) and error.status == _GONE):
                    log.error("%s: %s", self._path, error)
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
        events = self._client.events(self._path, query, _QUIET_S)
        async with contextlib.aclosing(events) as stream:
            async for event in stream:
                self._take(event)

    def _take(self, event: Json) -> None:
        try:
            kind, raw = event["type"], event["object"]
            if kind == "ERROR":
                raise ClusterRefused(raw.get("code"), "", f"its watch failed: {raw.get('message')}")
            version = str(raw["metadata"]["resourceVersion"])
            uid = "" if kind == "BOOKMARK" else _uid(raw)
            value = self._read(raw) if uid and kind != "DELETED" else None
        except (KeyError, TypeError, AttributeError) as error:
            raise ProviderFailed(f"its watch sends no event: {error!r}") from error
        self._heard()
        if uid:
            self._set(uid, value)
        self._version = version

    def _heard(self) -> None:
        """The watch works: the next interruption is told, and waited for, as the first one."""
        if self._away:
            log.info("%s answers again", self._path)
        self._pause_s, self._away = _FIRST_PAUSE_S, False

    def _set(self, uid: str, value: T | None) -> None:
        before = self._objects.pop(uid, None)
        if value is not None:
            self._objects[uid] = value
        if before != value:
            self._changed(before, value)


def _uid(raw: Json) -> str:
    return str(raw["metadata"]["uid"])
