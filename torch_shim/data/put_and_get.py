"""What a function puts for others, and what it gets: `context.put`, `get` and `drop`."""

import contextlib
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Union

import torch
from msgspec import Struct, msgpack

from torch_shim.data.node_requests import FoundData, NodeRequests, PutTerms
from torch_shim.data.worker_data import (
    DataHolder,
    DataOrigin,
    Taken,
    drop_taken,
    lent_file,
    note_origin,
    process_of,
    publish,
    take_at_worker,
    take_new,
)
from torch_shim.errors import BadFrame, DataUnavailable, RemoteFailure, UnsuitableData, WireError
from torch_shim.leases.managers import Nodes
from torch_shim.remote import values
from torch_shim.remote.values import LEAST_BYTES, NAME_OF, OutputView, read_view, tensor_in
from torch_shim.tensors import write_epochs
from torch_shim.tensors.absent_bytes import absent_of, bring, storage_without_bytes
from torch_shim.tensors.handles import CudaTensor, NoTorchFunction, become_cuda
from torch_shim.wire.manager_session import ManagerSession, WorkerPeer
from torch_shim.wire.messages import MOST_ABOUT_BYTES, MOST_PARTS, Count, Publish, SentOutput
from torch_shim.wire.protocol import FrameKind, decoded, encode, places_behind
from torch_shim.wire.shared_memory import (
    Buffer,
    LentPages,
    flat,
    layout_of,
    map_privately,
    tensor_over,
)

log = logging.getLogger("gpufaas")

# A tensor that uses less than this share (1/N) of its storage is copied on its worker first.
_LEAST_SHARE = 2
# At its end a handle has as many of its worker's name.
TAG_CHARACTERS = 4

_ONE_TENSOR = "data of a worker is one tensor"
_DATA_WITH_TENSOR = "data with a tensor"

_connected: list[NodeRequests] = []


def connect(nodes: Callable[[], Nodes] | None) -> None:
    """Pass data by these sessions, from now on; None: this process has no GPU manager."""
    if nodes is not None:
        _connected[:] = [NodeRequests(nodes)]
        values.takers[:] = [take_at_worker]


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


def _near(requests: NodeRequests, handle: str) -> Any:
    """Take data from a worker that has it, if this process is connected to that one."""
    tag = handle[-TAG_CHARACTERS:]
    for peer in requests.nodes.peers():
        if peer.name.startswith(tag):
            key = write_epochs.new_key()
            size_and_about = take_new(peer, handle, key)
            if size_and_about is not None:
                found = FoundData(requests.nodes.own, handle, *size_and_about, peer.name, None)
                return GotValue(requests, found, kept=(peer, key)).make()
    return None


# How a value that is put is described: its structure, and where the bytes of its leaves lie.
#
# A value is a tensor, bytes, text, a number, a boolean or None, or a list, tuple or dictionary of
# values. Only functions of one tenant read descriptions, which are bounded before they are parsed.

_VERSION = 1
_MOST_LEAVES = 1024
_MOST_DEPTH = 32
_INTEGERS = range(-(1 << 63), 1 << 64)

Leaf = torch.Tensor | memoryview


class FileLeaf(NamedTuple):
    """Bytes in the file of the data."""

    start: int
    size_bytes: int


class PartLeaf(NamedTuple):
    """Bytes that are data by themselves, and belong to this one."""

    handle: str
    size_bytes: int


Place = FileLeaf | PartLeaf


class _BytesNode(Struct, array_like=True, forbid_unknown_fields=True, tag="b"):
    leaf: Count


class _TensorNode(Struct, array_like=True, forbid_unknown_fields=True, tag="t"):
    tensor: SentOutput  # its source is the leaf
    on_gpu: bool


class _ListNode(Struct, array_like=True, forbid_unknown_fields=True, tag="l"):
    items: "list[_Node]"
    is_tuple: bool


class _DictNode(Struct, array_like=True, forbid_unknown_fields=True, tag="d"):
    entries: "list[tuple[str | int | bool, _Node]]"


