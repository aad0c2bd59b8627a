"""The node's data of functions, and a session's requests about it: put, get, drop, give back."""

import os
from collections.abc import Iterator, Sequence
from typing import Any

from cache_manager.model.ids import NodeId
from common.data_handles import node_of
from common.telemetry.metrics import MetricFamily, gauge
from gpu_manager import metrics
from gpu_manager.data.items import DataItem, DataSpill
from gpu_manager.data.room import DataLimits, DataRoom
from gpu_manager.data.staying import WorkerData
from gpu_manager.data.table import DataTable, NewData
from gpu_manager.devices.host_memory import available_bytes
from gpu_manager.errors import ClientNotAllowed, NoRoomForData, NoScheduler, NoSuchData
from gpu_manager.node.node import GpuNode
from gpu_manager.runtimes.runtime import HostedId, HostedModel
from gpu_manager.server.requests import (
    ClientAnswer,
    FeatureRequests,
    ManagerFeature,
    ManagerSpace,
)
from gpu_manager.sessions.sessions import ClientSession, in_thread
from gpu_manager.worker.orders import WorkerOrder
from torch_shim.errors import BadFrame
from torch_shim.wire.messages import AboutData, Get, Piece, Put
from torch_shim.wire.protocol import MAX_PIECE_BYTES, Frame, FrameKind

Answer = dict[str, Any]
_MOST_ARRIVING = 4  # of one connection, in pieces
# By default functions' data has this fraction (1/N) of the free memory, and this of descriptors.
_SHARE = 8
_PIECES_SHARE, _LEAST_PIECES = 16, 64


class PassedData(ManagerFeature):
    """The node's data of functions, and where other nodes' data is asked for."""

    def __init__(self, manager: ManagerSpace) -> None:
        super().__init__(manager)
        self.table = _table(manager)
        self.workers = WorkerData(self.table)

    async def rescue(self, hosted: HostedModel) -> None:
        await self.workers.rescue(hosted)

    def reported(
        self, hosted: HostedModel, report: WorkerOrder, descriptors: Sequence[int]
    ) -> None:
        self.workers.reported(hosted, report, descriptors)

    def requests(self, session: ClientSession, node: GpuNode, *, local: bool) -> "DataRequests":
        return DataRequests(self, session, node, local=local)

    def end_session(self, session: ClientSession) -> None:
        self.table.end_session(session.key)

    def families(self) -> Iterator[MetricFamily]:
        kinds = self.table.bytes_by_place().items()
        yield gauge(metrics.DATA, [((kind,), float(size)) for kind, size in kinds])
        yield gauge(metrics.DATA_PIECES, [((), len(self.table))])

    async def close(self) -> None:
        await self.workers.close()
        self.table.close()


