"""Memory for data: used again within a tenant, spilled under pressure, never while it is read."""

import asyncio
import fcntl
import mmap
import os
import stat
from pathlib import Path

import pytest

from gpu_manager.data.items import LEAST_REUSED_BYTES, DataFile, DataItem, DataSpill
from gpu_manager.data.table import NewData
from gpu_manager.errors import DataFailed, NoRoomForData
from gpu_manager.node.leases import SessionKey
from tests.kit.virtual_time import virtually
from tests.unit.gpu_manager.data.data_world import MIB, ONE, OTHER, put, read, table


def identity(item: DataItem) -> int:
    """Which memory the item has."""
    assert item.file is not None
    return os.fstat(item.file.descriptor).st_ino


@virtually
async def test_memory_is_used_again_by_its_function_alone_when_nobody_reads_it() -> None:
    it = table()
    first = await put(it, bytes(2 * MIB))
    inode = identity(first)
    it.drop("team", first.handle)
    foreign = await put(it, bytes(2 * MIB), tenant="strangers", owner=SessionKey("strangers/one/s"))
    assert identity(foreign) != inode
    assert identity(await put(it, bytes(2 * MIB), owner=OTHER)) != inode
    assert identity(await put(it, bytes(2 * MIB), owner=SessionKey("team/one/t"))) == inode
    it.close()
    assert it.room.used_bytes == 0


@virtually
async def test_nothing_of_earlier_data_is_behind_later_data_in_the_same_memory() -> None:
    it = table()
    first = await put(it, b"a" * (4 * MIB - 10))
    inode = identity(first)
    it.drop("team", first.handle)
    second = await put(it, b"b" * (2 * MIB + 10))
    assert identity(second) == inode
    assert second.file is not None
    whole = os.pread(second.file.descriptor, 4 * MIB, 0)
    assert set(whole[second.size_bytes :]) == {0}
    it.close()


@virtually
async def test_memory_is_not_used_again_while_a_session_reads_it() -> None:
    it = table()
    item = await put(it, b"a" * (2 * MIB))
    inode, (content, descriptor) = identity(item), read(item)
    it.drop("team", item.handle)

    other = await put(it, b"b" * (2 * MIB))
    assert identity(other) != inode
    assert os.pread(descriptor, 2 * MIB, 0) == content

    it.give_back("team", OTHER, item.handle)
    assert identity(await put(it, bytes(2 * MIB))) == inode
    os.close(descriptor)
    it.close()


@virtually
async def test_memory_is_never_used_again_when_a_reader_left_without_giving_it_back() -> None:
    it = table()
    item = await put(it, b"a" * (2 * MIB))
    inode, (content, descriptor) = identity(item), read(item)
    it.end_session(OTHER)  # a fork of its process may map the memory still
    it.drop("team", item.handle)
    assert identity(await put(it, b"b" * (2 * MIB))) != inode
    assert os.pread(descriptor, 2 * MIB, 0) == content
    os.close(descriptor)
    it.close()
    assert it.room.used_bytes == 0


@virtually
async def test_nothing_is_given_back_twice() -> None:
    it = table()
    item = await put(it, b"a" * (2 * MIB))
    descriptors = [read(item)[1], read(item)[1]]
    it.give_back("team", OTHER, item.handle)
    it.give_back("team", ONE, item.handle)  # it has read nothing
    it.give_back("strangers", OTHER, item.handle)
    assert item.readers.total() == 1
    it.give_back("team", OTHER, item.handle)
    assert item.readers.total() == 0
    for descriptor in descriptors:
        os.close(descriptor)
    it.close()


@virtually
async def test_free_memory_is_given_up_when_nobody_uses_it_for_a_while() -> None:
    it = table()
    item = await put(it, bytes(2 * MIB))
    it.drop("team", item.handle)
    assert it.room.used_bytes == 2 * MIB
    await asyncio.sleep(it.limits.free_s + 0.1)
    assert it.room.used_bytes == 0
    it.close()


@virtually
async def test_least_recently_used_data_is_spilled_and_reads_the_same(tmp_path: Path) -> None:
    it = table(tmp_path, memory_bytes=6 * MIB)
    contents = [bytes([number]) * (2 * MIB) for number in range(4)]
    items = [await put(it, content) for content in contents[:3]]
    it.find("team", items[0].handle)
    items.append(await put(it, contents[3]))

    assert [item.file is None for item in items] == [False, True, False, False]
    for item, content in zip(items, contents, strict=True):
        found, descriptor = read(item)
        assert found == content
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.write(descriptor, b"x")
        os.close(descriptor)
        it.give_back("team", OTHER, item.handle)
    assert (it.room.used_bytes, it.room.disk_bytes) == (6 * MIB, 2 * MIB)
    it.close()
    assert (it.room.used_bytes, it.room.disk_bytes) == (0, 0)


@virtually
async def test_data_is_refused_when_memory_and_disk_are_full(tmp_path: Path) -> None:
    it = table(tmp_path, memory_bytes=4 * MIB, disk_bytes=2 * MIB, tenant_bytes=64 * MIB)
    for _ in range(3):
        await put(it, bytes(2 * MIB))
    with pytest.raises(NoRoomForData, match="of 4194304 bytes of memory and 2097152 of disk"):
        await put(it, bytes(2 * MIB))
    assert it.total_bytes == 6 * MIB
    it.close()


