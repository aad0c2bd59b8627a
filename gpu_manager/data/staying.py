"""Data that stays with workers: put as granted, lent to others, or brought to host memory."""

import asyncio
import logging
import os
import stat
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from common.data_handles import LONGEST, SECRET_BYTES, around_secret, is_of_worker, node_of
from common.tasks import BackgroundTasks, error_of
from common.time_limits import time_limit
from gpu_manager.data.items import DataFile, DataItem, DataStage, read_only, withdraw
from gpu_manager.data.table import DataTable, NewData
from gpu_manager.errors import DataError, DataFailed, NoSuchData
from gpu_manager.node.leases import SessionKey
from gpu_manager.runtimes.runtime import HostedId, HostedModel, NodeFeature
from gpu_manager.worker.orders import (
    BorrowData,
    DataBorrowed,
    DataGivenBack,
    DataLent,
    DataPut,
    GrantData,
    GrantLeft,
    HandedOver,
    HandOver,
    LendData,
    RecallGrant,
    WorkerOrder,
)

log = logging.getLogger(__name__)

# A worker copies data when no call of its model runs. Who waits for it does so for so long at most.
_BRING_S = 10.0
# A model that is to leave its GPU waits for its data for so long at most.
_RESCUE_S = 3.0
_LEND_S = 10.0  # a worker lends data when no call of its model runs
_MOST_WISHES, _MOST_USES = 64, 4096  # of one borrower at a time
_MOST_TOKEN_BYTES = 64

_Uses = Counter[tuple[HostedModel, str]]


class LentData(NamedTuple):
    """How a process opens data that another one lends it: `devices/lent_memory.py`.

    The descriptor is None where the driver has a `token` for the memory.
    """

    size_bytes: int
    offset: int
    token: bytes
    descriptor: int | None


class _Borrowed(NamedTuple):
    """What a worker is lent, its description for its reader, and whether it is of the same GPU."""

    lent: LentData
    about: bytes
    same_gpu: bool


