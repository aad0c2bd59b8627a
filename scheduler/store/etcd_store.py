"""The datastore etcd, reached through aetcd's calls."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from contextlib import aclosing, suppress
from logging import Logger
from typing import Any, Self

import grpc  # type: ignore[import-untyped]  # ships no types
from aetcd import rpc  # type: ignore[import-untyped]  # ships no types

from common.time_limits import time_limit
from scheduler.model.errors import DatastoreError, Fenced, LeaseGone, StoreUnavailable
from scheduler.store.datastore import MAX_CHANGES, Fence, KeyChanges, Listing, StoreLease
from scheduler.store.etcd_channel import (
    CALL_S,
    EtcdChannel,
    EtcdSettings,
    EtcdStubs,
    PassExpired,
    explained,
)

HEARTBEAT = "heartbeat"
_BEAT_EVERY_S = 1.0
_TRY_AGAIN_S = 0.25
# So many keys are listed at once, first and at most, and about so many bytes: each answer comes
# within the time limit of a call.
_LISTED_FIRST, _LISTED_AT_ONCE = 16, 1000
_LISTED_BYTES = 1 << 20

# Some client writes a heartbeat every second: a stream that brings none for this long is dead.
SILENCE_S = 4.0

_WATCHED, _BEATS = 1, 2  # the ids of the two watches on one stream


class Compacted(DatastoreError):
    """The changes from that revision on are no longer available."""


class EtcdStore:
    """Keys under the settings' prefix; `async with` runs a heartbeat, which watches need.

    The heartbeat, one write a second, determines `healthy`: an etcd that is gone is noticed within
    a second, one that is frozen or cut off within `_BEAT_EVERY_S + CALL_S`, 3 s.
    """

    def __init__(self, settings: EtcdSettings, log: Logger) -> None:
        self._root = settings.prefix
        self._log = log
        self._channel = EtcdChannel(settings, log)
        self._healthy = True
        self._health_changed: list[Callable[[bool], None]] = []
        self._beating: asyncio.Task[None] | None = None
        self._closed = False

    async def __aenter__(self) -> Self:
        self._beating = asyncio.create_task(self._beat())
        return self

    async def __aexit__(self, *failure: object) -> None:
        await self.close()

    @property
    def healthy(self) -> bool:
        return self._healthy

    def on_health_change(self, callback: Callable[[bool], None]) -> Callable[[], None]:
        self._health_changed.append(callback)
        return lambda: self._health_changed.remove(callback)

    # -- reading --------------------------------------------------------------------------------

    async def get(self, key: str) -> bytes | None:
        answer = await self._kv("Range", rpc.RangeRequest(key=self._key(key)))
        return bytes(answer.kvs[0].value) if answer.kvs else None

    async def list(self, prefix: str) -> Listing:
        begin = self._key(prefix)
        end, revision, values = prefix_end(begin), 0, dict[str, bytes]()
        limit = _LISTED_FIRST
        while True:
            request = rpc.RangeRequest(key=begin, range_end=end, limit=limit, revision=revision)
            answer = await self._kv("Range", request)
            values.update((self._name(entry), bytes(entry.value)) for entry in answer.kvs)
            revision = revision or int(answer.header.revision)
            if not answer.more:
                return Listing(revision, values)
            begin = answer.kvs[-1].key + b"\0"
            mean_bytes = sum(len(entry.value) for entry in answer.kvs) // len(answer.kvs)
            limit = max(1, min(_LISTED_AT_ONCE, _LISTED_BYTES // max(1, mean_bytes)))

    async def watch(self, prefix: str) -> AsyncGenerator[KeyChanges, None]:
        assert self._beating is not None, "a watch needs the heartbeat: `async with store`"
        wanted: int | None = None
        while not self._closed:
            try:
                if wanted is None:
                    listing = await self.list(prefix)
                    wanted = listing.revision + 1
                    yield KeyChanges(listing.revision, listing.values, complete=True)
                calls = self._channel.calls
                await self._channel.enter(calls)
                async with aclosing(self._changes(calls, prefix, wanted)) as watched:
                    async for changes in watched:
                        wanted = changes.revision + 1
                        yield changes
            except Compacted as error:
                self._log.info("the watch of %s starts again: %s", prefix, error)
                wanted = None
            except StoreUnavailable as error:
                self._log.debug("the watch of %s broke: %s", prefix, error)
                await asyncio.sleep(_TRY_AGAIN_S)

    async def _changes(
        self, calls: EtcdStubs, prefix: str, from_revision: int
    ) -> AsyncGenerator[KeyChanges, None]:
        """Changes until the stream breaks (StoreUnavailable or Compacted).

        The stream also watches the heartbeats: that of a stopped etcd stays open without messages,
        and only a missing heartbeat shows that it is not just idle.
        """
        # With `hasleader` a member that lost its cluster ends the stream instead of keeping it.
        metadata = (*calls.metadata, ("hasleader", "true"))
        stream = calls.watch.Watch(metadata=metadata)
        begin = self._key(prefix)
        try:
            with explained(calls):
                await _ask(
                    stream,
                    _create(_WATCHED, begin, prefix_end(begin), from_revision),
                    _create(_BEATS, self._key(HEARTBEAT), b"", 0),
                )
            while True:
                with explained(calls):
                    answer = await _next(stream)
                for changes in self._read(answer, from_revision):
                    yield changes
        finally:
            stream.cancel()

    def _read(self, answer: Any, from_revision: int) -> Iterator[KeyChanges]:
        if answer is grpc.aio.EOF:
            raise StoreUnavailable("the watch was ended")
        if answer.created and answer.header.revision < from_revision - 1:
            # The datastore was replaced by an empty one: no change would come up to this revision.
            raise Compacted(f"only at revision {answer.header.revision}, not {from_revision - 1}")
        if answer.compact_revision:
            raise Compacted(f"compacted up to revision {answer.compact_revision}")
        if answer.canceled:
            raise StoreUnavailable(answer.cancel_reason or "the watch was cancelled")
        if answer.watch_id != _WATCHED:
            return
        # An answer may hold several revisions, in order and each complete. Its header's revision is
        # the datastore's, and more changes up to that revision may follow.
        by_revision: dict[int, dict[str, bytes | None]] = {}
        for event in answer.events:
            by_revision.setdefault(event.kv.mod_revision, {})[self._name(event.kv)] = _value(event)
        for revision, values in by_revision.items():
            yield KeyChanges(revision, values)

    # -- writing --------------------------------------------------------------------------------

    async def put(self, key: str, value: bytes, lease: StoreLease | None = None) -> int:
        answer = await self._kv("Put", self._put(key, value, lease), lease)
        return int(answer.header.revision)

    async def create(self, key: str, value: bytes, lease: StoreLease | None = None) -> int | None:
        put = rpc.RequestOp(request_put=self._put(key, value, lease))
        request = rpc.TxnRequest(compare=[self._created(key, 0)], success=[put])
        answer = await self._kv("Txn", request, lease)
        return int(answer.header.revision) if answer.succeeded else None

    async def delete(self, key: str, value: bytes | None = None) -> None:
        compare = [] if value is None else [self._has(key, value)]
        request = rpc.TxnRequest(compare=compare, success=[self._deletion(key)])
        await self._kv("Txn", request)

    async def write(
        self,
        puts: Mapping[str, bytes],
        deletes: Iterable[str] = (),
        fence: Fence | None = None,
        lease: StoreLease | None = None,
    ) -> None:
        steps = [
            rpc.RequestOp(request_put=self._put(key, value, lease)) for key, value in puts.items()
        ]
        deleted = tuple(deletes)
        assert len(puts) + len(deleted) <= MAX_CHANGES, "too many keys for one write"
        assert not puts.keys() & set(deleted), "a key is written and deleted at once"
        steps += [self._deletion(key) for key in deleted]
        compare = [] if fence is None else [self._created(fence.key, fence.revision)]
        answer = await self._kv("Txn", rpc.TxnRequest(compare=compare, success=steps), lease)
        if fence is not None and not answer.succeeded:
            raise Fenced(fence.key, fence.revision)

    # -- leases ---------------------------------------------------------------------------------

    async def grant(self, ttl_s: int) -> StoreLease:
        """See Store; etcd raises anything shorter to 2 s."""
        answer = await self._channel.call("lease", "LeaseGrant", rpc.LeaseGrantRequest(TTL=ttl_s))
        return StoreLease(int(answer.ID))

    async def refresh(self, lease: StoreLease) -> bool:
        try:
            return await self._refresh(lease)
        except PassExpired:
            return await self._refresh(lease)

    async def _refresh(self, lease: StoreLease) -> bool:
        calls = self._channel.calls
        await self._channel.enter(calls)
        stream = calls.lease.LeaseKeepAlive(metadata=calls.metadata)
        try:
            with explained(calls):
                async with time_limit(CALL_S):
                    await stream.write(rpc.LeaseKeepAliveRequest(ID=lease))
                    answer = await stream.read()
        except TimeoutError:
            raise StoreUnavailable("no answer to the refresh of a lease") from None
        finally:
            stream.cancel()
        if not hasattr(answer, "TTL"):
            raise StoreUnavailable("the stream was ended")
        return bool(answer.TTL > 0)  # for an expired lease etcd answers 0, not an error

    async def revoke(self, lease: StoreLease) -> None:
        request = rpc.LeaseRevokeRequest(ID=lease)
        with suppress(LeaseGone):
            await self._channel.call("lease", "LeaseRevoke", request)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._beating is not None:
            self._beating.cancel()
            await asyncio.gather(self._beating, return_exceptions=True)
        await self._channel.close()

    # -- health ---------------------------------------------------------------------------------

    async def _beat(self) -> None:
        """Write the heartbeat that every watch expects; reconnect if that fails."""
        while True:
            try:
                await self.put(HEARTBEAT, b"")
            except DatastoreError as error:
                self._is_healthy(healthy=False, why=str(error))
                self._channel.reopen()
            else:
                self._is_healthy(healthy=True, why="")
            await asyncio.sleep(_BEAT_EVERY_S)

    def _is_healthy(self, *, healthy: bool, why: str) -> None:
        if healthy == self._healthy:
            return
        self._healthy = healthy
        if healthy:
            self._log.warning("etcd is back")
        else:
            self._log.warning("etcd is away: %s", why)
        for callback in list(self._health_changed):
            callback(healthy)

    # -- parts ----------------------------------------------------------------------------------

    async def _kv(self, method: str, request: Any, lease: StoreLease | None = None) -> Any:
        if self._closed:
            raise DatastoreError("the store is closed")
        try:
            return await self._channel.call("kv", method, request)
        except LeaseGone as error:
            raise LeaseGone(lease or 0) from error  # etcd's error does not name the lease

    def _key(self, name: str) -> bytes:
        return (self._root + name).encode()

    def _name(self, entry: Any) -> str:
        key: str = entry.key.decode()
        return key.removeprefix(self._root)

    def _put(self, key: str, value: bytes, lease: StoreLease | None) -> Any:
        return rpc.PutRequest(key=self._key(key), value=value, lease=lease or 0)

    def _deletion(self, key: str) -> Any:
        return rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=self._key(key)))

    def _has(self, key: str, value: bytes) -> Any:
        target = rpc.Compare.VALUE
        return rpc.Compare(result=rpc.Compare.EQUAL, target=target, key=self._key(key), value=value)

    def _created(self, key: str, revision: int) -> Any:
        """The condition that the key was created at this revision; 0: that there is no such key."""
        return rpc.Compare(
            result=rpc.Compare.EQUAL,
            target=rpc.Compare.CREATE,
            key=self._key(key),
            create_revision=revision,
        )


async def _ask(stream: Any, *requests: Any) -> None:
    try:
        async with time_limit(CALL_S):
            for request in requests:
                await stream.write(request)
    except TimeoutError:
        raise StoreUnavailable("etcd did not confirm the watch") from None


async def _next(stream: Any) -> Any:
    try:
        async with time_limit(SILENCE_S):
            return await stream.read()
    except TimeoutError:
        raise StoreUnavailable("the watch is silent") from None


def prefix_end(prefix: bytes) -> bytes:
    """The first key after all that begin with the prefix."""
    cut = prefix.rstrip(b"\xff")
    return cut[:-1] + bytes([cut[-1] + 1]) if cut else b"\0"


def _value(event: Any) -> bytes | None:
    value: bytes = event.kv.value
    return None if event.type == rpc.Event.DELETE else value


def _create(name: int, begin: bytes, end: bytes, from_revision: int) -> Any:
    wanted = rpc.WatchCreateRequest(
        key=begin, range_end=end, start_revision=from_revision, watch_id=name
    )
    return rpc.WatchRequest(create_request=wanted)
