"""A core whose state a keeper writes to a datastore that can fail."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from scheduler.core.core import Core
from scheduler.model.errors import DatastoreError, StoreUnavailable
from scheduler.store.datastore import Fence, StoreLease
from scheduler.store.keeper import Keeper
from scheduler.store.memory_store import MemoryStore
from tests.kit.loop_clock import LoopClock

LOG = logging.getLogger("tests.keeper")
GONE = "gone"
_KEEP_S = 30.0 * 86_400


class FailingStore(MemoryStore):
    """Fails when it is set to; `writes` counts the requested writes.

    It refuses every write with a key of `refused`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.away = False
        self.writes = 0
        self.refused: set[str] = set()
        self.callbacks: list[Callable[[bool], None]] = []

    @property
    def healthy(self) -> bool:
        return not self.away

    def on_health_change(self, callback: Callable[[bool], None]) -> Callable[[], None]:
        self.callbacks.append(callback)
        return lambda: self.callbacks.remove(callback)

    def comes_back(self) -> None:
        self.away = False
        for callback in self.callbacks:
            callback(True)

    async def write(
        self,
        puts: Mapping[str, bytes],
        deletes: Iterable[str] = (),
        fence: Fence | None = None,
        lease: StoreLease | None = None,
    ) -> None:
        self.writes += 1
        if self.away:
            raise StoreUnavailable("it was set to fail")
        if not self.refused.isdisjoint(puts):
            raise DatastoreError("it was set to refuse")
        await super().write(puts, deletes, fence, lease)


class LaterClock(LoopClock):
    """The loop's time, plus an offset that a test sets."""

    ahead_s = 0.0

    def now_s(self) -> float:
        return super().now_s() + self.ahead_s


class Kept:
    """A keeper of a core, under the fence of a leader."""

    def __init__(self, core: Core, store: FailingStore, keep_s: float) -> None:
        self.core = core
        self.store = store
        self.fence: Fence | None = None
        self.fenced_off = 0
        self.clock = LaterClock(asyncio.get_running_loop())
        self.keeper = Keeper(core, self.clock, store, lambda: self.fence, self._fenced, LOG, keep_s)

    def _fenced(self) -> None:
        self.fenced_off += 1

    async def elect(self) -> None:
        await self.store.delete("leader")
        revision = await self.store.create("leader", b"")
        assert revision is not None
        self.fence = Fence("leader", revision)

    def send(self, event: Any) -> None:
        self.core.handle(event, asyncio.get_running_loop().time())
        self.keeper.touched()

    async def read(self, stored_key: str) -> Any:
        value = await self.store.get(stored_key)
        return GONE if value is None else json.loads(value)


@asynccontextmanager
async def kept(
    core: Core, store: FailingStore | None = None, keep_s: float = _KEEP_S
) -> AsyncIterator[Kept]:
    """A keeper at work."""
    made = Kept(core, store or FailingStore(), keep_s)
    await made.elect()
    async with made.keeper:
        yield made
