"""Describes the tensors of one call for a worker."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torch_shim.tensors import write_epochs
from torch_shim.tensors.absent_bytes import absent_of
from torch_shim.tensors.handles import CudaTensor
from torch_shim.tensors.large import data_origins
from torch_shim.wire.arena import Buffer, Layout, layout_of, span_of, write_bytes
from torch_shim.wire.data_channel import DataChannel
from torch_shim.wire.memory.shared_blocks import SharedBlock, block_of
from torch_shim.wire.protocol import aligned
from torch_shim.wire.worker_peer import Content, WorkerPeer

# The kinds of source that a tensor's bytes may have.
IMAGE, KEPT, AREA = 0, 1, 2
# Smaller storages are sent with every call: referring to a kept copy would cost as much.
KEEP_FROM_BYTES = 4096

NAME_OF = {
    getattr(torch, name): name
    for name in [
        "float32",
        "float64",
        "float16",
        "bfloat16",
        "int64",
        "int32",
        "int16",
        "int8",
        "uint8",
        "bool",
        "complex64",
        "complex128",
        "uint16",
        "uint32",
        "uint64",
        "float8_e4m3fn",
        "float8_e5m2",
    ]
    if hasattr(torch, name)
}
_WIDEST_ELEMENT_BYTES = 16


@dataclass(slots=True)
class _ByteRun:
    """A run of bytes of one storage that is sent in the area."""

    storage: torch.UntypedStorage
    start: int
    stop: int
    key: int = 0
    content: Content = (0, 0)
    block: SharedBlock | None = None  # that the worker reads it in; nothing is copied
    offset: int = 0

    def source(self) -> list[int]:
        """Return where the worker finds it."""
        size, epoch = self.stop - self.start, self.content[0]
        if self.block is None:
            return [AREA, self.offset, size, self.key, epoch]
        return [AREA, self.start, size, self.key, epoch, self.block.key]


@dataclass(slots=True)
class SentInput:
    """One tensor input as sent: `value` may be a copy of `original`; bytes from `first_byte` on."""

    value: torch.Tensor
    original: torch.Tensor
    first_byte: int


class Shipment:
    """The unbound inputs of one call, described for the worker.

    The worker keeps at once the inputs at the positions `written`, which the program writes to. It
    gets those at the positions `whole` as they lie, however sparsely.
    """

    def __init__(
        self,
        values: Sequence[tuple[int, Any]],
        count: int,
        channel: DataChannel,
        peer: WorkerPeer,
        written: frozenset[int] = frozenset(),
        whole: frozenset[int] = frozenset(),
    ) -> None:
        self.inputs: list[Any] = [None] * count
        self.size_bytes = 0
        self._channel = channel
        self._peer = peer
        self._kept = peer.kept
        self._written = written
        self._whole = whole
        self._runs: dict[int, _ByteRun] = {}
        self._sent: dict[int, SentInput] = {}
        self._changed: set[int] = set()
        tensors: list[tuple[int, torch.Tensor]] = []
        for number, value in values:
            if isinstance(value, torch.Tensor):
                tensors.append((number, value))
            else:
                self.inputs[number] = value
        self._plan(tensors)

    def write(self, area: Buffer) -> None:
        """Copy the bytes to the described offsets of the area."""
        for run in self._runs.values():
            size = run.stop - run.start
            if size and run.block is None:
                write_bytes(area, run.offset, run.storage, run.start, size)

    def delivered(self) -> None:
        """Record that the worker has received the inputs and keeps those marked to be kept."""
        for run in self._runs.values():
            if run.key:
                self._kept.epochs[run.key] = (run.content, run.content[0])

    def changed(self, number: int, value: torch.Tensor) -> None:
        """Record that the program wrote to this input, on the worker and in this process."""
        mark = write_epochs.mark_of(value)
        held = None if mark is None else self._kept.epochs.get(mark.key)
        if mark is not None and held is not None and number in self._sent:
            content = (mark.epoch, write_epochs.version_of(value))
            more = mark.key not in self._changed  # the worker counts a storage once in a call
            self._changed.add(mark.key)
            self._kept.epochs[mark.key] = (content, held[1] + more)

    def has_changed(self, value: torch.Tensor) -> bool:
        """Whether a change of this input's storage was recorded already."""
        mark = write_epochs.mark_of(value)
        return mark is not None and mark.key in self._changed

    def sent(self, number: int) -> SentInput | None:
        """Return the input as it was sent; None if it was bound."""
        return self._sent.get(number)

    def _plan(self, tensors: list[tuple[int, torch.Tensor]]) -> None:
        storages = [write_epochs.storage_of(value) for _, value in tensors]
        shared: dict[int, int] = {}
        for storage in storages:
            shared[id(storage)] = shared.get(id(storage), 0) + 1
        placed = []
        for (number, value), storage in zip(tensors, storages, strict=True):
            alone = shared[id(storage)] == 1 and number not in self._whole
            placed.append((number, value, *self._place(number, value, storage, alone=alone)))
        for run in self._runs.values():
            if run.block is not None:
                continue
            run.offset = self.size_bytes
            self.size_bytes = aligned(run.offset + run.stop - run.start)
        for number, original, value, layout, source in placed:
            self._describe(number, original, value, layout, source)

    def _place(
        self, number: int, value: torch.Tensor, storage: torch.UntypedStorage, *, alone: bool
    ) -> tuple[torch.Tensor, Layout, _ByteRun | list[int]]:
        """Return the tensor to send (perhaps a compact copy) and the source of its bytes."""
        layout = layout_of(value)
        size = storage.nbytes()
        key, content = 0, (0, 0)
        if size >= KEEP_FROM_BYTES and isinstance(value, CudaTensor):  # writes to others go unseen
            mark = write_epochs.marked(value)
            mark.held_by(self._peer)  # it may keep a copy
            content = (mark.epoch, write_epochs.version_of(value))
            held = self._kept.epochs.get(mark.key)
            if mark.untracked:
                pass
            elif held is not None and held[0] == content:
                return value, layout, [KEPT, mark.key, held[1]]
            elif number in self._written or self._kept.sent.get(mark.key) == content:
                key = mark.key  # unchanged since the last call: keep it now
            else:
                self._kept.sent[mark.key] = content
            if data_origins.noted and self._take_data(storage, mark.key, content):
                return value, layout, [KEPT, mark.key, 0]
            lacks = absent_of(value)
            if lacks is not None:  # the worker has other bytes than this one needs
                with_peer = lacks.holder is not None and lacks.holder.is_with(self._peer)
                lacks.bring(self._channel if with_peer else None)
        dtype, shape, strides, offset = layout
        span = span_of(shape, strides)
        block = block_of(storage)
        if block is not None and not self._peer.share(block, self._channel):
            block = None
        if alone and not key and block is None and span > 2 * math.prod(shape):
            value = torch.empty_like(value).copy_(value)  # in the order of its strides
            storage, layout = write_epochs.storage_of(value), layout_of(value)
            span, offset = math.prod(shape), 0
        start = offset * dtype.itemsize
        stop = start + span * dtype.itemsize
        if not alone:
            start -= start % _WIDEST_ELEMENT_BYTES
        if key:
            start, stop = 0, size
        run = self._runs.get(id(storage))
        if run is None:
            run = self._runs[id(storage)] = _ByteRun(storage, start, stop, key, content, block)
        run.start, run.stop = min(run.start, start), max(run.stop, stop)
        return value, layout, run

    def _take_data(self, storage: torch.UntypedStorage, key: int, content: Content) -> bool:
        """Have the worker use another function's data where that lies; whether it does."""
        origin = data_origins.origin_of(storage, content)
        if origin is None:
            return False
        handle, size, peer = origin.handle, origin.size_bytes, self._peer
        file = origin.located()
        places: list[tuple[int, int] | None] = [] if file is None else [file]
        if origin.process == peer.process:
            places.insert(0, None)  # the same memory
        elif not places and peer.can_take(handle, origin.process):
            places.append(None)
        for place in places:
            if peer.take_data(handle, key, size, self._channel, place, content):
                origin.taken.append((peer, key))
                return True
        return False

    def _describe(
        self,
        number: int,
        original: torch.Tensor,
        value: torch.Tensor,
        layout: Layout,
        source: _ByteRun | list[int],
    ) -> None:
        first_byte = 0
        if isinstance(source, _ByteRun):
            first_byte = source.start
            source = source.source()
        dtype, shape, strides, offset = layout
        offset -= first_byte // dtype.itemsize
        on_cpu = not isinstance(original, CudaTensor)
        self.inputs[number] = [source, NAME_OF[dtype], shape, strides, offset, on_cpu]
        self._sent[number] = SentInput(value, original, first_byte)
