"""Data that stays with workers: brought to host memory when others need it, or its worker ends."""

import asyncio
import logging
import os
from collections.abc import Iterable

from common.data_handles import is_of_worker, node_of
from common.tasks import error_of
from common.time_limits import time_limit
from gpu_manager.data.data_files import DataFile
from gpu_manager.data.data_item import DataItem, DataStage
from gpu_manager.data.data_table import DataTable, NewData
from gpu_manager.data.lending import Lending
from gpu_manager.data.put_grants import PutGrants
from gpu_manager.errors import DataError, DataFailed, NoSuchData
from gpu_manager.node.leases_in_force import SessionKey
from gpu_manager.runtimes.runtime import HostedId, HostedModel, LentData, PutByWorker

log = logging.getLogger(__name__)

# A worker copies data when no call of its model runs. Who waits for it does so for so long at most.
_BRING_S = 10.0
# A model that is to leave its GPU waits for its data for so long at most.
_RESCUE_S = 3.0


class WorkerData:
    """Brings workers' data to memory, once for all who wait for it."""

    def __init__(self, table: DataTable) -> None:
        self._table = table
        self._bringing: dict[DataItem, asyncio.Task[None]] = {}
        self._copied: dict[tuple[HostedId, str], asyncio.Future[bool]] = {}
        self._watched: set[HostedId] = set()
        self.grants = PutGrants(table)
        self._lending = Lending(table, self.grants)

    def put(self, tenant: str, owner: SessionKey, new: NewData, hosted: HostedModel) -> DataItem:
        """Note data whose bytes this model's worker has, until the model leaves."""
        item = self._table.put_on_worker(tenant, owner, new, hosted)
        self._watch(hosted)
        self.grants.note_put(hosted, new.size_bytes)
        return item

    def was_put(self, hosted: HostedModel, put: PutByWorker) -> None:
        """Note data that a worker has put by itself, or have it withdraw what it may not."""
        tenant, handle = hosted.order.tenant, put.handle
        is_its_own = put.session.startswith(f"{tenant}/") and is_of_worker(handle, hosted.id)
        is_new = node_of(handle) == self._table.node and not self._table.knows(handle)
        if not (is_its_own and is_new and self.grants.take(hosted, put.size_bytes)):
            log.warning("worker %s has put what it may not", hosted.id)
            hosted.withdraw(handle)
            return
        new = NewData(put.size_bytes, put.about, put.lifetime_s)
        self._table.was_put(SessionKey(put.session), new, hosted, handle)
        self._watch(hosted)
        self.grants.note_put(hosted, put.size_bytes)

    def grant_left(self, hosted: HostedModel, size_bytes: int, pieces: int) -> None:
        """A worker puts nothing more by itself."""
        self.grants.left(hosted, size_bytes, pieces)

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
                hosted.withdraw(item.handle)

    def handed_over(self, hosted: HostedModel, handle: str, *, done: bool) -> None:
        """A worker has copied data to the file that it was given, or has not got it."""
        copied = self._copied.get((hosted.id, handle))
        if copied is not None and not copied.done():
            copied.set_result(done)

    def wanted(self, hosted: HostedModel, handle: str) -> None:
        """A worker wants data that another one may have."""
        self._lending.wanted(hosted, handle)

    def lent(self, hosted: HostedModel, handle: str, lent: LentData | None) -> None:
        """A worker lends data, or cannot."""
        self._lending.lent(hosted, handle, lent)

    def given_back(self, hosted: HostedModel, handle: str) -> None:
        """A worker uses data of another one once less."""
        self._lending.given_back(hosted, handle)

    async def close(self) -> None:
        """Wait for no worker any more."""
        self.grants.close()
        await self._lending.close()
        tasks = list(self._bringing.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

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
            hosted.hand_over(item.handle, item.size_bytes, descriptor)
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
