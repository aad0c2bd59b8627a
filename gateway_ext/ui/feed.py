"""Reads the cluster while browsers watch, and sends all of them the changes."""

import asyncio
import contextlib
import logging
import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from pydantic_core import to_json

from common.numerals import natural
from common.tasks import BackgroundTasks
from common.time_limits import time_limit
from gateway_ext.ui.cluster_source import PageSource
from gateway_ext.ui.state import PageState, Point, Series, by_kind, changes

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PagePace:
    """How often the feed looks while it is watched, and its share of a core at most."""

    every_s: float = 1.0
    most_share: float = 0.012
    most_watchers: int = 100


class _Message(NamedTuple):
    number: int
    text: bytes


class WatcherFeed:
    """One collector for all watchers; use it as a context.

    Without watchers it only adds points to the charts. The cost of a look determines the pause
    before the next one.
    """

    def __init__(
        self,
        source: PageSource,
        pace: PagePace | None = None,
        *,
        series: Series | None = None,
    ) -> None:
        self._source = source
        self._pace = pace or PagePace()
        self._series = series or Series()
        self._name = secrets.token_hex(4)
        self._number = 0
        self._sent: deque[_Message] = deque(maxlen=30)
        self._look = PageState({}, {})
        self._looked_s = -float("inf")
        self._pause_s = self._pace.every_s
        self._state: _Message | None = None
        self._looking = asyncio.Lock()
        self._published = asyncio.Event()
        self._wanted = asyncio.Event()
        self.closed = False
        self.watchers = 0
        self._tasks = BackgroundTasks(log, "the page's collector")

    async def __aenter__(self) -> Self:
        # Watchers must not wait for a collector that has ended.
        self._tasks.start(self._keep_looking()).add_done_callback(lambda _: self.close())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()
        await self._tasks.close()

    @property
    def full(self) -> bool:
        return self.watchers >= self._pace.most_watchers

    def close(self) -> None:
        self.closed = True
        self._publish()

    def soon(self) -> None:
        """Look again at once: an order was given."""
        self._pause_s = 0.0
        self._wanted.set()

    async def state(self) -> bytes:
        """The whole state as JSON, no older than a pause between two looks."""
        await self._fresh()
        return self._shown().text

    async def watch(self, last_id: str = "") -> AsyncGenerator[bytes, None]:
        """Events until the watcher leaves: the state, or the changes since `last_id`."""
        self.watchers += 1
        try:
            if self.watchers == 1:
                self._wanted.set()
            at = self._known(last_id)
            yield b"retry: 2000\n\n"
            while not self.closed:
                if at is None or not self._has_all_since(at):
                    await self._fresh()
                    shown = self._shown()
                    at = shown.number
                    yield self._event("state", at, shown.text)
                    continue  # a slow watcher may have missed further changes
                published = self._published
                for message in self._after(at):
                    at = message.number
                    yield message.text
                if published is self._published and not self.closed:
                    await published.wait()
        finally:
            self.watchers -= 1

    # -- looking ----------------------------------------------------------------------------------

    async def _keep_looking(self) -> None:
        while True:
            if self.watchers:
                await self._fresh()
            elif self._series.due(time.monotonic()):
                point = await self._source.point()
                self._series.add(point, time.monotonic())
                self._state = None
                self._number += 1
                self._sent.clear()  # returning watchers get all points again
            await self._rest()

    async def _rest(self) -> None:
        pause_s = self._pause_s if self.watchers else self._series.step_s
        with contextlib.suppress(TimeoutError):
            async with time_limit(pause_s):
                await self._wanted.wait()
        self._wanted.clear()

    async def _fresh(self) -> None:
        async with self._looking:
            if time.monotonic() < self._looked_s + self._pause_s * 0.9:
                return
            look = await self._source.look()
            points = await self._new_points()
            began_s = time.thread_time()
            self._publish_changes(changes(self._look, look), points, first=self._looked_s < 0)
            self._look = look
            self._looked_s = time.monotonic()
            spent_s = look.spent_s + time.thread_time() - began_s
            self._pause_s = max(self._pace.every_s, spent_s / self._pace.most_share)

    async def _new_points(self) -> list[Point]:
        if not self._series.due(time.monotonic()):
            return []
        return self._series.add(await self._source.point(), time.monotonic())

    def _publish_changes(
        self, changed: dict[str, Any], points: list[Point], *, first: bool
    ) -> None:
        """Publish the changes to every watcher; the first look is no change."""
        self._number += 1
        self._state = None
        if first:
            return
        kind = "change" if changed or points else "ping"
        history = {"history": {"added": by_kind(points)}} if points else {}
        text = _json({"now": time.time(), **changed, **history})
        self._sent.append(_Message(self._number, self._event(kind, self._number, text)))
        self._publish()

    def _publish(self) -> None:
        published, self._published = self._published, asyncio.Event()
        published.set()

    # -- messages ---------------------------------------------------------------------------------

    def _shown(self) -> _Message:
        """The whole state, rendered once for all watchers."""
        if self._state is None:
            look = self._look
            state: dict[str, Any] = {"now": time.time(), **look.whole}
            state.update((section, list(items.values())) for section, items in look.items.items())
            state["history"] = self._series.shown()
            self._state = _Message(self._number, _json(state))
        return self._state

    def _known(self, last_id: str) -> int | None:
        """The last message that a returning watcher has; None where another process sent it."""
        name, _, text = last_id.partition("-")
        number = natural(text)
        return None if name != self._name or number is None else min(number, self._number)

    def _has_all_since(self, number: int) -> bool:
        return number == self._number or bool(self._sent and self._sent[0].number <= number + 1)

    def _after(self, number: int) -> list[_Message]:
        return [message for message in self._sent if message.number > number]

    def _event(self, kind: str, number: int, text: bytes) -> bytes:
        head = f"id: {self._name}-{number}\nevent: {kind}\ndata: ".encode()
        return b"".join((head, text, b"\n\n"))


def _json(value: object) -> bytes:
    return to_json(value, inf_nan_mode="null")
