"""Handles a session's requests about data: put, pieces of it, get, drop, give back."""

import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from cache_manager.model.ids import NodeId
from common.data_handles import node_of
from gpu_manager.data.items import DataItem
from gpu_manager.data.staying import WorkerData
from gpu_manager.data.table import DataTable, NewData
from gpu_manager.errors import ClientNotAllowed, NoRoomForData, NoScheduler, NoSuchData
from gpu_manager.node.node import GpuNode
from gpu_manager.runtimes.runtime import HostedId, HostedModel
from gpu_manager.sessions.sessions import ClientSession, in_thread
from torch_shim.errors import BadFrame
from torch_shim.wire.frame_socket import Frame
from torch_shim.wire.messages import Get, Piece, Put
from torch_shim.wire.protocol import MAX_PIECE_BYTES

Answer = dict[str, Any]
# Returns the addresses of another node; none if it is unknown.
Locate = Callable[[NodeId], Awaitable[tuple[str, ...]]]
_MOST_ARRIVING = 4  # of one connection, in pieces


@dataclass(frozen=True, slots=True)
class NodeData:
    """The node's data of functions, and where other nodes' data is asked for."""

    node: GpuNode
    table: DataTable
    workers: WorkerData
    locate: Locate

    def end_session(self, session: ClientSession) -> None:
        self.table.end_session(session.key)

    async def close(self) -> None:
        await self.workers.close()
        self.table.close()


class DataRequests:
    """The requests of one connection; `local` clients get descriptors instead of bytes."""

    def __init__(self, data: NodeData, session: ClientSession, *, local: bool) -> None:
        self._data = data
        self._table = data.table
        self._key = session.key
        self._tenant = session.identity.tenant
        self._local = local
        self._arriving: dict[str, int] = {}  # bytes that have come, by handle

    @property
    def arriving(self) -> bool:
        return bool(self._arriving)

    async def put(self, asked: Put) -> tuple[Answer, tuple[int, ...]]:
        """Make room for data, or note data that a worker has; return the handle."""
        parts = tuple(asked.parts)
        new = NewData(asked.size, asked.about, asked.lifetime_s, parts, asked.wished)
        for part in parts:
            await self._settle(part)
        try:
            return await self._put(new, asked.worker)
        except NoRoomForData:
            if not await self._data.workers.grants.recall_of(self._tenant):
                raise
        return await self._put(new, asked.worker)

    async def _put(self, new: NewData, worker: str | None) -> tuple[Answer, tuple[int, ...]]:
        if worker is not None:
            hosted = self._hosted(HostedId(worker))
            item = self._data.workers.put(self._tenant, self._key, new, hosted)
            return {"handle": item.handle}, ()
        if not self._local and len(self._arriving) >= _MOST_ARRIVING:
            raise ClientNotAllowed(f"{_MOST_ARRIVING} pieces of data have not arrived yet")
        item = await self._table.put(self._tenant, self._key, new)
        assert item.file is not None, "data that arrives has a file"
        if self._local:
            return {"handle": item.handle}, (item.file.for_writer(),)
        self._arriving[item.handle] = 0
        return {"handle": item.handle}, ()

    async def piece(self, frame: Frame, asked: Piece) -> Answer:
        """Take a piece of data; after the last one it may be read. A local client sends none."""
        handle = asked.handle
        item = self._table.arriving(self._tenant, self._key, handle)
        if not self._local:
            await self._write(item, asked.offset, frame.body)
        if not asked.last:
            return {}
        came = self._arriving.pop(handle, None)
        if came is not None and came != item.size_bytes:
            self._table.end(item)
            raise BadFrame(f"data of {item.size_bytes} bytes ended after {came}")
        self._table.filled(item)
        return {}

    def waits(self, handle: str, *, here: bool = False) -> bool:
        """Whether a request about data may wait: for a worker, a disk, or the scheduler."""
        near = node_of(handle) == self._data.node.name
        comes = self._data.workers.grants.may_come(self._tenant, handle)
        return comes or not (near and self._local) or here

    async def get(self, asked: Get) -> tuple[Answer, tuple[int, ...], bytes | None]:
        """Return what data is, with a descriptor or a piece of it if it is `here`."""
        handle = asked.handle
        node = NodeId(node_of(handle) or "")
        if node != self._data.node.name:
            return {"elsewhere": await self._elsewhere(node)}, (), None
        await self._settle(handle)
        item = self._table.find(self._tenant, handle)
        if not item.is_here and asked.here:
            await self._data.workers.bring(item)
            item = self._table.find(self._tenant, handle)
        answer: Answer = {"size": item.size_bytes, "about": item.about}
        if item.hosted is not None:
            answer["worker"] = item.hosted.id
        if not item.is_here:
            return answer, (), None
        if self._local:
            return answer | {"start": 0}, (item.for_reader(self._key),), None
        content = None if asked.offset is None else await self._read(item, asked.offset)
        return answer, (), content

    async def drop(self, handle: str) -> None:
        """End data, if it is this tenant's."""
        await self._settle(handle)
        self._table.drop(self._tenant, handle)

    def give_back(self, handle: str) -> None:
        self._table.give_back(self._tenant, self._key, handle)

    def close(self) -> None:
        for handle in self._arriving:
            self._table.drop(self._tenant, handle)
        self._arriving.clear()

    async def _settle(self, handle: str) -> None:
        """Have the table know data that a worker has put by itself a moment ago."""
        await self._data.workers.grants.settle(self._tenant, handle)

    def _hosted(self, name: HostedId) -> HostedModel:
        """Return the model whose worker has the data; ClientNotAllowed for another tenant's."""
        hosted = self._data.node.hosted(name)
        if hosted.order.tenant != self._tenant:
            raise ClientNotAllowed(f"worker {name} is not this namespace's")
        return hosted

    async def _elsewhere(self, node: NodeId) -> Answer:
        try:
            addresses = await self._data.locate(node) if node else ()
        except NoScheduler as error:
            raise NoSuchData from error
        if not addresses:
            raise NoSuchData
        return {"node": node, "addresses": list(addresses)}

    async def _write(self, item: DataItem, offset: int | None, body: memoryview) -> None:
        came = self._arriving.get(item.handle)
        if offset is None or offset != came or offset + len(body) > item.size_bytes:
            self._table.end(item)
            self._arriving.pop(item.handle, None)
            raise BadFrame("pieces of data come in order, and are as long as was said")
        assert item.file is not None, "data that arrives has a file"
        descriptor = item.file.for_writer()  # the item may end meanwhile
        try:
            await in_thread(lambda: _write_all(descriptor, body, offset))
        finally:
            os.close(descriptor)
        if item.handle in self._arriving:
            self._arriving[item.handle] = came + len(body)

    async def _read(self, item: DataItem, offset: int) -> bytes:
        descriptor = item.for_reader(self._key)
        count = max(0, min(MAX_PIECE_BYTES, item.size_bytes - offset))
        try:
            return await in_thread(lambda: os.pread(descriptor, count, offset))
        finally:
            os.close(descriptor)
            self._table.give_back(self._tenant, self._key, item.handle)


def _write_all(descriptor: int, body: memoryview, offset: int) -> int:
    rest = body
    while rest:
        count = os.pwrite(descriptor, rest, offset)
        rest, offset = rest[count:], offset + count
    return offset