def _table(manager: ManagerSpace) -> DataTable:
    settings, spill = manager.settings, manager.settings.spill
    limits = DataLimits(
        memory_bytes=settings.data_memory_bytes or available_bytes() // _SHARE,
        disk_bytes=settings.data_disk_bytes if spill is not None else 0,
        most=max(_LEAST_PIECES, manager.descriptors // _PIECES_SHARE),
    )
    disk = None if spill is None else DataSpill(spill / "data", limits.disk_bytes)
    return DataTable(settings.node, limits, DataRoom(limits, disk))


class DataRequests(FeatureRequests):
    """The requests of one connection; `local` clients get descriptors instead of bytes."""

    def __init__(
        self, data: PassedData, session: ClientSession, node: GpuNode, *, local: bool
    ) -> None:
        self._data = data
        self._node = node
        self._table = data.table
        self._key = session.key
        self._tenant = session.identity.tenant
        self._local = local
        self._arriving: dict[str, int] = {}  # bytes that have come, by handle
        self.handlers = {
            FrameKind.PUT: self._put,
            FrameKind.GET: self._get,
            FrameKind.PIECE: self._piece,
            FrameKind.DISCARD: self._drop,
            FrameKind.RETURN: self._give_back,
        }

    def is_arriving(self) -> bool:
        return bool(self._arriving)

    def waits(self, kind: FrameKind, fields: Any) -> bool:
        """Whether a request may wait: for room, a worker, a disk, or the scheduler."""
        match kind:
            case FrameKind.PUT:
                return self._local
            case FrameKind.GET | FrameKind.DISCARD:
                near = node_of(fields.handle) == self._node.name and self._local
                comes = self._data.workers.grants.may_come(self._tenant, fields.handle)
                return comes or not near or (kind is FrameKind.GET and fields.here)
            case _:
                return False

    async def _put(self, _: Frame, asked: Put) -> ClientAnswer:
        """Make room for data, or note data that a worker has; return the handle."""
        parts = tuple(asked.parts)
        new = NewData(asked.size, asked.about, asked.lifetime_s, parts, asked.wished)
        for part in parts:
            await self._settle(part)
        try:
            return await self._put_new(new, asked.worker)
        except NoRoomForData:
            if not await self._data.workers.grants.recall_of(self._tenant):
                raise
        return await self._put_new(new, asked.worker)

    async def _put_new(self, new: NewData, worker: str | None) -> ClientAnswer:
        if worker is not None:
            hosted = self._hosted(HostedId(worker))
            item = self._data.workers.put(self._tenant, self._key, new, hosted)
            return ClientAnswer({"handle": item.handle})
        if not self._local and len(self._arriving) >= _MOST_ARRIVING:
            raise ClientNotAllowed(f"{_MOST_ARRIVING} pieces of data have not arrived yet")
        item = await self._table.put(self._tenant, self._key, new)
        assert item.file is not None, "data that arrives has a file"
        if self._local:
            return ClientAnswer({"handle": item.handle}, (item.file.for_writer(),))
        self._arriving[item.handle] = 0
        return ClientAnswer({"handle": item.handle})

    async def _piece(self, frame: Frame, asked: Piece) -> ClientAnswer:
        """Take a piece of data; after the last one it may be read. A local client sends none."""
        handle = asked.handle
        item = self._table.arriving(self._tenant, self._key, handle)
        if not self._local:
            await self._write(item, asked.offset, frame.body)
        if not asked.last:
            return ClientAnswer({})
        came = self._arriving.pop(handle, None)
        if came is not None and came != item.size_bytes:
            self._table.end(item)
            raise BadFrame(f"data of {item.size_bytes} bytes ended after {came}")
        self._table.filled(item)
        return ClientAnswer({})

    async def _get(self, _: Frame, asked: Get) -> ClientAnswer:
        """Return what data is, with a descriptor or a piece of it if it is `here`."""
        handle = asked.handle
        node = NodeId(node_of(handle) or "")
        if node != self._node.name:
            return ClientAnswer({"elsewhere": await self._elsewhere(node)})
        await self._settle(handle)
        item = self._table.find(self._tenant, handle)
        if not item.is_here and asked.here:
            await self._data.workers.bring(item)
            item = self._table.find(self._tenant, handle)
        answer: Answer = {"size": item.size_bytes, "about": item.about}
        if item.hosted is not None:
            answer["worker"] = item.hosted.id
        if not item.is_here:
            return ClientAnswer(answer)
        if self._local:
            return ClientAnswer(answer | {"start": 0}, (item.for_reader(self._key),))
        content = None if asked.offset is None else await self._read(item, asked.offset)
        return ClientAnswer(answer, body=content)

    async def _drop(self, _: Frame, asked: AboutData) -> None:
        """End data, if it is this tenant's."""
        await self._settle(asked.handle)
        self._table.drop(self._tenant, asked.handle)

    async def _give_back(self, _: Frame, asked: AboutData) -> None:
        self._table.give_back(self._tenant, self._key, asked.handle)

    def close(self) -> None:
        for handle in self._arriving:
            self._table.drop(self._tenant, handle)
        self._arriving.clear()
        self.handlers = {}  # they hold this object: nothing should wait for the collector

    async def _settle(self, handle: str) -> None:
        """Have the table know data that a worker has put by itself a moment ago."""
        await self._data.workers.grants.settle(self._tenant, handle)

    def _hosted(self, name: HostedId) -> HostedModel:
        """Return the model whose worker has the data; ClientNotAllowed for another tenant's."""
        hosted = self._node.hosted(name)
        if hosted.order.tenant != self._tenant:
            raise ClientNotAllowed(f"worker {name} is not this namespace's")
        return hosted

    async def _elsewhere(self, node: NodeId) -> Answer:
        try:
            addresses = await self._data.manager.locate(node) if node else ()
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
