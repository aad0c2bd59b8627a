"""A table of data on the running loop, and the memory that it has open."""

import os
from pathlib import Path

from gpu_manager.data.items import MEMORY_NAME, DataItem, DataSpill
from gpu_manager.data.room import DataLimits, DataRoom
from gpu_manager.data.table import DataTable, NewData
from gpu_manager.node.leases import SessionKey
from tests.kit.processes.open_files import open_files

MIB = 1 << 20
ONE, OTHER = SessionKey("team/one/s"), SessionKey("team/other/s")


def table(
    spill: Path | None = None, memory_bytes: int = 64 * MIB, disk_bytes: int = 64 * MIB, **more: int
) -> DataTable:
    """An empty table; with a folder it spills there."""
    limits = DataLimits(memory_bytes, disk_bytes if spill else 0, **more)
    disk = None if spill is None else DataSpill(spill, limits.disk_bytes)
    return DataTable("node", limits, DataRoom(limits, disk))


async def put(
    it: DataTable,
    content: bytes,
    lifetime_s: float | None = None,
    tenant: str = "team",
    parts: tuple[str, ...] = (),
    owner: SessionKey = ONE,
    *,
    wished: bool = False,
) -> DataItem:
    """Data with this content, which is there to be read."""
    new = NewData(len(content), b"about", lifetime_s, parts, wished)
    item = await it.put(tenant, owner, new)
    assert item.file is not None
    os.pwrite(item.file.descriptor, content, 0)
    it.filled(item)
    return item


def read(item: DataItem, session: SessionKey = OTHER) -> tuple[bytes, int]:
    """The content as a reader finds it, and the descriptor, which stays open."""
    descriptor = item.for_reader(session)
    return os.pread(descriptor, item.size_bytes, 0), descriptor


def memory_count() -> int:
    """How many pieces of memory for data this process has open."""
    return sum(MEMORY_NAME in target for _, target in open_files())
