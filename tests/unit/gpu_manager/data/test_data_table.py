"""Data by handle: whose it is, how long it lives, what bounds it, what it leaves behind."""

import asyncio
import mmap
import os
import re
import secrets
from pathlib import Path

import pytest

from common.data_handles import new_handle, node_of
from gpu_manager.data.table import NewData
from gpu_manager.errors import DataFailed, NoRoomForData, NoSuchData
from tests.kit.virtual_time import virtually
from tests.unit.gpu_manager.data.data_world import MIB, ONE, OTHER, memory_count, put, read, table


def test_handle_names_its_node_and_cannot_be_guessed() -> None:
    handles = {new_handle("node-1.local") for _ in range(100)}
    assert len(handles) == 100
    assert {node_of(handle) for handle in handles} == {"node-1.local"}
    for handle in handles:
        secret = handle.removeprefix("node-1.local.")
        assert re.fullmatch(r"[A-Za-z0-9_-]{32}", secret)  # of which 168 bits are nobody's name
    assert new_handle("node", "0123abcd.1").endswith("0123")


@pytest.mark.parametrize("node", ["", "a b", "a/b", "a\n", "x" * 254])
def test_handle_is_refused_when_the_name_of_its_node_would_not_be_read(node: str) -> None:
    with pytest.raises(ValueError, match="in its name"):
        new_handle(node)


@pytest.mark.parametrize(
    "text", ["", "node", "node.short", f"a b.{'x' * 32}", f"node.{'x' * 31}/", "x" * 5000]
)
def test_text_is_no_handle_when(text: str) -> None:
    assert node_of(text) is None


@virtually
async def test_data_is_read_by_any_session_of_its_tenant_and_by_no_other() -> None:
    it = table()
    item = await put(it, b"hello")

    found = it.find("team", item.handle)
    content, descriptor = read(found)
    os.close(descriptor)

    assert content == b"hello"
    assert found.about == b"about"
    with pytest.raises(NoSuchData) as foreign:
        it.find("strangers", item.handle)
    with pytest.raises(NoSuchData) as forged:
        it.find("team", f"node.{secrets.token_urlsafe(24)}")
    assert str(foreign.value) == str(forged.value)
    it.close()


@virtually
async def test_data_is_nobodys_when_it_has_not_arrived() -> None:
    it = table()
    item = await it.put("team", ONE, NewData(5, b""))
    with pytest.raises(NoSuchData):
        it.find("team", item.handle)
    with pytest.raises(NoSuchData):
        it.arriving("team", OTHER, item.handle)
    assert it.arriving("team", ONE, item.handle) is item
    it.close()


@virtually
async def test_data_ends_when_its_time_is_over() -> None:
    it = table(most_lifetime_s=1000)
    usual, short, long = [
        await put(it, b"x", lifetime_s) for lifetime_s in (None, 5.0, 1_000_000.0)
    ]
    await asyncio.sleep(5.1)
    with pytest.raises(NoSuchData):
        it.find("team", short.handle)
    await asyncio.sleep(it.limits.lifetime_s - 5.2)
    assert it.find("team", usual.handle) is usual
    await asyncio.sleep(0.2)
    with pytest.raises(NoSuchData):
        it.find("team", usual.handle)
    assert it.find("team", long.handle) is long
    await asyncio.sleep(it.limits.most_lifetime_s)
    assert (len(it), it.total_bytes) == (0, 0)
    it.close()
    assert it.room.used_bytes == 0


@virtually
async def test_shorter_life_ends_first_when_it_was_put_later() -> None:
    it = table()
    await put(it, b"x", 100.0)
    later = await put(it, b"x", 1.0)
    await asyncio.sleep(1.1)
    assert len(it) == 1
    with pytest.raises(NoSuchData):
        it.find("team", later.handle)
    it.close()


@virtually
async def test_parts_end_when_the_data_that_has_them_is_dropped() -> None:
    it = table()
    part = await put(it, b"part")
    whole = await put(it, b"whole", parts=(part.handle,))
    it.drop("strangers", whole.handle)
    assert len(it) == 2
    it.drop("team", whole.handle)
    assert len(it) == 0
    it.drop("team", whole.handle)  # it has ended already
    with pytest.raises(NoSuchData):
        await it.put("team", ONE, NewData(1, b"", None, (part.handle,)))
    part = await put(it, b"part")
    whole = await put(it, b"whole", parts=(part.handle,))
    with pytest.raises(DataFailed, match="has parts itself"):
        await put(it, b"more", parts=(whole.handle,))
    it.close()


@virtually
async def test_tenant_is_refused_when_it_has_too_much_and_its_neighbour_is_not() -> None:
    it = table(memory_bytes=64 * MIB, tenant_bytes=16 * MIB, most_of_a_tenant=3)
    await put(it, bytes(10 * MIB))
    with pytest.raises(NoRoomForData, match="team has 10485760 bytes of 16777216 already"):
        await put(it, bytes(10 * MIB))
    await put(it, bytes(10 * MIB), tenant="neighbours")
    await put(it, b"")
    await put(it, b"")
    with pytest.raises(NoRoomForData, match="team has 3 pieces"):
        await put(it, b"")
    await put(it, b"", tenant="neighbours")
    assert it.bytes_of("team") == 10 * MIB
    it.close()
    assert it.total_bytes == 0


@virtually
async def test_nothing_is_left_when_what_was_put_was_refused_for_its_size() -> None:
    it = table(memory_bytes=4 * MIB)
    with pytest.raises(NoRoomForData):
        await it.put("team", ONE, NewData(5 * MIB, b""))
    assert (len(it), it.total_bytes, it.room.used_bytes) == (0, 0, 0)
    it.close()


@virtually
async def test_session_that_ends_takes_with_it_what_it_was_filling_and_nothing_else() -> None:
    it = table()
    filled = await put(it, b"there")
    filling = await it.put("team", ONE, NewData(2 * MIB, b""))
    before = memory_count()
    it.end_session(ONE)
    assert memory_count() == before - 1
    assert it.find("team", filled.handle) is filled
    with pytest.raises(NoSuchData):
        it.arriving("team", ONE, filling.handle)
    it.close()
    assert it.room.used_bytes == 0


@virtually
async def test_small_data_is_refused_when_its_writer_still_maps_it_for_writing() -> None:
    it = table()
    item = await it.put("team", ONE, NewData(100, b""))
    assert item.file is not None
    descriptor = item.file.for_writer()
    memory = mmap.mmap(descriptor, 100)
    with pytest.raises(DataFailed, match="has not let it go"):
        it.filled(item)
    memory.close()
    it.filled(item)
    with pytest.raises(PermissionError):  # sealed
        os.write(descriptor, b"changed")
    os.close(descriptor)
    it.close()


@virtually
async def test_no_memory_or_file_is_open_when_everything_was_dropped(tmp_path: Path) -> None:
    before = memory_count()
    it = table(tmp_path, memory_bytes=8 * MIB, disk_bytes=32 * MIB)
    items = [await put(it, bytes(3 * MIB)) for _ in range(6)]
    assert it.room.disk_bytes > 0
    for item in items:
        it.drop("team", item.handle)
    await asyncio.sleep(it.limits.free_s + 0.1)
    assert (it.room.used_bytes, it.room.disk_bytes) == (0, 0)
    assert memory_count() == before
    it.close()
    assert list(tmp_path.iterdir()) == []
