"""What functions may put with workers without asking: set aside ahead, topped up, recalled.

A put then is one message to the worker, which makes the handle. Its report may come after somebody
has asked for the data: then what the worker has said up to now is read first.
"""

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field

from common.data_handles import is_of_worker
from common.time_limits import time_limit
from gpu_manager.data.table import DataTable
from gpu_manager.runtimes.runtime import HostedModel

log = logging.getLogger(__name__)

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
                hosted.recall_grant()
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
                hosted.grant(self._table.node, size_bytes, pieces)
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
                hosted.recall_grant()
        if any(grant.pieces for grant in self._grants.values()):
            self._look_later()


def _may_have_put(hosted: HostedModel, tenant: str, handle: str) -> bool:
    return hosted.order.tenant == tenant and is_of_worker(handle, hosted.id)
