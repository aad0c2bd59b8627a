"""An etcd of a simulation: linearizable, and as far away, slow, full, empty or dead as it is made.

Each scheduler has an `EtcdClient`, a `Store` whose every request crosses the simulated network.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping
from contextlib import aclosing
from contextvars import copy_context
from typing import Any, TypeVar

from scheduler.model.errors import DatastoreError, StoreUnavailable
from scheduler.store.datastore import Fence, KeyChanges, Listing, StoreLease
from scheduler.store.memory_store import MemoryStore
from tests.kit.simulation.simulated_network import Network

_Answer = TypeVar("_Answer")

# Those of the client of the real one.
_CALL_S = 2.0
_BEAT_EVERY_S = 1.0
_TRY_AGAIN_S = 0.5
_SILENT_WATCH_S = 3.0
_LOOK_S = 0.05


class SimulatedEtcd:
    """The server on its host; it keeps what it has while it is down, and loses it by a wipe."""

    def __init__(self, network: Network, host: str) -> None:
        self.network = network
        self.host = host
        self.up = True
        self.frozen = False
        self.grants = 0  # so far
        self.full = False  # its disk: reads and refreshes are answered, writes are not
        self._context = copy_context()
        self.store = MemoryStore()

    @property
    def answers(self) -> bool:
        return self.up and not self.frozen

    async def wipe(self) -> None:
        """Begin with nothing, as a new cluster: revisions begin again, ids of leases do not."""
        before, self.store = self.store, MemoryStore()
        await before.close()
        for _ in range(self.grants):
            self.do(self.store.grant(1))

    def do(self, work: Coroutine[Any, Any, _Answer]) -> _Answer:
        """Carry out one request now; timers of leases are the server's, whoever asked."""
        return self._context.run(_completed, work)


