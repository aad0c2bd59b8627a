"""One stream of etcd that watches a prefix, and notices when the stream is dead."""

from collections.abc import AsyncGenerator
from typing import Any

import grpc  # type: ignore[import-untyped]  # ships no types
from aetcd import rpc  # type: ignore[import-untyped]  # ships no types

from common.time_limits import time_limit
from scheduler.model.errors import DatastoreError, StoreUnavailable
from scheduler.store.datastore import KeyChanges
from scheduler.store.etcd_channel import CALL_S, EtcdStubs, explained

# Some client writes a heartbeat every second: a stream that brings none for this long is dead.
SILENCE_S = 4.0

_WATCHED, _BEATS = 1, 2  # the ids of the two watches on one stream


class Compacted(DatastoreError):
    """The changes from that revision on are no longer available."""


class EtcdWatch:
    """Changes under one prefix from a revision on, on one stream.

    The stream also watches the key to which heartbeats are written: the stream of a stopped etcd
    stays open without messages, and only a missing heartbeat shows that it is not just idle.
    """

    def __init__(self, calls: EtcdStubs, root: str, heartbeat: str) -> None:
        self._calls = calls
        self._root = root
        self._heartbeat = (root + heartbeat).encode()

    async def changes(self, prefix: str, from_revision: int) -> AsyncGenerator[KeyChanges, None]:
        """Yield changes until the stream breaks (StoreUnavailable or Compacted)."""
        # With `hasleader` a member that lost its cluster ends the stream instead of keeping it.
        metadata = (*self._calls.metadata, ("hasleader", "true"))
        stream = self._calls.watch.Watch(metadata=metadata)
        try:
            with explained(self._calls):
                await self._begin(stream, prefix, from_revision)
            while True:
                with explained(self._calls):
                    answer = await _next(stream)
                for changes in self._read(answer, from_revision):
                    yield changes
        finally:
            stream.cancel()

    async def _begin(self, stream: Any, prefix: str, from_revision: int) -> None:
        begin = (self._root + prefix).encode()
        try:
            async with time_limit(CALL_S):
                await stream.write(_create(_WATCHED, begin, prefix_end(begin), from_revision))
                await stream.write(_create(_BEATS, self._heartbeat, b"", 0))
        except TimeoutError:
            raise StoreUnavailable("etcd did not confirm the watch") from None

    def _read(self, answer: Any, from_revision: int) -> list[KeyChanges]:
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
            return []
        # An answer may hold several revisions, in order and each complete. Its header's revision is
        # the datastore's, and more changes up to that revision may follow.
        found: dict[int, dict[str, bytes | None]] = {}
        for event in answer.events:
            found.setdefault(event.kv.mod_revision, {})[self._key(event.kv)] = _value(event)
        return [KeyChanges(revision, values) for revision, values in found.items()]

    def _key(self, entry: Any) -> str:
        key: str = entry.key.decode()
        return key.removeprefix(self._root)


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