_Node = Union[  # noqa: UP007 - a name of it stands in quotation marks above
    None, bool, int, float, str, _BytesNode, _TensorNode, _ListNode, _DictNode
]
# The version, for each leaf where it begins in the file or its handle, and its size, and the value.
_DESCRIPTION = msgpack.Decoder(tuple[int, list[tuple[Count | str, Count]], _Node])

# Make a value of a leaf's bytes; a tensor is on the GPU or not.
MakeTensor = Callable[[Place, OutputView, bool], torch.Tensor]
MakeBytes = Callable[[Place], memoryview]


class Describer:
    """Describes one value. `stays` says of a tensor where its bytes are if they are not sent."""

    def __init__(self, stays: Callable[[torch.Tensor], PartLeaf | None]) -> None:
        self._stays = stays
        self._leaves: list[Leaf | PartLeaf] = []
        self.file_leaves: list[tuple[int, Leaf]] = []
        self.parts: list[str] = []
        self.size_bytes = 0

    def describe(self, value: Any) -> bytes:
        """Return the description; the value's leaves and their places are known from then on."""
        tree = self._node(value, 0)
        sizes = [_size_of(leaf) for leaf in self._leaves if not isinstance(leaf, PartLeaf)]
        starts, self.size_bytes = places_behind(0, sizes)
        places: list[tuple[int | str, int]] = []
        free = iter(starts)
        for leaf in self._leaves:
            if isinstance(leaf, PartLeaf):
                self.parts.append(leaf.handle)
                places.append((leaf.handle, leaf.size_bytes))
            else:
                start = next(free)
                self.file_leaves.append((start, leaf))
                places.append((start, _size_of(leaf)))
        about = encode((_VERSION, places, tree))
        if len(about) > MOST_ABOUT_BYTES:
            raise UnsuitableData(f"its structure takes {len(about)} bytes, not {MOST_ABOUT_BYTES}")
        return about

    def _node(self, value: Any, depth: int) -> _Node:
        if depth > _MOST_DEPTH:
            raise UnsuitableData(f"it is nested more than {_MOST_DEPTH} deep")
        if value is None or isinstance(value, bool | float | str):
            return value
        if isinstance(value, int):
            if value not in _INTEGERS:
                raise UnsuitableData("it has a number of more than 64 bits")
            return value
        if isinstance(value, bytes | bytearray | memoryview):
            return _BytesNode(self._leaf(memoryview(value).cast("B")))
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, list | tuple):
            items = [self._node(item, depth + 1) for item in value]
            return _ListNode(items, isinstance(value, tuple))
        if isinstance(value, dict):
            return _DictNode([self._entry(key, item, depth) for key, item in value.items()])
        raise UnsuitableData(f"it has a {type(value).__qualname__}")

    def _entry(self, key: Any, value: Any, depth: int) -> tuple[str | int, _Node]:
        if not isinstance(key, str | int):
            raise UnsuitableData(f"it has a key that is a {type(key).__qualname__}")
        return key, self._node(value, depth + 1)

    def _tensor(self, tensor: torch.Tensor) -> _TensorNode:
        if tensor.layout is not torch.strided or tensor.dtype not in NAME_OF:
            raise UnsuitableData(f"it has a tensor of {tensor.layout}, {tensor.dtype}")
        if tensor.device.type not in ("cpu", "cuda"):
            raise UnsuitableData(f"it has a tensor on {tensor.device}")
        tensor = tensor.detach().resolve_conj().resolve_neg()
        on_gpu = isinstance(tensor, CudaTensor)
        part = self._stays(tensor)
        if part is not None:
            _, shape, strides, offset = layout_of(tensor)
            number = self._leaf(part)
        else:
            shape, strides, offset = list(tensor.shape), _contiguous(tensor.shape), 0
            number = self._leaf(tensor)
        sent = SentOutput(number, NAME_OF[tensor.dtype], shape, strides, offset)
        return _TensorNode(sent, on_gpu)

    def _leaf(self, leaf: Leaf | PartLeaf) -> int:
        if len(self._leaves) >= _MOST_LEAVES:
            raise UnsuitableData(f"it has more than {_MOST_LEAVES} tensors and byte strings")
        self._leaves.append(leaf)
        return len(self._leaves) - 1


