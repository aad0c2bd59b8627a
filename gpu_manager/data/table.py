"""The data of all tenants, by handle: put, found, read, dropped, and ended by time."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from common.data_handles import new_handle
from gpu_manager.data.items import DataFile, DataItem, DataStage, withdraw
from gpu_manager.data.room import DataLimits, DataRoom
from gpu_manager.errors import DataFailed, NoRoomForData, NoSuchData
from gpu_manager.node.leases import SessionKey
from gpu_manager.runtimes.runtime import HostedModel

log = logging.getLogger(__name__)

_WISHED = 4  # so much (1/N) of a tenant's pieces may be what callers asked for
_ASIDE = 4  # so much (1/N) of a tenant's bounds is set aside for its workers at most


@dataclass(frozen=True, slots=True)
class NewData:
    """What a function says about data that it puts; it lives for the usual time without one.

    It is `wished` if the function's caller asked for it, who may be anybody.
    """

    size_bytes: int
    about: bytes
    lifetime_s: float | None = None
    parts: tuple[str, ...] = ()
    wished: bool = False


class DataTable:
    """Every piece of data of one node, between its put and its end. Used on one loop.

    A handle that is unknown, another tenant's, or of data that has gone is NoSuchData, whichever
    it is. Callers' wishes have a share of a tenant's pieces, and end, the oldest first, before a
    function's own data is refused.
    """

    def __init__(self, node: str, limits: DataLimits, room: DataRoom) -> None:
        self.limits = limits
        self.room = room
        self.node = node
        self._items: dict[str, DataItem] = {}
        self._wishes: dict[str, DataItem] = {}  # those of the items that callers asked for
        self._bytes: Counter[str] = Counter()  # by tenant
        self._counts: Counter[str] = Counter()
        self._aside: dict[str, tuple[int, int]] = {}  # by tenant: bytes and pieces for workers
        self._aside_pieces = 0
        self._loop = asyncio.get_running_loop()

    def __len__(self) -> int:
        return len(self._items)

    def bytes_of(self, tenant: str) -> int:
        return self._bytes[tenant]

    @property
    def total_bytes(self) -> int:
        return self._bytes.total()

    def bytes_by_place(self) -> dict[str, int]:
        """The bytes in memory, whatever of it is free, on disk, and with workers alone."""
        staying = sum(item.size_bytes for item in self._items.values() if not item.is_here)
        return {"memory": self.room.used_bytes, "disk": self.room.disk_bytes, "worker": staying}

    async def put(self, tenant: str, owner: SessionKey, new: NewData) -> DataItem:
        """Make room for data that `owner` will fill; NoRoomForData beyond a bound."""
        item = self._add(tenant, owner, new, new_handle(self.node))
        try:
            file = await self.file_for(item)
        except BaseException:
            self._remove(item)
            raise
        if item.stage is DataStage.GONE:  # its time was over, or its owner left, meanwhile
            self.room.unread(file)
            raise NoSuchData
        item.file = file
        return item

    async def file_for(self, item: DataItem) -> DataFile:
        """Return memory for the item's bytes; NoRoomForData if too little could give way."""
        while True:
            try:
                return await self.room.file_for(item.function, item.size_bytes)
            except NoRoomForData:
                if self._stays_too_large(item) or not self._end_wish(item, _is_here):
                    raise

    def put_on_worker(
        self, tenant: str, owner: SessionKey, new: NewData, hosted: HostedModel, handle: str = ""
    ) -> DataItem:
        """Note data whose bytes this model's worker has; NoRoomForData beyond a bound.

        What was set aside for data that the worker has put by itself is released before.
        """
        item = self._add(tenant, owner, new, handle or new_handle(self.node, hosted.id))
        item.hosted, item.stage = hosted, DataStage.THERE
        return item

    def knows(self, handle: str) -> bool:
        return handle in self._items

    def set_aside(self, tenant: str, size_bytes: int, pieces: int) -> bool:
        """Set so much aside for a tenant's workers; False if it is too much of its bounds."""
        limits, (aside_bytes, aside_pieces) = self.limits, self.set_aside_for(tenant)
        aside_bytes, aside_pieces = aside_bytes + size_bytes, aside_pieces + pieces
        all_pieces = len(self._items) + self._aside_pieces + pieces
        if (
            aside_bytes > limits.bytes_of_a_tenant // _ASIDE
            or aside_pieces > limits.most_of_a_tenant // _ASIDE
            or self._bytes[tenant] + aside_bytes > limits.bytes_of_a_tenant
            or self._counts[tenant] + aside_pieces > limits.most_of_a_tenant
            or all_pieces > limits.most
        ):
            return False
        self._aside[tenant] = aside_bytes, aside_pieces
        self._aside_pieces += pieces
        return True

    def release(self, tenant: str, size_bytes: int, pieces: int) -> None:
        aside_bytes, aside_pieces = self.set_aside_for(tenant)
        self._aside[tenant] = left = aside_bytes - size_bytes, aside_pieces - pieces
        self._aside_pieces -= pieces
        if left == (0, 0):
            del self._aside[tenant]

    def set_aside_for(self, tenant: str) -> tuple[int, int]:
        """The bytes and pieces that are set aside for a tenant's workers, beside its data."""
        return self._aside.get(tenant, (0, 0))

    def filled(self, item: DataItem) -> None:
        assert item.file is not None, "data arrives in its file"
        item.file.fill()
        item.stage = DataStage.THERE
        self.room.rest(item)

    def brought(self, item: DataItem, file: DataFile) -> None:
        """Data of a worker was copied to this file, which other readers read from now on."""
        if item.stage is DataStage.GONE:
            self.room.unread(file)
            return
        try:
            file.fill()
        except DataFailed:
            self.room.unread(file)
            raise
        item.file = file
        self.room.rest(item)

    def arriving(self, tenant: str, owner: SessionKey, handle: str) -> DataItem:
        """Return data that this session puts and has not filled."""
        item = self._items.get(handle)
        if item is None or (item.tenant, item.owner) != (tenant, owner):
            raise NoSuchData
        if item.stage is not DataStage.ARRIVING or item.file is None:
            raise NoSuchData
        return item

    def find(self, tenant: str, handle: str) -> DataItem:
        """Return data of this tenant that is there to be read."""
        item = self._items.get(handle)
        if item is None or item.tenant != tenant or item.stage is not DataStage.THERE:
            raise NoSuchData
        self.room.touch(item)
        return item

    def give_back(self, tenant: str, session: SessionKey, handle: str) -> None:
        item = self._items.get(handle) or next(
            (left for left in self.room.leaving() if left.handle == handle), None
        )
        if item is not None and item.tenant == tenant:
            item.given_back(session)
            self.room.reader_left(item)

    def drop(self, tenant: str, handle: str) -> None:
        """End data of this tenant now, with its parts; nothing if it has ended already."""
        item = self._items.get(handle)
        if item is not None and item.tenant == tenant:
            self.end(item)

    def end(self, item: DataItem) -> None:
        if item.stage is DataStage.GONE:
            return
        item.spoilt = item.spoilt or item.stage is DataStage.ARRIVING
        hosted, item.hosted = item.hosted, None
        self._remove(item)
        if hosted is not None:
            withdraw(hosted, item.handle)
        self.room.retire(item)
        for part in item.parts:
            self.drop(item.tenant, part)

    def end_session(self, session: SessionKey) -> None:
        """A session has ended: what it was filling ends, and it gives nothing back any more."""
        for item in [*self._items.values(), *self.room.leaving()]:
            item.reader_gone(session)
            if item.owner == session and item.stage is DataStage.ARRIVING:
                self.end(item)
            else:
                self.room.reader_left(item)

    def on_worker(self, hosted: HostedModel) -> list[DataItem]:
        return [item for item in self._items.values() if item.hosted is hosted]

    def close(self) -> None:
        for item in list(self._items.values()):
            self.end(item)
        self.room.close()

    # -- bounds ---------------------------------------------------------------------------------

    def _add(self, tenant: str, owner: SessionKey, new: NewData, handle: str) -> DataItem:
        limits, size = self.limits, new.size_bytes
        for part in new.parts:
            if self.find(tenant, part).parts:
                raise DataFailed("a part of data has parts itself")
        lifetime_s = limits.lifetime_s if new.lifetime_s is None else new.lifetime_s
        expires_s = self._loop.time() + min(lifetime_s, limits.most_lifetime_s)
        item = DataItem(handle, tenant, owner, size, new.about, new.parts, wished=new.wished)
        self._make_room(item)
        self._items[handle] = item
        if item.wished:
            self._wishes[handle] = item
        self._bytes[tenant] += size
        self._counts[tenant] += 1
        item.expiry = self._loop.call_at(expires_s, self._expire, item)
        return item

    def _make_room(self, item: DataItem) -> None:
        """Have room for an item within all bounds; NoRoomForData if wishes leave too little.

        Nothing has ended for an item that is refused.
        """
        if self._lack_in_tenant(item) or self._lack_in_node():
            gone = self._giving_way(item)
            if detail := self._lack_in_tenant(item, gone) or self._lack_in_node(gone):
                raise NoRoomForData(item.size_bytes, detail)
        if item.wished:
            self._make_room_among_wishes(item)
        while self._lack_in_tenant(item) and self._end_wish(
            item, lambda wish: wish.tenant == item.tenant
        ):
            pass
        while self._lack_in_node() and self._end_wish(item):
            pass

    def _make_room_among_wishes(self, item: DataItem) -> None:
        wishes = [wish for wish in self._wishes.values() if wish.tenant == item.tenant]
        pieces = sum(1 + len(wish.parts) for wish in (*wishes, item))
        for wish in wishes:
            if pieces <= self.limits.most_of_a_tenant // _WISHED:
                return
            pieces -= 1 + len(wish.parts)
            self.end(wish)

    def _lack_in_tenant(self, item: DataItem, gone: Collection[DataItem] = ()) -> str:
        """How a tenant would have too much with this item, and none `gone`; empty if it has not."""
        tenant, limits = item.tenant, self.limits
        own_bytes = [left.size_bytes for left in gone if left.tenant == tenant]
        pieces = self._counts[tenant] - len(own_bytes)
        there_bytes = self._bytes[tenant] - sum(own_bytes)
        aside_bytes, aside_pieces = self.set_aside_for(tenant)
        if pieces + aside_pieces >= limits.most_of_a_tenant:
            return f"{tenant} has {pieces} pieces"
        if there_bytes + aside_bytes + item.size_bytes > limits.bytes_of_a_tenant:
            return f"{tenant} has {there_bytes} bytes of {limits.bytes_of_a_tenant} already"
        return ""

    def _lack_in_node(self, gone: Collection[DataItem] = ()) -> str:
        """The same of all tenants, who share the number of pieces."""
        pieces = len(self._items) - len(gone)
        full = pieces + self._aside_pieces >= self.limits.most
        return f"all namespaces together have {pieces} pieces" if full else ""

    def _stays_too_large(self, item: DataItem) -> bool:
        """Whether memory and disk have no room for its bytes, whatever gives way."""
        limits, gone = self.limits, {left.handle for left in self._giving_way(item)}
        kept = (other for name, other in self._items.items() if name not in gone and other.is_here)
        kept_bytes = sum(other.size_bytes for other in kept)
        room_bytes = limits.memory_bytes + limits.disk_bytes - kept_bytes
        return item.size_bytes > min(limits.memory_bytes, room_bytes)

    def _wishes_before(self, item: DataItem) -> Iterator[DataItem]:
        for wish in self._wishes.values():
            if wish is not item and not (item.wished and wish.tenant != item.tenant):
                yield wish

    def _giving_way(self, item: DataItem) -> list[DataItem]:
        """The wishes that may give way to this item, with their parts, each once."""
        names = {
            name: None for wish in self._wishes_before(item) for name in (wish.handle, *wish.parts)
        }
        return [self._items[name] for name in names if name in self._items]

    def _end_wish(self, item: DataItem, helps: Callable[[DataItem], bool] = lambda _: True) -> bool:
        """End the oldest wish that helps and may give way to this item; False if there is none."""
        wish = next(filter(helps, self._wishes_before(item)), None)
        if wish is not None:
            self.end(wish)
        return wish is not None

    def _remove(self, item: DataItem) -> None:
        if self._items.pop(item.handle, None) is None:
            return
        self._wishes.pop(item.handle, None)
        item.stage = DataStage.GONE
        if item.expiry is not None:
            item.expiry.cancel()
        tenant = item.tenant
        self._bytes[tenant] -= item.size_bytes
        self._counts[tenant] -= 1
        if not self._counts[tenant]:
            del self._bytes[tenant], self._counts[tenant]

    def _expire(self, item: DataItem) -> None:
        log.debug("data of %s has ended by time", item.tenant)
        self.end(item)


def _is_here(wish: DataItem) -> bool:
    return wish.is_here
