"""The host's memory and disk for data: files made and used again, data spilled when room lacks."""

import asyncio
import logging
import os
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial

from gpu_manager.data.items import DataFile, DataItem, DataSpill, DataStage, FreeFiles, room_for
from gpu_manager.errors import DataFailed, NoRoomForData
from gpu_manager.sessions.sessions import in_thread

log = logging.getLogger(__name__)


MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class DataLimits:
    """The bounds of a node's data.

    Data beyond `memory_bytes` goes to disk, up to `disk_bytes`; more is refused. One tenant has at
    most `tenant_bytes` and `most_of_a_tenant` pieces, wherever they lie. Data whose function names
    no lifetime lives for `lifetime_s`.
    """

    memory_bytes: int
    disk_bytes: int = 0
    tenant_bytes: int = 0  # 0: half of all
    most: int = 4096
    most_of_a_tenant: int = 1024
    lifetime_s: float = 300.0
    most_lifetime_s: float = 3600.0
    free_s: float = 10.0  # that memory waits to be used again by its tenant

    @property
    def bytes_of_a_tenant(self) -> int:
        return self.tenant_bytes or (self.memory_bytes + self.disk_bytes) // 2


class DataRoom:
    """Memory up to a budget, whose least recently used data goes to disk. Used on one loop."""

    def __init__(self, limits: DataLimits, spill: DataSpill | None = None) -> None:
        """Without `spill` data that does not fit into memory is refused."""
        self.limits = limits
        self.used_bytes = 0  # of memory: of data, of what is read after its data has gone, and free
        self._spill = spill
        self._free = FreeFiles()
        self._resting: OrderedDict[DataItem, None] = OrderedDict()  # the least recently used first
        self._leaving: dict[DataItem, None] = {}  # their data has gone, and they are read still
        self._making = asyncio.Lock()
        self._loop = asyncio.get_running_loop()
        self._trimming: asyncio.TimerHandle | None = None

    @property
    def disk_bytes(self) -> int:
        return 0 if self._spill is None else self._spill.used_bytes

    async def file_for(self, function: str, size_bytes: int) -> DataFile:
        """Return memory for a function's data; NoRoomForData if none is left after spilling."""
        async with self._making:
            file = self._free.take(function, size_bytes)
            if file is not None:
                return file
            wanted = room_for(size_bytes)
            await self._make_room(wanted)
            file = DataFile(wanted)
            self.used_bytes += wanted
            return file

    def rest(self, item: DataItem) -> None:
        """The item's file holds its data from now on, and may be spilled."""
        self._resting[item] = None

    def touch(self, item: DataItem) -> None:
        if item in self._resting:
            self._resting.move_to_end(item)

    def retire(self, item: DataItem) -> None:
        """The item's data has gone: its disk is free, and its memory once nobody reads it."""
        self._resting.pop(item, None)
        if item.disk >= 0:
            assert self._spill is not None, "something was spilled"
            os.close(item.disk)
            item.disk = -1
            self._spill.used_bytes -= item.size_bytes
        if item.file is not None and item.is_read:
            self._leaving[item] = None
        else:
            self._free_file(item)

    def reader_left(self, item: DataItem) -> None:
        """A reader has left; the last one leaves the memory of data that has gone."""
        if item in self._leaving and not item.is_read:
            del self._leaving[item]
            self._free_file(item)

    def unread(self, file: DataFile) -> None:
        """Memory that never held data of anybody is given up."""
        self.used_bytes -= file.size_bytes
        file.close()

    def leaving(self) -> list[DataItem]:
        """Items whose data has gone, and that are read still."""
        return list(self._leaving)

    def close(self) -> None:
        """The items were retired before."""
        if self._trimming is not None:
            self._trimming.cancel()
        for item in self.leaving():
            self._let_go(item)
        while closed := self._free.close_oldest():
            self.used_bytes -= closed

    # -- memory ---------------------------------------------------------------------------------

    def _free_file(self, item: DataItem) -> None:
        file, item.file = item.file, None
        if file is None:
            return
        if item.spoilt or not file.is_reused:
            self.unread(file)
            return
        self._free.give(item.function, file, self._loop.time())
        self._trim_later()

    def _let_go(self, item: DataItem) -> None:
        """Leave the pages to those who read them."""
        del self._leaving[item]
        item.spoilt = True
        self._free_file(item)

    def _trim_later(self) -> None:
        if self._trimming is None:
            self._trimming = self._loop.call_later(self.limits.free_s, self._trim)

    def _trim(self) -> None:
        self._trimming = None
        self.used_bytes -= self._free.close_since(self._loop.time() - self.limits.free_s)
        if len(self._free):
            self._trim_later()

    async def _make_room(self, wanted_bytes: int) -> None:
        """Have so many bytes free: unused files go first, then what is read, then data to disk."""
        if wanted_bytes > self.limits.memory_bytes:
            raise self._no_room(wanted_bytes)
        while self.used_bytes + wanted_bytes > self.limits.memory_bytes:
            closed = self._free.close_oldest()
            if closed:
                self.used_bytes -= closed
            elif self._leaving:
                self._let_go(next(iter(self._leaving)))
            elif not await self._spill_one():
                raise self._no_room(wanted_bytes)

    async def _spill_one(self) -> bool:
        """Move the least recently used data that nobody reads to disk; False if none can be."""
        spill = self._spill
        victim = next((item for item in self._resting if not item.is_read), None)
        if spill is None or victim is None or victim.file is None:
            return False
        size_bytes = victim.size_bytes
        if spill.used_bytes + size_bytes > spill.budget_bytes:
            return False
        source, written = victim.file.for_writer(), -1
        spill.used_bytes += size_bytes
        try:
            written = await in_thread(partial(spill.write, source, size_bytes), discard=os.close)
        except DataFailed as error:
            log.error("%s", error)
            return False
        finally:
            os.close(source)
            if written < 0:
                spill.used_bytes -= size_bytes
        if victim.stage is DataStage.GONE or victim.is_read:  # meanwhile
            os.close(written)
            spill.used_bytes -= size_bytes
            return True
        victim.disk = written
        self._resting.pop(victim, None)
        file, victim.file = victim.file, None
        if file is not None:
            self.unread(file)
        return True

    def _no_room(self, wanted_bytes: int) -> NoRoomForData:
        limits = self.limits
        detail = f"of {limits.memory_bytes} bytes of memory and {limits.disk_bytes} of disk"
        return NoRoomForData(wanted_bytes, f"{detail} too few are free")