class DescribedValue:
    """A description that was read and checked; BadFrame for what fits nothing."""

    def __init__(self, about: bytes, size_bytes: int) -> None:
        """The file of the data has this size."""
        if len(about) > MOST_ABOUT_BYTES:
            raise BadFrame(f"data with a description of {len(about)} bytes")
        version, places, self._tree = decoded(_DESCRIPTION, about, "data")
        if version != _VERSION:
            raise BadFrame(f"data with a description of version {version}")
        self._places = [_place(start, size, size_bytes) for start, size in places]

    def build(self, tensor: MakeTensor, content: MakeBytes) -> Any:
        return self._value(self._tree, tensor, content, 0)

    def _value(self, node: _Node, tensor: MakeTensor, content: MakeBytes, depth: int) -> Any:
        if depth > _MOST_DEPTH:
            raise BadFrame("data that is nested too deeply")
        match node:
            case _ListNode(items, is_tuple):
                made = [self._value(item, tensor, content, depth + 1) for item in items]
                return tuple(made) if is_tuple else made
            case _DictNode(entries):
                return {key: self._value(item, tensor, content, depth + 1) for key, item in entries}
            case _BytesNode(leaf):
                return content(self._place(leaf))
            case _TensorNode(sent, on_gpu):
                place = self._place(sent.source)
                view = read_view(sent, _DATA_WITH_TENSOR)
                if view.end_bytes > place.size_bytes:
                    raise BadFrame(f"{_DATA_WITH_TENSOR} {sent!r:.200}")
                return tensor(place, view, on_gpu)
            case _:
                return node

    def _place(self, number: int) -> Place:
        if not 0 <= number < len(self._places):
            raise BadFrame(f"data with leaf {number} of {len(self._places)}")
        return self._places[number]


def pack_tensor(tensor: torch.Tensor, size_bytes: int) -> bytes:
    """Describe a GPU tensor whose storage, of this size, is data."""
    dtype, shape, strides, offset = layout_of(tensor)
    node = _TensorNode(SentOutput(0, NAME_OF[dtype], shape, strides, offset), True)
    return encode((_VERSION, [(0, size_bytes)], node))


def _place(start: int | str, leaf_bytes: int, size_bytes: int) -> Place:
    if isinstance(start, str):
        return PartLeaf(start, leaf_bytes)
    if start + leaf_bytes > size_bytes:
        raise BadFrame(f"data with a leaf of {leaf_bytes} bytes at {start} of {size_bytes}")
    return FileLeaf(start, leaf_bytes)


def _size_of(leaf: Leaf) -> int:
    return leaf.nbytes if isinstance(leaf, memoryview) else leaf.numel() * leaf.element_size()


def _contiguous(shape: torch.Size) -> list[int]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return strides[::-1]


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
    content = write_epochs.content_of(tensor)
    for session in requests.nodes.sessions():
        for peer in session.peers():
            kept, epoch = peer.kept.epochs.get(mark.key, (None, 0))
            if kept == content:
                if only not in (None, session):
                    return None
                return _publish(requests, tensor, mark.key, (session, peer, epoch), terms)
    return None


def _publish(
    requests: NodeRequests,
    tensor: torch.Tensor,
    key: int,
    held: tuple[ManagerSession, WorkerPeer, int],
    terms: PutTerms,
) -> PartLeaf | None:
    session, peer, epoch = held
    size_bytes = write_epochs.storage_of(tensor).nbytes()
    about = pack_tensor(tensor, size_bytes)
    handle = ""
    try:
        if not terms.wished:  # the manager must know of a wish
            with contextlib.suppress(RemoteFailure), peer.channel_for(None) as channel:
                if channel is not None:
                    there = Publish(key, epoch, about, lifetime_s=terms.lifetime_s)
                    return PartLeaf(publish(channel, there), size_bytes)
        handle = requests.put_on_worker(session, size_bytes, about, terms, peer.name)
        with peer.channel_for(None) as channel:
            if channel is not None:
                publish(channel, Publish(key, epoch, about, handle))
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


