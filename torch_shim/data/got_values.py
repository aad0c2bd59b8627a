"""Makes values of data that was found: over its file's pages, or without bytes until one looks."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from torch_shim.data.node_requests import FoundData, NodeRequests
from torch_shim.data.value_layout import DescribedValue, PartLeaf, Place, TensorLayout
from torch_shim.errors import BadFrame, DataUnavailable
from torch_shim.tensors import write_epochs
from torch_shim.tensors.absent_bytes import storage_without_bytes
from torch_shim.tensors.handles import become_cuda
from torch_shim.tensors.large import data_origins
from torch_shim.tensors.large.data_origins import DataOrigin
from torch_shim.wire.arena import Buffer, LentPages, flat, map_privately, tensor_over
from torch_shim.wire.worker_peer import Fetched, WorkerPeer

Taken = list[tuple[WorkerPeer, int]]


class DataHolder:
    """Who has the bytes of data: its manager, which brings them from a worker if need be."""

    def __init__(
        self,
        requests: NodeRequests,
        handle: str,
        process: str,
        taken: Taken,
        peer: WorkerPeer | None = None,
    ) -> None:
        """A `peer` keeps the bytes for this process, whatever becomes of the data."""
        self.sole: set[int] = set()
        self._requests = requests
        self._handle = handle
        self._process = process
        self._taken = taken
        self._peer = peer

    def is_with(self, peer: WorkerPeer) -> bool:
        """Whether the worker takes the bytes where they are: they are its own, or it borrows them.

        What another worker keeps for this process is fetched from there, before a call.
        """
        if self._peer is not None:
            return self._process == peer.process
        return peer.can_take(self._handle, self._process)

    @contextmanager
    def channel_for(self, channel: Any) -> Iterator[Any]:
        """A channel of the worker that keeps the bytes, if one does."""
        if self._peer is None:
            yield None
            return
        with self._peer.channel_for(channel) as using:
            yield using

    def fetch(self, key: int, channel: Any) -> Fetched:
        """Return the bytes; DataUnavailable if they are lost."""
        try:
            found = self._requests.find(self._handle, here=True)
        except DataUnavailable:
            if self._peer is None or channel is None:
                raise
            return self._peer.fetch(key, channel)
        if found.descriptor is None:
            return Fetched(None, memoryview(self._requests.content(found)))
        lent = lent_file(self._requests, found, self._taken)
        return Fetched(found.descriptor, memoryview(b""), lent)

    def drop(self, key: int) -> None:
        """Nobody here needs the bytes any more: workers that took them forget them."""
        del key
        _drop_taken(self._taken)


class GotValue:
    """One value that is made of data. Its leaves share the data's file."""

    def __init__(self, requests: NodeRequests, found: FoundData, *, is_part: bool = False) -> None:
        """Data that is part of other data has no parts itself."""
        self._requests = requests
        self._found = found
        self._is_part = is_part
        self._taken: Taken = []
        self._memory: Buffer = bytearray()
        self._lent: LentPages | None = None

    def make(self) -> Any:
        """Return the value; the file's descriptor is taken care of."""
        found = self._found
        try:
            described = DescribedValue(found.about, found.size_bytes)
        except BaseException:
            if found.descriptor is not None:
                os.close(found.descriptor)
                self._requests.give_back(found.session, found.handle)
            raise
        if found.descriptor is not None:
            self._lent = lent_file(self._requests, found, self._taken)
            self._memory = map_privately(found.descriptor, max(found.size_bytes, 1), self._lent)
        elif not found.worker:
            self._memory = self._requests.content(found)
        return described.build(self._tensor, self._bytes)

    def _bytes(self, place: Place) -> memoryview:
        if isinstance(place, PartLeaf):
            raise BadFrame("bytes are no data by themselves")
        whole = memoryview(self._memory)
        return whole[place.start : place.start + place.size_bytes].toreadonly()

    def _tensor(self, place: Place, layout: TensorLayout) -> torch.Tensor:
        if isinstance(place, PartLeaf):
            if self._is_part:
                raise BadFrame("a part of data that has parts")
            found = self._requests.find(place.handle)
            part = GotValue(self._requests, found, is_part=True).make()
            if not isinstance(part, torch.Tensor):
                raise BadFrame("a part of data that is no tensor")
            return part
        size = place.size_bytes
        if self._found.worker and self._found.descriptor is None:
            return self._absent(size, layout)
        dtype, shape, strides, offset, on_gpu = layout
        storage = flat(self._memory, torch.uint8, place.start, size).untyped_storage()
        made = tensor_over(storage, dtype, offset, shape, strides)
        if on_gpu:
            become_cuda(made)
            self._note(made, size, place.start)
        return made

    def _absent(self, size: int, layout: TensorLayout) -> torch.Tensor:
        """A tensor whose bytes come when somebody looks."""
        found = self._found
        if not 0 < size == found.size_bytes:
            raise BadFrame("data of a worker is one tensor")
        holder = DataHolder(self._requests, found.handle, _process(found.worker), self._taken)
        made = _without_bytes(write_epochs.WriteMark(), size, layout, holder)
        self._note(made, size, 0)
        return made

    def _note(self, tensor: torch.Tensor, size: int, start: int) -> None:
        found = self._found
        if not size or (found.session is not self._requests.nodes.own and not found.worker):
            return
        process = _process(found.worker)
        origin = DataOrigin(found.handle, size, process, start, self._lent, taken=self._taken)
        data_origins.note_origin(tensor, origin)


