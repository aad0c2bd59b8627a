"""What a function puts for others, and what it gets: `context.put`, `get` and `drop`."""

import contextlib
import logging
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from torch_shim.data.node_requests import FoundData, NodeRequests, PutTerms
from torch_shim.data.value_layout import (
    DescribedValue,
    Describer,
    Leaf,
    PartLeaf,
    Place,
    TensorLayout,
    pack_tensor,
)
from torch_shim.data.worker_data import (
    DataHolder,
    DataOrigin,
    Taken,
    drop_taken,
    lent_file,
    note_origin,
    process_of,
    publish,
    put_there,
    take_at_worker,
    take_new,
)
from torch_shim.errors import BadFrame, DataUnavailable, RemoteFailure, WireError
from torch_shim.leases.managers import Nodes
from torch_shim.remote import inputs
from torch_shim.remote.results import LEAST_BYTES
from torch_shim.tensors import write_epochs
from torch_shim.tensors.absent_bytes import absent_of, bring, storage_without_bytes
from torch_shim.tensors.handles import CudaTensor, NoTorchFunction, become_cuda
from torch_shim.wire.manager_session import ManagerSession
from torch_shim.wire.messages import MOST_PARTS
from torch_shim.wire.protocol import FrameKind
from torch_shim.wire.shared_memory import (
    Buffer,
    LentPages,
    flat,
    layout_of,
    map_privately,
    tensor_over,
)
from torch_shim.wire.worker_peer import WorkerPeer

log = logging.getLogger("gpufaas")

# A tensor that uses less than this share (1/N) of its storage is copied on its worker first.
_LEAST_SHARE = 2
# At its end a handle has as many of its worker's name.
TAG_CHARACTERS = 4

_connected: list[NodeRequests] = []


def connect(nodes: Callable[[], Nodes] | None) -> None:
    """Pass data by these sessions, from now on; None: this process has no GPU manager."""
    if nodes is not None:
        _connected[:] = [NodeRequests(nodes)]
        inputs.takers[:] = [take_at_worker]


def put(value: Any, lifetime_s: float | None = None, *, wished: bool = False) -> str:
    """Put a value, as it is now, for the functions of this namespace; return its handle.

    DataUnavailable in a process without a GPU manager.
    """
    requests, terms = _requests(), PutTerms(lifetime_s, wished)
    requests.flush()
    if isinstance(value, torch.Tensor):
        part = _stay(requests, value.detach(), terms)
        if part is not None:
            return part.handle
    parts: list[str] = []
    describer = Describer(partial(_part, requests, parts, terms._replace(wished=False)))
    try:
        about = describer.describe(value)
        fill = partial(_fill, describer.file_leaves)
        return requests.put(describer.size_bytes, about, terms, describer.parts, fill)
    except BaseException:
        for handle in parts:
            with contextlib.suppress(DataUnavailable):
                requests.drop(handle)
        raise


def get(handle: str) -> Any:
    """Return a value that a function of this namespace has put; DataUnavailable if it is not to
    be had, or in a process without a GPU manager."""
    requests = _requests()
    near = _near(requests, handle)
    return GotValue(requests, requests.find(handle)).make() if near is None else near


def drop(handle: str) -> None:
    """End data; nothing if it has ended. DataUnavailable in a process without a GPU manager."""
    _requests().drop(handle)


def settle() -> None:
    """Say what this process does not map any more: after a request, no other may come for long."""
    for requests in _connected:
        requests.flush()


def _requests() -> NodeRequests:
    if not _connected:
        raise DataUnavailable("this function has no GPU manager to keep data; enable its GPU")
    return _connected[0]


def _near(requests: NodeRequests, handle: str) -> torch.Tensor | None:
    """Take data from a worker that has it, if this process is connected to that one."""
    tag = handle[-TAG_CHARACTERS:]
    for peer in requests.nodes.peers():
        if peer.name.startswith(tag):
            key = write_epochs.new_key()
            size_and_about = take_new(peer, handle, key)
            if size_and_about is not None:
                return taken_tensor(requests, handle, peer, key, *size_and_about)
    return None


# What stays with its worker.


def _part(
    requests: NodeRequests, parts: list[str], terms: PutTerms, tensor: torch.Tensor
) -> PartLeaf | None:
    """Put a tensor of a larger value by itself, if a worker of this node has its bytes."""
    if len(parts) >= MOST_PARTS:
        return None
    part = _stay(requests, tensor, terms, only=requests.nodes.own)
    if part is not None:
        parts.append(part.handle)
    return part


def _stay(
    requests: NodeRequests,
    tensor: torch.Tensor,
    terms: PutTerms,
    only: ManagerSession | None = None,
) -> PartLeaf | None:
    """Have a worker publish a tensor that it has; None if the bytes are to be sent."""
    if type(tensor) is not CudaTensor:
        return None
    storage = write_epochs.storage_of(tensor)
    mark = write_epochs.storage_mark(storage)
    used = tensor.numel() * tensor.element_size()
    if mark is None or used < LEAST_BYTES:
        return None
    if _LEAST_SHARE * used < storage.nbytes():
        if absent_of(tensor) is None:
            return None
        tensor = tensor.clone()  # there
        mark = write_epochs.marked(tensor)
    held = requests.nodes.holding(mark.key, write_epochs.content_of(tensor))
    if held is None or only not in (None, held[0]):
        return None
    return _publish(requests, tensor, mark.key, held, terms)