class WorkerData(NodeFeature):
    """Brings workers' data to memory, once for all who wait for it, and has workers lend it.

    Used on one loop.
    """

    def __init__(self, table: DataTable) -> None:
        self._table = table
        self._bringing: dict[DataItem, asyncio.Task[None]] = {}
        self._copied: dict[tuple[HostedId, str], asyncio.Future[bool]] = {}
        self._watched: set[HostedId] = set()
        self.grants = PutGrants(table)
        self._tasks = BackgroundTasks(log, "lending data")
        self._wishes: Counter[HostedId] = Counter()
        self._asked: dict[tuple[HostedId, str], deque[asyncio.Future[LentData | None]]] = {}
        self._uses: dict[HostedId, _Uses] = {}  # by borrower: whose data, by its handle

    def put(
        self, tenant: str, owner: SessionKey, new: NewData, hosted: HostedModel, handle: str = ""
    ) -> DataItem:
        """Note data whose bytes this model's worker has, until the model leaves.

        `handle` is one that the worker has made by itself.
        """
        item = self._table.put_on_worker(tenant, owner, new, hosted, handle)
        self._watch(hosted)
        self.grants.note_put(hosted, new.size_bytes)
        return item

    def reported(
        self, hosted: HostedModel, report: WorkerOrder, descriptors: Sequence[int]
    ) -> None:
        match report:
            case HandedOver(handle=handle, done=done):
                copied = self._copied.get((hosted.id, handle))
                if copied is not None and not copied.done():
                    copied.set_result(done)
            case BorrowData(handle=handle):
                self._wanted(hosted, handle)
            case DataGivenBack(handle=handle):
                self._given_back(hosted, handle)
            case DataPut():
                self._was_put(hosted, report)
            case GrantLeft(size_bytes=size_bytes, pieces=pieces):
                self.grants.left(hosted, size_bytes, pieces)
            case DataLent():
                self._lent(hosted, report, descriptors)
            case _:
                pass

    async def bring(self, item: DataItem) -> None:
        """Have the item's bytes in memory; NoSuchData if they are lost.

        DataFailed if the worker is slow: the copy goes on, and whoever asks later waits for it.
        """
        if item.is_here:
            return
        task = self._bringing.get(item)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._bring(item))
            self._bringing[item] = task
            task.add_done_callback(lambda _: self._bringing.pop(item, None))
            task.add_done_callback(error_of)  # those who wait for it may have left
        done, _ = await asyncio.wait({task}, timeout=_BRING_S)
        if not done:
            raise DataFailed("a worker did not hand over its data in time")
        await task

    async def rescue(self, hosted: HostedModel) -> None:
        """Bring what only this model's worker has, before the model leaves."""
        await self.grants.recall([hosted])
        items = self._table.on_worker(hosted)
        if not items:
            return
        try:
            async with time_limit(_RESCUE_S):
                for item in items:
                    try:
                        await self.bring(item)
                    except DataError as error:
                        log.warning("data on %s is lost: %s", hosted.order.gpu, error)
        except TimeoutError:
            log.warning("data on %s is lost: its worker was too slow", hosted.order.gpu)
        for item in items:
            if item.is_here and item.hosted is hosted:
                item.hosted = None
                withdraw(hosted, item.handle)

    async def close(self) -> None:
        self.grants.close()
        await self._tasks.close()
        tasks = list(self._bringing.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- reports --------------------------------------------------------------------------------

    def _was_put(self, hosted: HostedModel, put: DataPut) -> None:
        """Note data that a worker has put by itself, or have it withdraw what it may not."""
        tenant, handle = hosted.order.tenant, put.handle
        is_its_own = put.session.startswith(f"{tenant}/") and is_of_worker(handle, hosted.id)
        is_new = node_of(handle) == self._table.node and not self._table.knows(handle)
        if not (is_its_own and is_new and self.grants.take(hosted, put.size_bytes)):
            log.warning("worker %s has put what it may not", hosted.id)
            withdraw(hosted, handle)
            return
        new = NewData(put.size_bytes, put.about, put.lifetime_s)
        self.put(tenant, SessionKey(put.session), new, hosted, handle)

    def _wanted(self, borrower: HostedModel, handle: str) -> None:
        too_many = (
            self._wishes[borrower.id] >= _MOST_WISHES
            or self._uses_of(borrower).total() >= _MOST_USES
        )
        if too_many or len(handle) > LONGEST:
            _answer_wish(borrower, handle, None)
            return
        self._wishes[borrower.id] += 1
        self._tasks.start(self._answer(borrower, handle))

    def _lent(self, lender: HostedModel, answer: DataLent, descriptors: Sequence[int]) -> None:
        """A worker has answered; its data is given back at once if nobody waits any more.

        It lends memory by one descriptor, or by a token of a driver.
        """
        handle = answer.handle
        is_lent = answer.done and len(descriptors) + bool(answer.token) == 1
        waiting = self._asked.get((lender.id, handle), ())
        asked = next((future for future in waiting if not future.done()), None)
        if asked is not None:
            asked.set_result(_kept(answer, descriptors) if is_lent else None)
        elif is_lent:
            _give_back(lender, handle)

    def _given_back(self, borrower: HostedModel, handle: str) -> None:
        """A worker uses data once less; what it has not borrowed counts for nothing."""
        uses = self._uses_of(borrower)
        found = next((use for use in uses if use[1] == handle), None)
        if found is None:
            return
        uses[found] -= 1
        if not uses[found]:
            del uses[found]
        _give_back(found[0], handle)

    async def _bring(self, item: DataItem) -> None:
        hosted = item.hosted
        if hosted is None or hosted.closed.done():
            raise NoSuchData
        file = await self._table.file_for(item)
        try:
            copied = await self._copy(hosted, item, file)
        except BaseException:
            self._table.room.unread(file)
            raise
        if not copied or item.stage is DataStage.GONE:
            self._table.room.unread(file)
            self._table.end(item)
            raise NoSuchData
        self._table.brought(item, file)

    async def _copy(self, hosted: HostedModel, item: DataItem, file: DataFile) -> bool:
        """Whether the worker has copied the bytes to the file; False if it ends before.

        However long it takes: the answer says nothing about which file it is for, so no other copy
        of the same data may begin before.
        """
        key = hosted.id, item.handle
        copied: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._copied[key] = copied
        descriptor = file.for_writer()
        try:
            hosted.send(HandOver(hosted.number, item.handle, item.size_bytes), [descriptor])
            waits: Iterable[asyncio.Future[object]] = [copied, hosted.closed]  # type: ignore[list-item] # of any result
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            return copied.done() and copied.result()
        finally:
            os.close(descriptor)
            del self._copied[key]

    def _watch(self, hosted: HostedModel) -> None:
        if hosted.id not in self._watched:
            self._watched.add(hosted.id)
            hosted.closed.add_done_callback(lambda _: self._closed(hosted))

    def _closed(self, hosted: HostedModel) -> None:
        """The model has left: what it did not hand over is lost."""
        self._watched.discard(hosted.id)
        for item in self._table.on_worker(hosted):
            item.hosted = None
            if not item.is_here:
                log.info("data of %s was lost with its worker", item.tenant)
                self._table.end(item)

    # -- lending --------------------------------------------------------------------------------
    #
    # From worker to worker of a tenant: the manager says who may open what, and knows who does. No
    # function learns how memory of a GPU is opened: what a driver takes for it could be forged,
    # and would open another tenant's.

    async def _answer(self, borrower: HostedModel, handle: str) -> None:
        borrowed: _Borrowed | None = None
        try:
            borrowed = await self._borrow(borrower, handle)
        finally:
            self._wishes[borrower.id] -= 1
            if not self._wishes[borrower.id]:
                del self._wishes[borrower.id]
            _answer_wish(borrower, handle, borrowed)
            if borrowed is not None:
                _close(borrowed.lent)

    async def _borrow(self, borrower: HostedModel, handle: str) -> _Borrowed | None:
        """Have the data's worker lend it; None if it is not to be had, or is lost meanwhile."""
        await self.grants.settle(borrower.order.tenant, handle)
        item = self._find(borrower, handle)
        lender = None if item is None else item.hosted
        if item is None or lender is None or lender.closed.done():
            return None
        lent = await self._ask(lender, borrower, handle)
        if lent is None:
            return None
        is_sound = lent.size_bytes == item.size_bytes and len(lent.token) <= _MOST_TOKEN_BYTES
        if not is_sound or borrower.closed.done() or self._find(borrower, handle) is None:
            _close(lent)
            _give_back(lender, handle)
            return None
        self._note_use(borrower, lender, handle)
        return _Borrowed(lent, item.about, borrower.order.gpu == lender.order.gpu)

    def _find(self, borrower: HostedModel, handle: str) -> DataItem | None:
        with suppress(NoSuchData):
            return self._table.find(borrower.order.tenant, handle)
        return None

    async def _ask(
        self, lender: HostedModel, borrower: HostedModel, handle: str
    ) -> LentData | None:
        asked: asyncio.Future[LentData | None] = asyncio.get_running_loop().create_future()
        key = lender.id, handle
        waiting = self._asked.setdefault(key, deque())
        waiting.append(asked)
        lender.send(LendData(lender.number, handle))
        try:
            ends = asked, lender.closed, borrower.closed
            await asyncio.wait(ends, timeout=_LEND_S, return_when=asyncio.FIRST_COMPLETED)
            return asked.result() if asked.done() else None
        except asyncio.CancelledError:
            if asked.done() and (lent := asked.result()) is not None:
                _close(lent)
                _give_back(lender, handle)
            raise
        finally:
            waiting.remove(asked)
            if not waiting:
                del self._asked[key]

    def _uses_of(self, borrower: HostedModel) -> _Uses:
        """What this model's worker has borrowed and not given back."""
        return self._uses.get(borrower.id, Counter())

    def _note_use(self, borrower: HostedModel, lender: HostedModel, handle: str) -> None:
        uses = self._uses.get(borrower.id)
        if uses is None:
            uses = self._uses[borrower.id] = Counter()
            borrower.closed.add_done_callback(lambda _: self._left(borrower))
        uses[lender, handle] += 1

    def _left(self, borrower: HostedModel) -> None:
        for (lender, handle), count in self._uses.pop(borrower.id, Counter()).items():
            for _ in range(count):
                _give_back(lender, handle)


def _give_back(lender: HostedModel, handle: str) -> None:
    """Data that the worker lent is used once less; the model waits for it before it leaves."""
    lender.send(DataGivenBack(lender.number, handle), while_leaving=True)


def _answer_wish(borrower: HostedModel, handle: str, found: _Borrowed | None) -> None:
    if found is None:
        borrower.send(DataBorrowed(borrower.number, handle, False, 0, 0, b"", b"", False))
        return
    size_bytes, offset, token, descriptor = found.lent
    place = borrower.number, handle, True, size_bytes, offset, token
    descriptors = [] if descriptor is None else [descriptor]
    borrower.send(DataBorrowed(*place, found.about, found.same_gpu), descriptors)


def _kept(lent: DataLent, descriptors: Sequence[int]) -> LentData:
    """What is lent, with a descriptor of our own, which allows reading only.

    What is no file has a size that no data has, and is given back.
    """
    size_bytes, descriptor = lent.size_bytes, None
    for given in descriptors:
        try:
            is_file = stat.S_ISREG(os.fstat(given).st_mode)
            descriptor = read_only(given) if is_file else None
        except OSError as error:
            log.warning("what a worker lends cannot be opened: %s", error)
        if descriptor is None:
            size_bytes = -1
    return LentData(size_bytes, lent.offset, lent.token, descriptor)


def _close(lent: LentData) -> None:
    if lent.descriptor is not None:
        os.close(lent.descriptor)


# What functions may put with workers without asking: set aside ahead, topped up, recalled.
#
# A put then is one message to the worker, which makes the handle. Its report may come after
# somebody has asked for the data: then what the worker has said up to now is read first.

# A worker has room for so many more puts as large as its largest one, as far as the tenant has it.
_PUTS = 4
_PIECES = 32
_RECALL_S = 2.0  # a put that has begun waits for a call of its model
_HEARD_S = 2.0


@dataclass(slots=True, eq=False)
class _Grant:
    """What one model's worker has left, and the largest put so far."""

    size_bytes: int = 0
    pieces: int = 0
    largest_bytes: int = 0
    used_s: float = 0.0
    recalls: list[asyncio.Future[None]] = field(default_factory=list)


class PutGrants:
    """The grants of all workers. Used on one loop."""

    def __init__(self, table: DataTable) -> None:
        self._table = table
        self._grants: dict[HostedModel, _Grant] = {}
        self._loop = asyncio.get_running_loop()
        self._looking: asyncio.TimerHandle | None = None

    def note_put(self, hosted: HostedModel, size_bytes: int) -> None:
        """A model's worker has data more: let later puts of this size do without asking."""
        grant = self._grants.get(hosted)
        if grant is None:
            grant = self._grants[hosted] = _Grant()
            hosted.closed.add_done_callback(lambda _: self._end(hosted))
        grant.used_s = self._loop.time()
        grant.largest_bytes = max(grant.largest_bytes, size_bytes)
        few = grant.size_bytes < 2 * grant.largest_bytes or grant.pieces < _PIECES // 2
        if few and not grant.recalls:
            self._top_up(hosted, grant)
        self._look_later()

    def take(self, hosted: HostedModel, size_bytes: int) -> bool:
        """A worker says that it has put so much by itself; whether it may."""
        grant = self._grants.get(hosted)
        if grant is None or not grant.pieces or size_bytes > grant.size_bytes:
            return False
        self._release(hosted, grant, size_bytes, 1)
        return True

    def left(self, hosted: HostedModel, size_bytes: int, pieces: int) -> None:
        """A worker puts nothing more by itself, and this is left of its grant."""
        grant = self._grants.get(hosted)
        if grant is None:
            return
        self._release(hosted, grant, min(size_bytes, grant.size_bytes), min(pieces, grant.pieces))
        for recall in grant.recalls:
            if not recall.done():
                recall.set_result(None)
        grant.recalls.clear()

    async def recall(self, hosted_models: Iterable[HostedModel]) -> None:
        """Have these models' workers put nothing more by themselves, and their reports read."""
        recalls = []
        for hosted in hosted_models:
            grant = self._grants.get(hosted)
            if grant is not None:
                recalls.append(self._loop.create_future())
                grant.recalls.append(recalls[-1])
                hosted.send(RecallGrant(hosted.number))
        if recalls:
            await asyncio.wait(recalls, timeout=_RECALL_S)

    async def recall_of(self, tenant: str) -> bool:
        """The same of all workers of a tenant; whether that set bytes or pieces free."""
        before = self._table.set_aside_for(tenant)
        await self.recall([model for model in self._grants if model.order.tenant == tenant])
        return self._table.set_aside_for(tenant) != before

    async def settle(self, tenant: str, handle: str) -> None:
        """Have the table know this data, if a worker of the tenant has put it and said so."""
        if not self.may_come(tenant, handle):
            return
        reading = [model.heard() for model in self._grants if _may_have_put(model, tenant, handle)]
        try:
            async with time_limit(_HEARD_S):
                await asyncio.gather(*reading)
        except TimeoutError:
            log.warning("a worker of %s does not answer", tenant)

    def may_come(self, tenant: str, handle: str) -> bool:
        """Whether a worker may have put data of which its report has not been read."""
        if self._table.knows(handle):
            return False
        return any(_may_have_put(model, tenant, handle) for model in self._grants)

    def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()

    def _top_up(self, hosted: HostedModel, grant: _Grant) -> None:
        pieces = _PIECES - grant.pieces
        for puts in (_PUTS, _PUTS // 2, 1):
            size_bytes = max(0, puts * grant.largest_bytes - grant.size_bytes)
            if self._table.set_aside(hosted.order.tenant, size_bytes, pieces):
                grant.size_bytes += size_bytes
                grant.pieces += pieces
                before, behind = around_secret(self._table.node, hosted.id)
                handle = before, SECRET_BYTES, behind
                hosted.send(GrantData(hosted.number, *handle, size_bytes, pieces))
                return

    def _release(self, hosted: HostedModel, grant: _Grant, size_bytes: int, pieces: int) -> None:
        grant.size_bytes -= size_bytes
        grant.pieces -= pieces
        self._table.release(hosted.order.tenant, size_bytes, pieces)

    def _end(self, hosted: HostedModel) -> None:
        grant = self._grants.get(hosted)
        if grant is not None:
            self.left(hosted, grant.size_bytes, grant.pieces)
            del self._grants[hosted]

    def _look_later(self) -> None:
        if self._looking is None:
            self._looking = self._loop.call_later(self._table.limits.free_s, self._look)

    def _look(self) -> None:
        self._looking = None
        before_s = self._loop.time() - self._table.limits.free_s
        for hosted, grant in self._grants.items():
            if grant.pieces and grant.used_s <= before_s:
                hosted.send(RecallGrant(hosted.number))
        if any(grant.pieces for grant in self._grants.values()):
            self._look_later()


def _may_have_put(hosted: HostedModel, tenant: str, handle: str) -> bool:
    return hosted.order.tenant == tenant and is_of_worker(handle, hosted.id)
