"""Data from worker to worker of a tenant: the manager says who may open what, and knows who does.

No function learns how memory of a GPU is opened: what a driver takes for it could be forged, and
would open another tenant's.
"""

import asyncio
import logging
import os
import stat
from collections import Counter, deque
from contextlib import suppress
from dataclasses import replace

from common.data_handles import LONGEST
from common.tasks import BackgroundTasks
from gpu_manager.data.data_files import read_only
from gpu_manager.data.data_item import DataItem
from gpu_manager.data.data_table import DataTable
from gpu_manager.data.put_grants import PutGrants
from gpu_manager.errors import NoSuchData
from gpu_manager.runtimes.runtime import BorrowedByCall, HostedId, HostedModel, LentData

log = logging.getLogger(__name__)

_LEND_S = 10.0  # a worker lends data when no call of its model runs
_MOST_WISHES, _MOST_USES = 64, 4096  # of one borrower at a time
_MOST_TOKEN_BYTES = 64

_Uses = Counter[tuple[HostedModel, str]]


class Lending:
    """What is lent between the workers of a node. Used on one loop."""

    def __init__(self, table: DataTable, grants: PutGrants) -> None:
        self._table = table
        self._grants = grants
        self._tasks = BackgroundTasks(log, "lending data")
        self._wishes: Counter[HostedId] = Counter()
        self._asked: dict[tuple[HostedId, str], deque[asyncio.Future[LentData | None]]] = {}
        self._uses: dict[HostedId, _Uses] = {}  # by borrower: whose data, by its handle

    def uses(self, borrower: HostedModel) -> int:
        """How much this model's worker has borrowed and not given back."""
        return self._uses.get(borrower.id, Counter()).total()

    def wanted(self, borrower: HostedModel, handle: str) -> None:
        """Have another worker lend its data to this one, and answer it."""
        too_many = self._wishes[borrower.id] >= _MOST_WISHES or self.uses(borrower) >= _MOST_USES
        if too_many or len(handle) > LONGEST:
            borrower.borrowed(handle, None)
            return
        self._wishes[borrower.id] += 1
        self._tasks.start(self._answer(borrower, handle))

    def lent(self, lender: HostedModel, handle: str, lent: LentData | None) -> None:
        """A worker has answered; its data is given back at once if nobody waits any more."""
        waiting = self._asked.get((lender.id, handle), ())
        asked = next((each for each in waiting if not each.done()), None)
        if asked is not None:
            asked.set_result(None if lent is None else _kept(lent))
        elif lent is not None:
            lender.given_back(handle)

    def given_back(self, borrower: HostedModel, handle: str) -> None:
        """A worker uses data once less; what it has not borrowed counts for nothing."""
        uses = self._uses.get(borrower.id, Counter())
        found = next((use for use in uses if use[1] == handle), None)
        if found is None:
            return
        uses[found] -= 1
        if not uses[found]:
            del uses[found]
        found[0].given_back(handle)

    async def close(self) -> None:
        """Answer nobody any more."""
        await self._tasks.close()

    async def _answer(self, borrower: HostedModel, handle: str) -> None:
        found: BorrowedByCall | None = None
        try:
            found = await self._borrow(borrower, handle)
        finally:
            self._wishes[borrower.id] -= 1
            if not self._wishes[borrower.id]:
                del self._wishes[borrower.id]
            borrower.borrowed(handle, found)
            if found is not None:
                _close(found.lent)

    async def _borrow(self, borrower: HostedModel, handle: str) -> BorrowedByCall | None:
        """Have the data's worker lend it; None if it is not to be had, or is lost meanwhile."""
        await self._grants.settle(borrower.order.tenant, handle)
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
            lender.given_back(handle)
            return None
        self._note_use(borrower, lender, handle)
        return BorrowedByCall(lent, item.about, borrower.order.gpu == lender.order.gpu)

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
        lender.lend(handle)
        try:
            ends = asked, lender.closed, borrower.closed
            await asyncio.wait(ends, timeout=_LEND_S, return_when=asyncio.FIRST_COMPLETED)
            return asked.result() if asked.done() else None
        except asyncio.CancelledError:
            if asked.done() and (lent := asked.result()) is not None:
                _close(lent)
                lender.given_back(handle)
            raise
        finally:
            waiting.remove(asked)
            if not waiting:
                del self._asked[key]

    def _note_use(self, borrower: HostedModel, lender: HostedModel, handle: str) -> None:
        uses = self._uses.get(borrower.id)
        if uses is None:
            uses = self._uses[borrower.id] = Counter()
            borrower.closed.add_done_callback(lambda _: self._left(borrower))
        uses[lender, handle] += 1

    def _left(self, borrower: HostedModel) -> None:
        """A model has left its worker, and uses nothing any more."""
        for (lender, handle), count in self._uses.pop(borrower.id, Counter()).items():
            for _ in range(count):
                lender.given_back(handle)


def _kept(lent: LentData) -> LentData:
    """The same with a descriptor of our own, which allows reading only.

    What is no file has a size that no data has, and is given back.
    """
    if lent.descriptor is None:
        return lent
    if not stat.S_ISREG(os.fstat(lent.descriptor).st_mode):
        return replace(lent, size_bytes=-1, descriptor=None)
    try:
        return replace(lent, descriptor=read_only(lent.descriptor))
    except OSError as error:
        log.warning("what a worker lends cannot be opened: %s", error)
        return replace(lent, size_bytes=-1, descriptor=None)


def _close(lent: LentData) -> None:
    if lent.descriptor is not None:
        os.close(lent.descriptor)