class EtcdClient:
    """One scheduler's connection; see `Store`. Use it as a context."""

    def __init__(self, etcd: SimulatedEtcd, host: str) -> None:
        self._etcd = etcd
        self._host = host
        self._healthy = True
        self._callbacks: list[Callable[[bool], None]] = []
        self._closed = False
        self._beating: asyncio.Task[None] | None = None

    @property
    def healthy(self) -> bool:
        return self._healthy

    def on_health_change(self, callback: Callable[[bool], None]) -> Callable[[], None]:
        self._callbacks.append(callback)
        return lambda: self._callbacks.remove(callback)

    async def __aenter__(self) -> "EtcdClient":
        self._beating = asyncio.get_running_loop().create_task(self._beat())
        return self

    async def __aexit__(self, *failure: object) -> None:
        await self.close()

    async def get(self, key: str) -> bytes | None:
        return await self._ask(lambda: self._etcd.store.get(key))

    async def list(self, prefix: str) -> Listing:
        return await self._ask(lambda: self._etcd.store.list(prefix))

    async def put(self, key: str, value: bytes, lease: StoreLease | None = None) -> int:
        return await self._ask(lambda: self._etcd.store.put(key, value, lease), writes=True)

    async def create(self, key: str, value: bytes, lease: StoreLease | None = None) -> int | None:
        return await self._ask(lambda: self._etcd.store.create(key, value, lease), writes=True)

    async def delete(self, key: str, value: bytes | None = None) -> None:
        await self._ask(lambda: self._etcd.store.delete(key, value), writes=True)

    async def write(
        self,
        puts: Mapping[str, bytes],
        deletes: Iterable[str] = (),
        fence: Fence | None = None,
        lease: StoreLease | None = None,
    ) -> None:
        gone, puts = tuple(deletes), dict(puts)
        await self._ask(lambda: self._etcd.store.write(puts, gone, fence, lease), writes=True)

    async def grant(self, ttl_s: int) -> StoreLease:
        def granted() -> Coroutine[Any, Any, StoreLease]:
            self._etcd.grants += 1
            return self._etcd.store.grant(ttl_s)

        return await self._ask(granted, writes=True)

    async def refresh(self, lease: StoreLease) -> bool:
        return await self._ask(lambda: self._etcd.store.refresh(lease))

    async def revoke(self, lease: StoreLease) -> None:
        await self._ask(lambda: self._etcd.store.revoke(lease), writes=True)

    async def watch(self, prefix: str) -> AsyncGenerator[KeyChanges, None]:
        """See Store: all keys again after an outage and after a wipe."""
        while not self._closed:
            store = self._etcd.store
            if not await self._reached():
                await asyncio.sleep(_TRY_AGAIN_S)
                continue
            async with aclosing(store.watch(prefix)) as found:
                async for changes in found:
                    if not await self._reached():
                        break
                    yield changes
            if self._etcd.store is not store:
                await asyncio.sleep(_TRY_AGAIN_S)

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            if self._beating is not None:
                self._beating.cancel()
                await asyncio.gather(self._beating, return_exceptions=True)

    # -- parts --------------------------------------------------------------------------------

    async def _ask(
        self, work: Callable[[], Coroutine[Any, Any, _Answer]], *, writes: bool = False
    ) -> _Answer:
        """One request and its answer; where the time-out strikes, it may have been carried out."""
        if self._closed:
            raise DatastoreError("the store is closed")
        loop, etcd = asyncio.get_running_loop(), self._etcd
        answer: asyncio.Future[_Answer] = loop.create_future()
        patience = loop.call_later(_CALL_S, _give_up, answer)
        delay_s = etcd.network.delay_s(self._host, etcd.host)
        loop.call_later(delay_s, self._arrive, work, writes, answer)
        try:
            return await answer
        finally:
            patience.cancel()

    def _arrive(
        self,
        work: Callable[[], Coroutine[Any, Any, _Answer]],
        writes: bool,  # noqa: FBT001 - of a callback
        answer: asyncio.Future[_Answer],
    ) -> None:
        """The request is at the server, or where it waits for a way to it."""
        loop, etcd = asyncio.get_running_loop(), self._etcd
        if answer.done():
            return
        carries = etcd.network.carries(self._host, etcd.host)
        if not carries or (etcd.up and etcd.frozen):
            loop.call_later(_LOOK_S, self._arrive, work, writes, answer)
        elif not etcd.up:
            answer.set_exception(StoreUnavailable("the connection was refused"))
        elif writes and etcd.full:
            answer.set_exception(StoreUnavailable("mvcc: database space exceeded"))
        else:
            done: asyncio.Future[_Answer] = loop.create_future()
            try:
                done.set_result(etcd.do(work()))
            except DatastoreError as error:
                done.set_exception(error)
                done.exception()  # who asked may be killed before the answer is back
            delay_s = etcd.network.delay_s(etcd.host, self._host)
            loop.call_later(delay_s, self._return, done, answer)

    def _return(self, done: asyncio.Future[_Answer], answer: asyncio.Future[_Answer]) -> None:
        """The answer is back, or waits for a way."""
        error = done.exception()
        if answer.done():
            return
        if not self._etcd.network.carries(self._etcd.host, self._host):
            asyncio.get_running_loop().call_later(_LOOK_S, self._return, done, answer)
        elif error is None:
            answer.set_result(done.result())
        else:
            answer.set_exception(error)

    async def _reached(self) -> bool:
        """Whether the server's next word comes before a silent watch is given up."""
        etcd, loop = self._etcd, asyncio.get_running_loop()
        until_s = loop.time() + _SILENT_WATCH_S
        await asyncio.sleep(etcd.network.delay_s(etcd.host, self._host))
        while not (etcd.answers and etcd.network.carries(etcd.host, self._host)):
            if not etcd.up or loop.time() > until_s:
                return False
            await asyncio.sleep(_LOOK_S)
        return True

    async def _beat(self) -> None:
        while True:
            try:
                await self.put("heartbeat", b"")
            except DatastoreError:
                self._note_health(healthy=False)
            else:
                self._note_health(healthy=True)
            await asyncio.sleep(_BEAT_EVERY_S)

    def _note_health(self, *, healthy: bool) -> None:
        if healthy != self._healthy:
            self._healthy = healthy
            for callback in list(self._callbacks):
                callback(healthy)


def _give_up(answer: asyncio.Future[_Answer]) -> None:
    if not answer.done():
        answer.set_exception(StoreUnavailable(f"no answer within {_CALL_S:g} s"))


def _completed(work: Coroutine[Any, Any, _Answer]) -> _Answer:
    """The result of a coroutine that waits for nothing."""
    try:
        work.send(None)
    except StopIteration as ended:
        answer: _Answer = ended.value
        return answer
    raise AssertionError("the store in memory waits for nothing")
