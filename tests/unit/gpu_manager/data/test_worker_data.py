"""Data that only a worker has: brought once, rescued before its model leaves, lost with it."""

import asyncio
import os

import pytest

from gpu_manager.data.items import DataItem
from gpu_manager.data.staying import WorkerData
from gpu_manager.data.table import DataTable, NewData
from gpu_manager.errors import DataFailed, NoSuchData
from gpu_manager.worker.orders import HandedOver
from tests.kit.nodes.in_memory_data import InMemoryData
from tests.kit.nodes.in_memory_runtime import InMemoryHosted
from tests.kit.virtual_time import virtually
from tests.kit.worlds.gpu_node import World, world
from tests.unit.gpu_manager.data.data_world import MIB, ONE, memory_count, read, table

CONTENT = b"c" * (2 * MIB)


def published(
    it: World, data: WorkerData, there: InMemoryData, content: bytes = CONTENT
) -> DataItem:
    """Data that this model's worker has."""
    it.node.features = [data]
    item = data.put("team", ONE, NewData(len(content), b""), there.hosted)
    there.content[item.handle] = content
    return item


def parts(memory_bytes: int = 64 * MIB) -> tuple[DataTable, WorkerData]:
    found = table(memory_bytes=memory_bytes)
    return found, WorkerData(found)


@virtually
async def test_data_is_copied_once_when_several_ask_for_it() -> None:
    async with world() as it:
        kept, data = parts()
        _, hosted = await it.hold(it.add(10))
        there = InMemoryData(hosted)
        item = published(it, data, there)
        assert (item.is_here, kept.total_bytes, kept.room.used_bytes) == (False, 2 * MIB, 0)

        await asyncio.gather(*(data.bring(item) for _ in range(5)))

        content, descriptor = read(item)
        assert content == CONTENT
        assert kept.room.used_bytes == 2 * MIB
        os.close(descriptor)
        kept.end(item)
        assert there.content == {}
        kept.close()


@virtually
async def test_data_is_lost_when_the_worker_has_not_got_it() -> None:
    async with world() as it:
        kept, data = parts()
        _, hosted = await it.hold(it.add(10))
        there = InMemoryData(hosted)
        item = published(it, data, there)
        there.content.clear()
        with pytest.raises(NoSuchData):
            await data.bring(item)
        assert (len(kept), kept.room.used_bytes) == (0, 0)
        kept.close()


class SlowCopies:
    """A worker whose gate a long call holds: it copies when it is told to, in order."""

    def __init__(self, there: InMemoryData, patch: pytest.MonkeyPatch) -> None:
        self._there = there
        self.rooms: list[int] = []
        patch.setattr(there, "hand_over", self._hand_over)

    def _hand_over(self, handle: str, size_bytes: int, descriptor: int) -> None:
        del handle, size_bytes
        self.rooms.append(os.dup(descriptor))

    def end_one(self, item: DataItem) -> None:
        """Copy what was asked for first, if it is still published, and say so."""
        room = self.rooms.pop(0)
        content = self._there.content.get(item.handle)
        if content is not None:
            os.pwrite(room, content, 0)
        os.close(room)
        hosted = self._there.hosted
        hosted.report(HandedOver(hosted.number, item.handle, content is not None))


async def late_copy(
    it: World, data: WorkerData, patch: pytest.MonkeyPatch
) -> tuple[InMemoryHosted, DataItem, SlowCopies]:
    """Data whose copy somebody has waited for in vain."""
    _, hosted = await it.hold(it.add(10))
    there = InMemoryData(hosted)
    item = published(it, data, there)
    worker = SlowCopies(there, patch)
    with pytest.raises(DataFailed, match="in time"):
        await data.bring(item)
    return hosted, item, worker


@virtually
async def test_copy_goes_on_and_later_ones_wait_for_it_when_a_worker_is_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with world() as it:
        kept, data = parts()
        _, item, worker = await late_copy(it, data, monkeypatch)
        later = asyncio.ensure_future(data.bring(item))
        await asyncio.sleep(1.0)
        assert len(worker.rooms) == 1
        assert kept.room.used_bytes == 2 * MIB

        worker.end_one(item)
        await later

        content, descriptor = read(item)
        assert content == CONTENT
        assert kept.room.used_bytes == 2 * MIB
        os.close(descriptor)
        kept.close()


