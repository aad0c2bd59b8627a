"""The port to the datastore, implemented by etcd and by this process's memory."""

from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from typing import NamedTuple, NewType, Protocol

# A lease of the datastore: its keys vanish when its holder does not refresh it.
StoreLease = NewType("StoreLease", int)


class Fence(NamedTuple):
    """Write only while this key exists and is still the one that was made at this revision."""

    key: str
    revision: int


class Listing(NamedTuple):
    """All keys under a prefix, as they were at one revision."""

    revision: int
    values: Mapping[str, bytes]


class KeyChanges(NamedTuple):
    """Keys that were written at one revision, each with its value, or None where it was deleted.

    If `complete`, these are all keys under the prefix, and any other key is gone.
    """

    revision: int
    values: Mapping[str, bytes | None]
    complete: bool = False


class Store(Protocol):
    """The datastore: keys are paths like `models/bert`, values are bytes.

    Every change has a revision, higher than all before it. A failed operation raises a
    StoreError; StoreUnavailable leaves open whether a write was done.
    """

    @property
    def healthy(self) -> bool:
        """Whether the datastore answered its last probe; probes are sent continuously."""

    def on_health_change(self, callback: Callable[[bool], None]) -> Callable[[], None]:
        """Call back, on the event loop, whenever `healthy` changes; returns the stopper."""

    async def get(self, key: str) -> bytes | None: ...

    async def list(self, prefix: str) -> Listing: ...

    async def put(self, key: str, value: bytes, lease: StoreLease | None = None) -> int:
        """Write one key, under this lease or under none; returns the revision of the write."""

    async def create(self, key: str, value: bytes, lease: StoreLease | None = None) -> int | None:
        """Write a key that does not exist yet; the revision, or None if the key exists already."""

    async def delete(self, key: str, value: bytes | None = None) -> None:
        """Delete a key, if it exists; with a value, only while that is the key's."""

    async def write(
        self,
        puts: Mapping[str, bytes],
        deletes: Iterable[str] = (),
        fence: Fence | None = None,
        lease: StoreLease | None = None,
    ) -> None:
        """Write and delete at once, all or nothing; raises Fenced if the fence does not hold.

        No key may be in both `puts` and `deletes`. At most MAX_CHANGES keys.
        """

    def watch(self, prefix: str) -> AsyncGenerator[KeyChanges, None]:
        """First all keys under the prefix, then changes.

        The watch never ends, also after an outage of the datastore. If the changes are no longer
        available (compacted), it yields all keys again (`complete`). Close it: `aclosing`.
        """

    async def grant(self, ttl_s: int) -> StoreLease:
        """A lease that lives this long, from now and from each refresh on."""

    async def refresh(self, lease: StoreLease) -> bool:
        """Extend the lease; False if the lease is gone."""

    async def revoke(self, lease: StoreLease) -> None:
        """End a lease and its keys, if the lease still exists."""

    async def close(self) -> None:
        """Release all resources; leases are left to expire, watches end."""


# Keys in one `write`, for any datastore: 128 is etcd's default limit.
MAX_CHANGES = 100