@virtually
async def test_data_is_refused_when_its_neighbours_are_read_and_cannot_be_spilled(
    tmp_path: Path,
) -> None:
    it = table(tmp_path, memory_bytes=2 * MIB, tenant_bytes=64 * MIB)
    item = await put(it, bytes(2 * MIB))
    _, descriptor = read(item)
    with pytest.raises(NoRoomForData):
        await put(it, bytes(2 * MIB))
    it.give_back("team", OTHER, item.handle)
    await put(it, bytes(2 * MIB))
    assert it.room.disk_bytes == 2 * MIB
    os.close(descriptor)
    it.close()


@virtually
async def test_pages_become_the_readers_own_when_their_data_has_gone_and_room_lacks() -> None:
    it = table(memory_bytes=2 * MIB, tenant_bytes=64 * MIB)
    item = await put(it, b"a" * (2 * MIB))
    content, descriptor = read(item)
    it.drop("team", item.handle)
    await put(it, b"b" * (2 * MIB))
    assert it.room.used_bytes == 2 * MIB
    assert os.pread(descriptor, 2 * MIB, 0) == content
    it.give_back("team", OTHER, item.handle)
    os.close(descriptor)
    it.close()
    assert it.room.used_bytes == 0


@virtually
async def test_data_stays_in_memory_when_the_disk_refuses_it(tmp_path: Path) -> None:
    it = table(tmp_path, memory_bytes=2 * MIB, tenant_bytes=64 * MIB)
    item = await put(it, bytes(2 * MIB))
    tmp_path.rmdir()
    with pytest.raises(NoRoomForData):
        await put(it, bytes(2 * MIB))
    assert item.file is not None
    assert it.room.disk_bytes == 0
    it.close()


@virtually
async def test_puts_at_once_stay_within_the_memory(tmp_path: Path) -> None:
    it = table(tmp_path, memory_bytes=4 * MIB, tenant_bytes=64 * MIB)
    await asyncio.gather(*(put(it, bytes([n]) * (2 * MIB)) for n in range(8)))
    assert it.room.used_bytes == 4 * MIB
    assert it.room.disk_bytes == 12 * MIB
    it.close()


def test_folder_that_weights_share_is_nobody_elses_when_the_one_of_data_is_made_first(
    tmp_path: Path,
) -> None:
    before = os.umask(0o022)
    try:
        DataSpill(tmp_path / "spill" / "data", MIB)
    finally:
        os.umask(before)
    for folder in (tmp_path / "spill", tmp_path / "spill" / "data"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700, folder


def test_spilled_data_has_no_name_and_follows_no_link(tmp_path: Path) -> None:
    spill = DataSpill(tmp_path / "data", MIB)
    assert stat.S_IMODE((tmp_path / "data").stat().st_mode) == 0o700
    source = DataFile(4096)
    written = spill.write(source.descriptor, 100)
    assert stat.S_IMODE(os.fstat(written).st_mode) == 0o600
    assert os.fstat(written).st_nlink == 0
    assert list((tmp_path / "data").iterdir()) == []
    os.close(written)

    (tmp_path / "data").rmdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "data").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DataFailed):
        spill.write(source.descriptor, 100)
    source.close()


def test_file_is_unlinked_at_once_where_there_are_no_unnamed_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "O_TMPFILE", os.O_DIRECTORY)  # as an old file system reads it
    spill = DataSpill(tmp_path, MIB)
    source = DataFile(4096)
    os.pwrite(source.descriptor, b"content", 0)
    written = spill.write(source.descriptor, 7)
    assert os.pread(written, 100, 0) == b"content"
    assert list(tmp_path.iterdir()) == []
    os.close(written)
    source.close()


def test_reader_cannot_write_to_memory_nor_change_its_size() -> None:
    file = DataFile(LEAST_REUSED_BYTES)
    descriptor = file.for_reader()
    with pytest.raises(PermissionError):
        mmap.mmap(descriptor, 4096)
    with pytest.raises(OSError, match="Invalid argument"):
        os.ftruncate(descriptor, 0)
    writer = file.for_writer()
    with pytest.raises(PermissionError):
        os.ftruncate(writer, 0)
    assert fcntl.fcntl(writer, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    for each in (descriptor, writer):
        os.close(each)
    file.close()


@virtually
async def test_memory_made_for_a_put_that_was_cancelled_is_not_counted(tmp_path: Path) -> None:
    it = table(tmp_path, memory_bytes=2 * MIB, tenant_bytes=64 * MIB)
    await it.room._making.acquire()  # noqa: SLF001 - somebody else is making room
    waiting = asyncio.ensure_future(it.put("team", ONE, NewData(MIB, b"")))
    await asyncio.sleep(0)
    waiting.cancel()
    it.room._making.release()  # noqa: SLF001 - as above
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert (len(it), it.total_bytes, it.room.used_bytes) == (0, 0, 0)
    it.close()