@virtually
async def test_late_copy_is_kept_when_nobody_waits_for_it_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with world() as it:
        kept, data = parts()
        _, item, worker = await late_copy(it, data, monkeypatch)
        worker.end_one(item)
        await asyncio.sleep(0.1)
        assert item.is_here
        kept.close()
        assert kept.room.used_bytes == 0


@virtually
@pytest.mark.parametrize("how", ["dropped", "dies", "closed"])
async def test_memory_of_a_late_copy_is_free_when_nothing_more_comes_of_it(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world() as it:
        kept, data = parts()
        before = memory_count()
        hosted, item, worker = await late_copy(it, data, monkeypatch)
        if how == "dropped":
            kept.drop("team", item.handle)
            assert kept.room.used_bytes == 2 * MIB  # the worker may still write there
            worker.end_one(item)
        elif how == "dies":
            hosted.die()
        else:
            await data.close()
        await asyncio.sleep(0.1)
        assert kept.room.used_bytes == 0
        for room in worker.rooms:
            os.close(room)
        assert memory_count() == before
        kept.close()


@virtually
async def test_waiting_ends_in_time_for_each_when_the_other_gave_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with world() as it:
        kept, data = parts()
        _, hosted = await it.hold(it.add(10))
        there = InMemoryData(hosted)
        item = published(it, data, there)
        worker = SlowCopies(there, monkeypatch)
        first = asyncio.ensure_future(data.bring(item))
        await asyncio.sleep(4.0)
        first.cancel()
        asked_s = asyncio.get_running_loop().time()
        with pytest.raises(DataFailed, match="in time"):
            await data.bring(item)
        assert asyncio.get_running_loop().time() - asked_s == pytest.approx(10.0)
        assert len(worker.rooms) == 1
        worker.end_one(item)
        await data.bring(item)
        kept.close()


@virtually
async def test_data_is_lost_when_its_worker_dies_and_that_ends_the_wait() -> None:
    async with world() as it:
        kept, data = parts()
        _, hosted = await it.hold(it.add(10))
        there = InMemoryData(hosted)
        here, gone = published(it, data, there), published(it, data, there)
        await data.bring(here)
        hosted.hangs = True
        waiting = asyncio.ensure_future(data.bring(gone))
        await asyncio.sleep(0.1)
        hosted.die()
        with pytest.raises(NoSuchData):
            await waiting
        assert kept.find("team", here.handle) is here
        with pytest.raises(NoSuchData):
            kept.find("team", gone.handle)
        kept.close()
        assert kept.room.used_bytes == 0


@virtually
async def test_data_is_brought_to_safety_when_its_model_is_evicted() -> None:
    kept, data = parts()
    async with world(gpu_mib=300, features=[data]) as it:
        first, second = it.add(100), it.add(101)
        held, hosted = await it.hold(first)
        there = InMemoryData(hosted)
        item = published(it, data, there)
        it.driver.release(held.id)
        await it.hold(second)
        assert first not in it.residents()
        content, descriptor = read(kept.find("team", item.handle))
        assert content == CONTENT
        assert item.hosted is None
        os.close(descriptor)
        kept.close()


@virtually
async def test_model_leaves_all_the_same_when_there_is_no_room_for_its_data() -> None:
    async with world() as it:
        kept, data = parts(memory_bytes=8 * MIB)
        _, hosted = await it.hold(it.add(10))
        there = InMemoryData(hosted)
        item = published(it, data, there)
        await kept.put("strangers", ONE, NewData(4 * MIB, b""))
        await kept.put("neighbours", ONE, NewData(4 * MIB, b""))
        await data.rescue(hosted)
        assert not item.is_here
        await hosted.unload()
        await asyncio.sleep(0)
        with pytest.raises(NoSuchData):
            kept.find("team", item.handle)
        kept.close()
