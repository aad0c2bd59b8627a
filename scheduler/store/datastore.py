"""The port to the datastore, which etcd and this process's memory both answer."""

from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from typing import NamedTuple, NewType, Protocol

# A promise to the datastore to be alive: keys under a lease vanish when it is not refreshed.
StoreLease = NewType("StoreLease", int)


class Fence(NamedTuple):
    """Write only while this key is there and is still the one that was made at this revision."""

    key: str
    revision: int


class Listing(NamedTuple):
    """All keys under a prefix, as they were at one revision."""

    revision: int
    values: Mapping[str, bytes]


class KeyChanges(NamedTuple):
    """Keys that were written at one revision, each with its value, or None where it was deleted.

    If `complete`, these are all keys that there are under the prefix, and any other is gone.
    """

    revision: int
    values: Mapping[str, bytes | None]
    complete: bool = False


class Store(Protocol):
    """The datastore: keys are paths like `models/bert`, values are bytes.

    Every change has a revision, higher than all before it. What cannot be done raises a
    StoreError; StoreUnavailable leaves open whether a write was done.
    """

    @property
    def healthy(self) -> bool:
        """Whether it answered when it was last asked; it is asked all the time."""
        ...

    def on_health_change(self, callback: Callable[[bool], None]) -> Callable[[], None]:
        """Call back, on the event loop, whenever `healthy` changes, until what is returned is."""
        ...

    async def get(self, key: str) -> bytes | None:
        """The key's value, or None where there is no such key."""
        ...

    async def list(self, prefix: str) -> Listing:
        """Every key that begins with the prefix."""
        ...

    async def put(self, key: str, value: bytes, lease: StoreLease | None = None) -> int:
        """Write one key, under this lease or under none; the revision of the write."""
        ...

    async def create(self, key: str, value: bytes, lease: StoreLease | None = None) -> int | None:
        """Write a key that is not there yet; the revision, or None where it is there already."""
        ...

    async def delete(self, key: str) -> None:
        """Take a key away, if it is there."""
        ...

    async def write(
        self,
        puts: Mapping[str, bytes],
        deletes: Iterable[str] = (),
        fence: Fence | None = None,
        lease: StoreLease | None = None,
    ) -> None:
        """Write and delete at once, all or nothing; raises Fenced where the fence does not hold.

        No key may be in both. At most MAX_CHANGES keys.
        """
        ...

    def watch(
        self, prefix: str, from_revision: int | None = None
    ) -> AsyncGenerator[KeyChanges, None]:
        """Changes to keys under the prefix from this revision on, or first all keys, then changes.

        It goes on for ever, also after the datastore was away. Where changes cannot be had any
        more (they were compacted), it begins anew with all keys (`complete`). Close it: `aclosing`.
        """
        ...

    async def grant(self, ttl_s: int) -> StoreLease:
        """A lease that lives this long, from now and from each refresh on."""
        ...

    async def refresh(self, lease: StoreLease) -> bool:
        """Let the lease live on; False where it is gone."""
        ...

    async def revoke(self, lease: StoreLease) -> None:
        """End a lease and its keys, if it is still there."""
        ...

    async def close(self) -> None:
        """Give everything back; leases are left to expire, watches end."""
        ...


# Keys in one `write`, whatever the datastore: etcd takes 128 unless it is told otherwise.
MAX_CHANGES = 100
