"""The datastore in this process's memory: for one machine without etcd, and for tests."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from dataclasses import dataclass, field

from scheduler.model.errors import DatastoreError, Fenced, LeaseGone
from scheduler.store.datastore import MAX_CHANGES, Fence, KeyChanges, Listing, StoreLease


@dataclass(frozen=True, slots=True)
class _StoredValue:
    value: bytes
    created: int
    lease: StoreLease | None


@dataclass(slots=True)
class _GrantedLease:
    ttl_s: int
    expiry: asyncio.TimerHandle
    keys: set[str] = field(default_factory=set)


class MemoryStore:
    """Forgets everything with its process; always healthy."""

    def __init__(self) -> None:
        self._revision = 0
        self._entries: dict[str, _StoredValue] = {}
        self._leases: dict[StoreLease, _GrantedLease] = {}
        self._latest_lease = 0
        # By watch what it has not yielded yet; None ends it.
        self._watches: list[asyncio.Queue[KeyChanges | None]] = []
        self._closed = False

    @property
    def healthy(self) -> bool:
        return True

    def on_health_change(self, callback: Callable[[bool], None]) -> Callable[[], None]:
        """Never calls back: this store's health never changes."""
        del callback
        return lambda: None

    # -- reading --------------------------------------------------------------------------------

    async def get(self, key: str) -> bytes | None:
        self._check()
        entry = self._entries.get(key)
        return None if entry is None else entry.value

    async def list(self, prefix: str) -> Listing:
        self._check()
        return self._listing(prefix)

    async def watch(self, prefix: str) -> AsyncGenerator[KeyChanges, None]:
        if self._closed:
            return
        written: asyncio.Queue[KeyChanges | None] = asyncio.Queue()
        self._watches.append(written)
        try:
            yield KeyChanges(*self._listing(prefix), complete=True)
            while (changes := await written.get()) is not None:
                values = {k: value for k, value in changes.values.items() if k.startswith(prefix)}
                if values:
                    yield KeyChanges(changes.revision, values)
        finally:
            self._watches.remove(written)

    # -- writing --------------------------------------------------------------------------------

    async def put(self, key: str, value: bytes, lease: StoreLease | None = None) -> int:
        self._check()
        self._apply({key: value}, (), lease)
        return self._revision

    async def create(self, key: str, value: bytes, lease: StoreLease | None = None) -> int | None:
        self._check()
        if key in self._entries:
            return None
        self._apply({key: value}, (), lease)
        return self._revision

    async def delete(self, key: str, value: bytes | None = None) -> None:
        self._check()
        entry = self._entries.get(key)
        if value is None or (entry is not None and entry.value == value):
            self._apply({}, (key,))

    async def write(
        self,
        puts: Mapping[str, bytes],
        deletes: Iterable[str] = (),
        fence: Fence | None = None,
        lease: StoreLease | None = None,
    ) -> None:
        self._check()
        deleted = tuple(deletes)
        assert len(puts) + len(deleted) <= MAX_CHANGES, "too many keys for one write"
        assert not puts.keys() & set(deleted), "a key is written and deleted at once"
        if fence is not None:
            entry = self._entries.get(fence.key)
            if entry is None or entry.created != fence.revision:
                raise Fenced(fence.key, fence.revision)
        self._apply(puts, deleted, lease)

    # -- leases ---------------------------------------------------------------------------------

    async def grant(self, ttl_s: int) -> StoreLease:
        self._check()
        self._latest_lease += 1
        lease = StoreLease(self._latest_lease)
        self._leases[lease] = _GrantedLease(ttl_s, self._expire_later(lease, ttl_s))
        return lease

    async def refresh(self, lease: StoreLease) -> bool:
        self._check()
        granted = self._leases.get(lease)
        if granted is None:
            return False
        granted.expiry.cancel()
        granted.expiry = self._expire_later(lease, granted.ttl_s)
        return True

    async def revoke(self, lease: StoreLease) -> None:
        self._check()
        self._end_lease(lease)

    async def close(self) -> None:
        self._closed = True
        for lease in self._leases.values():
            lease.expiry.cancel()
        self._tell(None)

    # -- parts ----------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._closed:
            raise DatastoreError("the store is closed")

    def _listing(self, prefix: str) -> Listing:
        values = {key: e.value for key, e in self._entries.items() if key.startswith(prefix)}
        return Listing(self._revision, dict(sorted(values.items())))

    def _apply(
        self, puts: Mapping[str, bytes], deletes: Iterable[str], lease: StoreLease | None = None
    ) -> None:
        if lease is not None and lease not in self._leases:
            raise LeaseGone(lease)
        gone = [key for key in deletes if key in self._entries]
        if not puts and not gone:
            return
        self._revision += 1
        changes: dict[str, bytes | None] = dict.fromkeys(gone)
        changes.update(puts)
        for key in changes:  # what is written again or deleted leaves its old lease
            before = self._entries.get(key)
            if before is not None and before.lease is not None:
                self._leases[before.lease].keys.discard(key)
        for key in gone:
            del self._entries[key]
        for key, value in puts.items():
            before = self._entries.get(key)
            created = self._revision if before is None else before.created
            self._entries[key] = _StoredValue(value, created, lease)
            if lease is not None:
                self._leases[lease].keys.add(key)
        self._tell(KeyChanges(self._revision, changes))

    def _expire_later(self, lease: StoreLease, ttl_s: int) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(ttl_s, self._end_lease, lease)

    def _end_lease(self, lease: StoreLease) -> None:
        granted = self._leases.get(lease)
        if granted is None:
            return
        granted.expiry.cancel()
        self._apply({}, sorted(granted.keys))
        del self._leases[lease]

    def _tell(self, changes: KeyChanges | None) -> None:
        for watch in self._watches:
            watch.put_nowait(changes)