def _publish(
    requests: NodeRequests,
    tensor: torch.Tensor,
    key: int,
    held: tuple[ManagerSession, WorkerPeer, int],
    terms: PutTerms,
) -> PartLeaf | None:
    session, peer, epoch = held
    size_bytes = write_epochs.storage_of(tensor).nbytes()
    dtype, shape, strides, offset = layout_of(tensor)
    about = pack_tensor(TensorLayout(dtype, shape, strides, offset, True), size_bytes)
    handle = ""
    try:
        if not terms.wished:  # the manager must know of a wish
            with contextlib.suppress(RemoteFailure), peer.channel_for(None) as channel:
                if channel is not None:
                    handle_there = put_there(channel, key, epoch, about, terms.lifetime_s)
                    return PartLeaf(handle_there, size_bytes)
        handle = requests.put_on_worker(session, size_bytes, about, terms, peer.name)
        with peer.channel_for(None) as channel:
            if channel is not None:
                publish(channel, key, epoch, handle, about)
                return PartLeaf(handle, size_bytes)
    except (RemoteFailure, WireError) as error:
        log.info("a tensor is put by its bytes: %s", error)
    if handle:
        with contextlib.suppress(WireError):
            session.control.notify(FrameKind.DISCARD, {"handle": handle})
    return None


def _fill(leaves: list[tuple[int, Leaf]], room: Buffer) -> None:
    for start, leaf in leaves:
        if isinstance(leaf, memoryview):
            room[start : start + len(leaf)] = leaf
        elif leaf.numel():
            _copy(leaf, room, start)


def _copy(tensor: torch.Tensor, room: Buffer, start: int) -> None:
    bring((tensor,))
    count = tensor.numel()
    dtype, shape, strides, offset = layout_of(tensor)
    source = tensor_over(write_epochs.storage_of(tensor), dtype, offset, shape, strides)
    with NoTorchFunction(), torch.no_grad():
        flat(room, torch.uint8, start, count * dtype.itemsize).view(dtype).view(shape).copy_(source)


class GotValue:
    """One value that is made of data. Its leaves share the data's file."""

    def __init__(self, requests: NodeRequests, data: FoundData, *, is_part: bool = False) -> None:
        """Data that is part of other data has no parts itself."""
        self._requests = requests
        self._found = data
        self._is_part = is_part
        self._taken: Taken = []
        self._memory: Buffer = bytearray()
        self._lent: LentPages | None = None

    def make(self) -> Any:
        """Return the value; the file's descriptor is taken care of."""
        data = self._found
        try:
            described = DescribedValue(data.about, data.size_bytes)
        except BaseException:
            if data.descriptor is not None:
                os.close(data.descriptor)
                self._requests.give_back(data.session, data.handle)
            raise
        if data.descriptor is not None:
            self._lent = lent_file(self._requests, data, self._taken)
            self._memory = map_privately(data.descriptor, max(data.size_bytes, 1), self._lent)
        elif not data.worker:
            self._memory = self._requests.content(data)
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
            data = self._requests.find(place.handle)
            part = GotValue(self._requests, data, is_part=True).make()
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
        data = self._found
        if not 0 < size == data.size_bytes:
            raise BadFrame("data of a worker is one tensor")
        holder = DataHolder(self._requests, data.handle, process_of(data.worker), self._taken)
        made = _without_bytes(write_epochs.WriteMark(), size, layout, holder)
        self._note(made, size, 0)
        return made

    def _note(self, tensor: torch.Tensor, size: int, start: int) -> None:
        data = self._found
        if not size or (data.session is not self._requests.nodes.own and not data.worker):
            return
        process = process_of(data.worker)
        origin = DataOrigin(data.handle, size, process, start, self._lent, taken=self._taken)
        note_origin(tensor, origin)


def taken_tensor(
    requests: NodeRequests, handle: str, peer: WorkerPeer, key: int, size: int, about: bytes
) -> torch.Tensor:
    """Return a tensor whose bytes a worker has, and keeps for this process under the key."""
    taken: Taken = [(peer, key)]

    def make(place: Place, layout: TensorLayout) -> torch.Tensor:
        if place.size_bytes != size:
            raise BadFrame("data of a worker is one tensor")
        mark = write_epochs.WriteMark(key)
        holder = DataHolder(requests, handle, process_of(peer.name), taken, peer)
        made = _without_bytes(mark, size, layout, holder)
        peer.kept.result(key, write_epochs.content_of(made))
        origin = DataOrigin(handle, size, process_of(peer.name), taken=taken)
        note_origin(made, origin)
        return made

    try:
        made = DescribedValue(about, size).build(make, _no_bytes)
        if not isinstance(made, torch.Tensor):
            raise BadFrame("data of a worker is one tensor")
    except BaseException:
        drop_taken(taken)
        raise
    return made


def _no_bytes(_: Place) -> memoryview:
    raise BadFrame("data of a worker is one tensor")


def _without_bytes(
    mark: write_epochs.WriteMark, size: int, layout: TensorLayout, holder: DataHolder
) -> torch.Tensor:
    storage = storage_without_bytes(mark, size)
    mark.absent.leave(holder, _nowhere)
    made = tensor_over(storage, layout.dtype, layout.offset, layout.shape, layout.strides)
    return become_cuda(made)


def _nowhere(*_: Any) -> None:
    """Operators between graphs run here: the bytes come for them."""