def taken_tensor(
    requests: NodeRequests, handle: str, peer: WorkerPeer, key: int, size: int, about: bytes
) -> torch.Tensor:
    """Return a tensor whose bytes a worker has, and keeps for this process under the key."""
    taken: Taken = [(peer, key)]

    def make(place: Place, layout: TensorLayout) -> torch.Tensor:
        if place.size_bytes != size:
            raise BadFrame("data of a worker is one tensor")
        mark = write_epochs.WriteMark(key)
        holder = DataHolder(requests, handle, peer.process, taken, peer)
        made = _without_bytes(mark, size, layout, holder)
        content = mark.epoch, write_epochs.version_of(made)
        peer.kept.result(key, content)
        origin = DataOrigin(handle, size, peer.process, taken=taken)
        data_origins.note_origin(made, origin)
        return made

    try:
        made = DescribedValue(about, size).build(make, _no_bytes)
        if not isinstance(made, torch.Tensor):
            raise BadFrame("data of a worker is one tensor")
    except BaseException:
        _drop_taken(taken)
        raise
    return made


def _no_bytes(_: Place) -> memoryview:
    raise BadFrame("data of a worker is one tensor")


def _without_bytes(
    mark: write_epochs.WriteMark, size: int, layout: TensorLayout, holder: DataHolder
) -> torch.Tensor:
    """A tensor whose bytes come when somebody looks."""
    storage = storage_without_bytes(mark, size)
    mark.absent.leave(holder, _nowhere)
    made = tensor_over(storage, layout.dtype, layout.offset, layout.shape, layout.strides)
    return become_cuda(made)


def lent_file(requests: NodeRequests, found: FoundData, taken: Taken) -> LentPages | None:
    """Return what is held while the file is mapped; None for one on disk, which nobody reuses."""
    assert found.descriptor is not None, "it is in a file"
    give_back = partial(_given_back, requests, found, taken)
    try:
        sealed = fcntl.fcntl(found.descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    except OSError:
        sealed = 0
    if not sealed:
        requests.give_back(found.session, found.handle)
        return None
    return LentPages(give_back)


def _given_back(requests: NodeRequests, found: FoundData, taken: Taken) -> None:
    _drop_taken(taken)
    requests.give_back(found.session, found.handle)


def _drop_taken(taken: Taken) -> None:
    while taken:
        peer, key = taken.pop()
        peer.drop(key)


def _process(worker: str) -> str:
    """The process of a model's worker, which may have other models."""
    return worker.rpartition(".")[0]


def _nowhere(*_: Any) -> None:
    """Operators between graphs run here: the bytes come for them."""