@dataclass(slots=True)
class GotValue:
    """One value that is made of data. Its leaves share the data's file."""

    requests: NodeRequests
    data: FoundData
    kept: tuple[WorkerPeer, int] | None = None  # a worker that keeps the bytes under a key
    is_part: bool = False  # of other data: it has no parts itself
    taken: Taken = field(init=False)
    memory: Buffer = field(init=False, default_factory=bytearray)
    lent: LentPages | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.taken = [] if self.kept is None else [self.kept]

    def make(self) -> Any:
        """Return the value; the file's descriptor is taken care of."""
        data = self.data
        try:
            described = DescribedValue(data.about, data.size_bytes)
            if data.worker and data.descriptor is None:
                made = described.build(self._absent, _no_bytes)
                if not isinstance(made, torch.Tensor):
                    raise BadFrame(_ONE_TENSOR)
                return made
        except BaseException:
            drop_taken(self.taken)
            if data.descriptor is not None:
                os.close(data.descriptor)
                self.requests.give_back(data.session, data.handle)
            raise
        if data.descriptor is not None:
            self.lent = lent_file(self.requests, data, self.taken)
            self.memory = map_privately(data.descriptor, max(data.size_bytes, 1), self.lent)
        else:
            self.memory = self.requests.content(data)
        return described.build(self._tensor, self._bytes)

    def _bytes(self, place: Place) -> memoryview:
        if isinstance(place, PartLeaf):
            raise BadFrame("bytes are no data by themselves")
        whole = memoryview(self.memory)
        return whole[place.start : place.start + place.size_bytes].toreadonly()

    def _tensor(self, place: Place, view: OutputView, on_gpu: bool) -> torch.Tensor:  # noqa: FBT001 - as in its description
        if isinstance(place, PartLeaf):
            if self.is_part:
                raise BadFrame("a part of data that has parts")
            data = self.requests.find(place.handle)
            part = GotValue(self.requests, data, is_part=True).make()
            if not isinstance(part, torch.Tensor):
                raise BadFrame("a part of data that is no tensor")
            return part
        size = place.size_bytes
        storage = flat(self.memory, torch.uint8, place.start, size).untyped_storage()
        made = tensor_in(storage, view)
        if on_gpu:
            become_cuda(made)
            self._note(made, size, place.start)
        return made

    def _absent(self, place: Place, view: OutputView, _: object) -> torch.Tensor:
        """Return a tensor whose bytes only a worker has."""
        data, size = self.data, place.size_bytes
        if isinstance(place, PartLeaf) or not 0 < size == data.size_bytes:
            raise BadFrame(_ONE_TENSOR)
        peer, key = self.kept or (None, 0)
        mark = write_epochs.WriteMark(key)
        storage = storage_without_bytes(mark, size)
        process = process_of(data.worker)
        mark.absent.leave(DataHolder(self.requests, data.handle, process, self.taken, peer))
        made = become_cuda(tensor_in(storage, view))
        if peer is not None:
            peer.kept.result(key, write_epochs.content_of(made))
        self._note(made, size, 0)
        return made

    def _note(self, tensor: torch.Tensor, size: int, start: int) -> None:
        data = self.data
        if not size or (data.session is not self.requests.nodes.own and not data.worker):
            return
        process = process_of(data.worker)
        origin = DataOrigin(data.handle, size, process, start, self.lent, taken=self.taken)
        note_origin(tensor, origin)


def _no_bytes(_: Place) -> memoryview:
    raise BadFrame(_ONE_TENSOR)
