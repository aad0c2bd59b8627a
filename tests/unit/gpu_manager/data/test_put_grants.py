"""What workers may put by themselves: within the tenant's bounds, to the byte, and never lost."""

import asyncio

import pytest

from gpu_manager.data.staying import WorkerData
from gpu_manager.data.table import DataTable, NewData
from gpu_manager.errors import NoRoomForData, NoSuchData
from gpu_manager.worker.orders import DataPut
from tests.kit.nodes.in_memory_data import InMemoryData
from tests.kit.nodes.in_memory_runtime import InMemoryHosted
from tests.kit.virtual_time import virtually
from tests.kit.worlds.gpu_node import World, world
from tests.unit.gpu_manager.data.data_world import MIB, ONE, table


class Putting:
    """A model whose functions put data, of a tenant that may have 64 MiB."""

    def __init__(self, it: World, hosted: InMemoryHosted) -> None:
        self.table: DataTable = table(memory_bytes=128 * MIB)
        self.data = WorkerData(self.table)
        it.node.features = [self.data]
        self.hosted = hosted
        self.worker = InMemoryData(hosted)
        self.tenant = hosted.order.tenant
        self.puts = 0

    def ask(self, size_bytes: int = MIB) -> str:
        """A put of which the manager is asked."""
        new = NewData(size_bytes, b"")
        return self.data.put(self.tenant, ONE, new, self.hosted).handle

    def alone(self, size_bytes: int = MIB, *, handle: str = "", session: str = "") -> str:
        """A put by the worker, which the manager has not heard of."""
        self.puts += 1
        handle = handle or f"node.{self.puts:028}{self.hosted.id[:4]}"
        session = session or f"{self.tenant}/f/s"
        self.worker.content[handle] = bytes(size_bytes)
        put = DataPut(self.hosted.number, session, handle, size_bytes, b"about", None)
        self.worker.unsaid.append(put)
        granted_bytes, pieces = self.worker.granted
        self.worker.granted = granted_bytes - size_bytes, pieces - 1
        return handle

    @property
    def aside(self) -> tuple[int, int]:
        return self.table.set_aside_for(self.tenant)

    async def close(self) -> None:
        await self.data.close()
        self.table.close()


async def putting(it: World) -> Putting:
    _, hosted = await it.hold(it.add(10))
    return Putting(it, hosted)


@virtually
async def test_worker_may_put_more_of_what_was_put_and_accounts_are_to_the_byte() -> None:
    async with world() as it:
        found = await putting(it)
        assert found.aside == (0, 0)
        found.ask()
        assert found.worker.granted == found.aside == (4 * MIB, 32)
        handle = found.alone(MIB - 1)
        await found.hosted.heard()
        item = found.table.find(found.tenant, handle)
        assert (item.size_bytes, item.about, item.hosted) == (MIB - 1, b"about", found.hosted)
        assert found.table.bytes_of(found.tenant) == 2 * MIB - 1
        assert found.worker.granted == found.aside == (3 * MIB + 1, 31)
        for _ in range(40):  # it is topped up
            found.alone()
            await found.hosted.heard()
        assert found.worker.granted == found.aside
        assert found.table.bytes_of(found.tenant) == 42 * MIB - 1
        await found.close()


@virtually
async def test_data_is_found_before_the_manager_has_heard_of_it() -> None:
    async with world() as it:
        found = await putting(it)
        found.ask()
        handle = found.alone()
        grants = found.data.grants
        assert grants.may_come(found.tenant, handle)
        assert not grants.may_come("strangers", handle)
        assert not grants.may_come(found.tenant, handle[:-4] + "????")
        await grants.settle("strangers", handle)
        assert not found.table.knows(handle)
        await grants.settle(found.tenant, handle)
        assert found.table.find(found.tenant, handle).size_bytes == MIB
        assert not grants.may_come(found.tenant, handle)
        await found.close()


@pytest.mark.parametrize(
    ("handle", "session"),
    [
        ("other.{secret}{tag}", ""),
        ("node.{secret}????", ""),
        ("nonsense", ""),
        ("", "strangers/f/s"),
    ],
)
@virtually
async def test_worker_puts_only_its_own_tenants_data_under_its_own_handles(
    handle: str, session: str
) -> None:
    async with world() as it:
        found = await putting(it)
        found.ask()
        handle = handle.format(secret="h" * 28, tag=found.hosted.id[:4])
        handle = found.alone(handle=handle, session=session)
        await found.hosted.heard()
        assert not found.table.knows(handle)
        assert handle not in found.worker.content  # it was told to withdraw it
        await found.close()


@virtually
async def test_worker_puts_nothing_without_a_grant_beyond_it_or_twice() -> None:
    async with world() as it:
        found = await putting(it)
        nothing = found.alone()
        await found.hosted.heard()
        assert not found.table.knows(nothing)
        first = found.ask()
        large = found.alone(4 * MIB + 1)
        found.alone(handle=first)
        await found.hosted.heard()
        assert not found.table.knows(large)
        assert found.table.find(found.tenant, first).about == b""
        assert found.aside == (4 * MIB, 32)
        await found.close()


@virtually
async def test_grants_take_a_quarter_of_a_tenants_bounds_at_most() -> None:
    async with world() as it:
        found = await putting(it)
        found.ask(12 * MIB)
        assert found.aside == (12 * MIB, 32)  # of 64; four times as much would be too much
        assert found.table.set_aside("strangers", 16 * MIB, 32)
        assert not found.table.set_aside("strangers", 1, 0)
        found.table.release("strangers", 16 * MIB, 32)
        await found.close()


@virtually
async def test_put_that_finds_no_room_has_what_was_set_aside() -> None:
    async with world() as it:
        found = await putting(it)
        found.ask(4 * MIB)
        assert found.aside == (16 * MIB, 32)
        handle = found.alone(4 * MIB)  # the worker says so before it says what is left
        with pytest.raises(NoRoomForData):
            found.ask(48 * MIB)
        assert await found.data.grants.recall_of(found.tenant)
        assert found.aside == (0, 0)
        assert found.table.knows(handle)
        found.ask(48 * MIB)
        assert not await found.data.grants.recall_of("strangers")
        await found.close()


@virtually
async def test_grant_that_is_not_used_is_recalled_and_the_next_one_comes_with_the_next_put() -> (
    None
):
    async with world() as it:
        found = await putting(it)
        found.ask()
        await asyncio.sleep(25.0)
        assert found.worker.granted == found.aside == (0, 0)
        found.ask()
        assert found.worker.granted == found.aside == (4 * MIB, 32)
        await found.close()


@virtually
async def test_grant_ends_with_its_worker() -> None:
    async with world() as it:
        found = await putting(it)
        handle = found.ask()
        found.hosted.die()
        await asyncio.sleep(0.01)
        assert found.aside == (0, 0)
        with pytest.raises(NoSuchData):
            found.table.find(found.tenant, handle)
        await found.close()


@virtually
async def test_worker_that_does_not_answer_keeps_nobody_waiting_for_long() -> None:
    async with world() as it:
        found = await putting(it)
        found.ask()
        found.hosted.hangs = True
        assert not await found.data.grants.recall_of(found.tenant)
        assert found.aside == (4 * MIB, 32)
        found.hosted.die()
        await asyncio.sleep(0.01)
        assert found.aside == (0, 0)
        await found.close()
