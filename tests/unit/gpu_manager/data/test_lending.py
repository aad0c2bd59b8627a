"""Data from worker to worker: who may have it, and what becomes of it when either side ends."""

import asyncio
import os

import pytest

from gpu_manager.data import staying
from gpu_manager.data.items import DataItem
from gpu_manager.data.staying import WorkerData
from gpu_manager.data.table import DataTable, NewData
from gpu_manager.worker.orders import BorrowData, DataBorrowed, DataGivenBack, DataLent
from tests.kit.nodes.in_memory_data import InMemoryData
from tests.kit.nodes.in_memory_runtime import InMemoryHosted
from tests.kit.processes.open_files import open_files
from tests.kit.virtual_time import virtually
from tests.kit.worlds.gpu_node import World, world
from tests.unit.gpu_manager.data.data_world import MIB, ONE, table

CONTENT = b"c" * MIB


class Lenders:
    """Two models of a tenant in processes of their own, of which the first has data."""

    def __init__(self, it: World, lender: InMemoryHosted, borrower: InMemoryHosted) -> None:
        self.table: DataTable = table()
        self.data = WorkerData(self.table)
        it.node.features = [self.data]
        self.lender, self.borrower = InMemoryData(lender), InMemoryData(borrower)
        new = NewData(len(CONTENT), b"about")
        self.item: DataItem = self.data.put(lender.order.tenant, ONE, new, lender)
        self.lender.content[self.item.handle] = CONTENT

    @property
    def handle(self) -> str:
        return self.item.handle

    def wish(self, handle: str = "") -> None:
        borrower = self.borrower.hosted
        borrower.report(BorrowData(borrower.number, handle or self.handle))

    def give_back(self) -> None:
        borrower = self.borrower.hosted
        borrower.report(DataGivenBack(borrower.number, self.handle))

    async def wants(self, handle: str = "") -> None:
        """The borrower asks, and the manager has the time to ask the lender."""
        self.wish(handle)
        await asyncio.sleep(0.01)

    async def borrowed(self, handle: str = "") -> DataBorrowed:
        """What the borrower is answered."""
        answers = len(self.borrower.answers)
        await self.wants(handle)
        assert len(self.borrower.answers) == answers + 1
        return self.borrower.answers[-1]

    @property
    def are_refused(self) -> list[bool]:
        """Whether each wish up to now was refused."""
        return [not answer.done for answer in self.borrower.answers]

    def close(self) -> None:
        self.table.close()


async def lenders(it: World) -> Lenders:
    _, lender = await it.hold(it.add(10))
    _, borrower = await it.hold(it.add(11))
    return Lenders(it, lender, borrower)


@virtually
async def test_worker_gets_what_another_one_lends_and_it_is_used_until_given_back() -> None:
    async with world() as it:
        found = await lenders(it)
        answer = await found.borrowed()
        lent = True, MIB, 0, b"token", b"about", True
        assert answer == DataBorrowed(found.borrower.hosted.number, found.handle, *lent)
        assert found.lender.lent[found.handle] == 1

        found.table.end(found.item)  # who uses it goes on
        assert found.lender.lent[found.handle] == 1
        assert not (await found.borrowed()).done

        found.give_back()
        assert found.lender.lent[found.handle] == 0
        found.give_back()  # it counts for nothing
        assert found.lender.lent[found.handle] == 0
        found.close()


@virtually
async def test_nothing_is_lent_to_another_tenant_by_a_forged_handle_or_without_a_worker() -> None:
    async with world() as it:
        found = await lenders(it)
        stranger = found.table.put_on_worker("strangers", ONE, NewData(4, b""), found.lender.hosted)
        for handle in (stranger.handle, found.handle[:-1] + "!", "nonsense", "n" * 10_000):
            assert not (await found.borrowed(handle)).done
        here = await found.table.put(found.lender.hosted.order.tenant, ONE, NewData(4, b""))
        assert not (await found.borrowed(here.handle)).done
        found.lender.content.clear()  # the worker has not got it
        assert not (await found.borrowed()).done
        assert not found.lender.lent.total()
        found.close()


@virtually
async def test_uses_of_a_worker_that_ends_are_given_back() -> None:
    async with world() as it:
        found = await lenders(it)
        await found.borrowed()
        await found.borrowed()
        assert found.lender.lent[found.handle] == 2
        found.borrower.hosted.die()
        await asyncio.sleep(0)
        assert found.lender.lent[found.handle] == 0
        found.close()


@pytest.mark.parametrize("ends", ["lender", "borrower"])
@virtually
async def test_wish_ends_when_a_worker_does(ends: str) -> None:
    async with world() as it:
        found = await lenders(it)
        found.lender.hosted.hangs = True
        await found.wants()
        (found.lender if ends == "lender" else found.borrower).hosted.die()
        await asyncio.sleep(0.01)
        assert found.are_refused == [True]
        found.close()


@virtually
async def test_what_is_lent_too_late_is_given_back() -> None:
    async with world() as it:
        found = await lenders(it)
        found.lender.hosted.hangs = True
        found.wish()
        await asyncio.sleep(11.0)
        assert found.are_refused == [True]
        found.lender.lend(found.handle, MIB)
        assert found.lender.lent[found.handle] == 0
        found.close()


@virtually
async def test_lender_that_names_another_size_or_too_long_a_token_lends_nothing() -> None:
    async with world() as it:
        found = await lenders(it)
        found.lender.hosted.hangs = True
        for size_bytes, token in ((MIB + 1, b"t"), (MIB, b"t" * 65)):
            await found.wants()
            found.lender.lend(found.handle, size_bytes, token)
            await asyncio.sleep(0.01)
            assert found.are_refused[-1]
            assert found.lender.lent[found.handle] == 0
        found.close()


@virtually
async def test_descriptors_of_what_is_lent_are_closed_by_who_made_them() -> None:
    async with world() as it:
        found = await lenders(it)
        found.lender.hosted.hangs = True
        ours = os.memfd_create("lent-by-test")
        for size_bytes in (MIB, MIB + 1):
            await found.wants()
            number = found.lender.hosted.number
            lent = DataLent(number, found.handle, True, size_bytes, 0, b"")
            found.lender.hosted.report(lent, [ours])
            await asyncio.sleep(0.01)
        assert sum("lent-by-test" in target for _, target in open_files()) == 1
        os.close(ours)
        found.close()


@virtually
async def test_more_wishes_at_once_than_a_worker_may_have_are_refused() -> None:
    async with world() as it:
        found = await lenders(it)
        found.lender.hosted.hangs = True
        most = staying._MOST_WISHES  # noqa: SLF001 - the bound itself
        for _ in range(most + 3):
            found.wish()
        assert len(found.borrower.answers) == 3
        found.lender.hosted.die()
        await asyncio.sleep(0.01)
        assert len(found.borrower.answers) == most + 3
        found.close()
