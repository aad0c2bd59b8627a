"""Looks at the cluster while somebody watches, and tells all watchers what has changed."""

import asyncio
import contextlib
import logging
import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple, Self

from pydantic_core import to_json

from gateway_ext.ui.changes import changes
from gateway_ext.ui.model import Changes, Look, Point
from gateway_ext.ui.series import Series, by_kind
from gateway_ext.ui.source import Source

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FeedPace:
    """How often it looks while it is watched, and the share of a core that it may take for it."""

    every_s: float = 1.0
    most_share: float = 0.012
    most_watchers: int = 100


class _Message(NamedTuple):
    number: int
    text: bytes


class Feed:
    """One collector for all who watch; use it as a context.

    While nobody watches it only adds to the charts. Its looks take turns: what one costs says how
    soon the next one may be.
    """

    def __init__(
        self,
        source: Source,
        pace: FeedPace | None = None,
        *,
        now_s: Callable[[], float] = time.time,
        series: Series | None = None,
    ) -> None:
        self._source = source
        self._pace = pace or FeedPace()
        self._now_s = now_s
        self._series = series or Series()
        self._name = secrets.token_hex(4)
        self._number = 0
        self._told: deque[_Message] = deque(maxlen=30)
        self._look = Look({}, {})
        self._looked_s = -float("inf")
        self._pause_s = self._pace.every_s
        self._state: _Message | None = None
        self._looking = asyncio.Lock()
        self._published = asyncio.Event()
        self._wanted = asyncio.Event()
        self._closed = False
        self._watchers = 0
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._keep_looking())
        self._task.add_done_callback(self._ended)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
        assert self._task is not None, "it was entered"
        self._task.cancel()
        await asyncio.wait({self._task})

    @property
    def watchers(self) -> int:
        """How many watch."""
        return self._watchers

    @property
    def full(self) -> bool:
        """Whether nobody else can watch."""
        return self._watchers >= self._pace.most_watchers

    @property
    def closed(self) -> bool:
        """Whether nobody is told anything any more."""
        return self._closed

    def close(self) -> None:
        """Whoever watches is told no more."""
        self._closed = True
        self._publish()

    def soon(self) -> None:
        """Something was ordered: look again at once, so that it is seen."""
        self._pause_s = 0.0
        self._wanted.set()

    async def state(self) -> bytes:
        """Everything, as JSON, no older than a look while it is watched."""
        await self._fresh()
        return self._shown().text

    async def watch(self, last_id: str = "") -> AsyncGenerator[bytes, None]:
        """Server-sent events until nobody looks any more: the state, or what `last_id` missed."""
        self._watchers += 1
        try:
            if self._watchers == 1:
                self._wanted.set()
            at = self._known(last_id)
            yield b"retry: 2000\n\n"
            while not self._closed:
                if at is None or not self._has_all_since(at):
                    await self._fresh()
                    shown = self._shown()
                    at = shown.number
                    yield self._event("state", at, shown.text)
                    continue  # whoever was slow to take it may have missed more
                published = self._published
                for message in self._after(at):
                    at = message.number
                    yield message.text
                if published is self._published and not self._closed:
                    await published.wait()
        finally:
            self._watchers -= 1

    # -- looking ----------------------------------------------------------------------------------

    async def _keep_looking(self) -> None:
        while True:
            if self._watchers:
                await self._fresh()
            elif self._series.due(time.monotonic()):
                point = await self._source.point()
                self._series.add(point, time.monotonic())
                self._state = None
                self._number += 1
                self._told.clear()  # it has no such points: who comes back gets all of them anew
            await self._rest()

    async def _rest(self) -> None:
        pause_s = self._pause_s if self._watchers else self._series.step_s
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._wanted.wait()
        self._wanted.clear()

    async def _fresh(self) -> None:
        """Look, unless somebody has just done so."""
        async with self._looking:
            if time.monotonic() < self._looked_s + self._pause_s * 0.9:
                return
            look = await self._source.look()
            points = await self._new_points()
            began_s = time.thread_time()
            self._tell(changes(self._look, look), points, first=self._looked_s < 0)
            self._look = look
            self._looked_s = time.monotonic()
            spent_s = look.spent_s + time.thread_time() - began_s
            self._pause_s = max(self._pace.every_s, spent_s / self._pace.most_share)

    async def _new_points(self) -> list[Point]:
        if not self._series.due(time.monotonic()):
            return []
        return self._series.add(await self._source.point(), time.monotonic())

    def _tell(self, found: Changes, points: list[Point], *, first: bool) -> None:
        """Put what changed where every watcher finds it; the first look changes everything."""
        self._number += 1
        self._state = None
        if first:
            return
        if found or points:
            text = _json(_change(found, points, self._now_s()))
            kind = "change"
        else:
            text, kind = _json({"now": self._now_s()}), "ping"
        self._told.append(_Message(self._number, self._event(kind, self._number, text)))
        self._publish()

    def _publish(self) -> None:
        published, self._published = self._published, asyncio.Event()
        published.set()

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Whoever watches must not wait for a collector that is no more."""
        self.close()
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("the page's collector failed", exc_info=error)

    # -- what watchers are sent -------------------------------------------------------------------

    def _shown(self) -> _Message:
        """The whole state, made once for all who want the same."""
        if self._state is None:
            look = self._look
            state: dict[str, Any] = {"now": self._now_s(), **look.whole}
            state.update((section, list(items.values())) for section, items in look.items.items())
            state["history"] = self._series.shown()
            self._state = _Message(self._number, _json(state))
        return self._state

    def _known(self, last_id: str) -> int | None:
        """How far a watcher that comes back has got; None where that was another life of ours."""
        name, _, number = last_id.partition("-")
        if name != self._name or not (number.isascii() and number.isdecimal()):
            return None
        return min(int(number[:18]), self._number)

    def _has_all_since(self, number: int) -> bool:
        return number == self._number or bool(self._told and self._told[0].number <= number + 1)

    def _after(self, number: int) -> list[_Message]:
        return [message for message in self._told if message.number > number]

    def _event(self, kind: str, number: int, text: bytes) -> bytes:
        head = f"id: {self._name}-{number}\nevent: {kind}\ndata: ".encode()
        return b"".join((head, text, b"\n\n"))


def _change(found: Changes, points: list[Point], now_s: float) -> dict[str, Any]:
    told: dict[str, Any] = {"now": now_s, **found.whole}
    for section in {**found.replaced, **found.removed}:
        told[section] = {
            "replaced": found.replaced.get(section, []),
            "removed": found.removed.get(section, []),
        }
    if points:
        told["history"] = {"added": by_kind(points)}
    return told


def _json(value: object) -> bytes:
    return to_json(value, inf_nan_mode="null")
