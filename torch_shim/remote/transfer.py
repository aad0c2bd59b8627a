"""Describes the tensors of one call for a worker, and turns the worker's answer into tensors."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torch_shim.errors import BadFrame
from torch_shim.tensors import write_epochs
from torch_shim.tensors.handles import CudaTensor
from torch_shim.wire.arena import Buffer, flat, map_privately, span_of, tensor_over
from torch_shim.wire.data_channel import DataChannel
from torch_shim.wire.frame_socket import Frame
from torch_shim.wire.protocol import ALIGNMENT, aligned
from torch_shim.wire.worker_memory import Content, WorkerStorages

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
_DTYPE_OF = {name: dtype for dtype, name in NAME_OF.items()}
_WIDEST_ELEMENT_BYTES = 16
_RESULT_FIELDS = 5


@dataclass(slots=True)
class _ByteRun:
    """A run of bytes of one storage that is sent in the area."""

    storage: torch.UntypedStorage
    start: int
    stop: int
    key: int = 0
    content: Content = (0, 0)
    offset: int = 0


@dataclass(slots=True)
class SentInput:
    """One tensor input as sent: `value` may be a copy of `original`; bytes from `first_byte` on."""

    value: torch.Tensor
    original: torch.Tensor
    first_byte: int


class Shipment:
    """The unbound inputs of one call, described for the worker."""

    def __init__(self, values: Sequence[tuple[int, Any]], count: int, kept: WorkerStorages) -> None:
        self.inputs: list[Any] = [None] * count
        self.size_bytes = 0
        self._kept = kept
        self._runs: dict[int, _ByteRun] = {}
        self._sent: dict[int, SentInput] = {}
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
            if size:
                source = tensor_over(run.storage, torch.uint8, run.start, (size,), (1,))
                flat(area, torch.uint8, run.offset, size).copy_(source)

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
            self._kept.epochs[mark.key] = (content, held[1] + 1)

    def sent(self, number: int) -> SentInput | None:
        """Return the input as it was sent; None if it was bound."""
        return self._sent.get(number)

    def _plan(self, tensors: list[tuple[int, torch.Tensor]]) -> None:
        shared: dict[int, int] = {}
        for _, value in tensors:
            identity = id(write_epochs.storage_of(value))
            shared[identity] = shared.get(identity, 0) + 1
        placed = []
        for number, value in tensors:
            alone = shared[id(write_epochs.storage_of(value))] == 1
            placed.append((number, value, self._place(value, alone=alone)))
        for run in self._runs.values():
            run.offset = self.size_bytes
            self.size_bytes = aligned(run.offset + run.stop - run.start)
        for number, original, (value, source) in placed:
            self._describe(number, original, value, source)

    def _place(
        self, value: torch.Tensor, *, alone: bool
    ) -> tuple[torch.Tensor, _ByteRun | list[int]]:
        """Return the tensor to send (perhaps a compact copy) and the source of its bytes."""
        storage = write_epochs.storage_of(value)
        size = storage.nbytes()
        key, content = 0, (0, 0)
        if size >= KEEP_FROM_BYTES and isinstance(value, CudaTensor):  # writes to others go unseen
            mark = write_epochs.marked(value)
            content = (mark.epoch, write_epochs.version_of(value))
            held = self._kept.epochs.get(mark.key)
            if mark.untracked:
                pass
            elif held is not None and held[0] == content:
                return value, [KEPT, mark.key, held[1]]
            elif self._kept.sent.get(mark.key) == content:
                key = mark.key  # unchanged since the last call: keep it now
            else:
                self._kept.sent[mark.key] = content
        span = span_of(value)
        if alone and not key and span > 2 * value.numel():
            value = value.contiguous()
            storage, span = write_epochs.storage_of(value), value.numel()
        start = int(value.storage_offset()) * value.element_size()
        stop = start + span * value.element_size()
        if not alone:
            start -= start % _WIDEST_ELEMENT_BYTES
        if key:
            start, stop = 0, size
        run = self._runs.get(id(storage))
        if run is None:
            run = self._runs[id(storage)] = _ByteRun(storage, start, stop, key, content)
        run.start, run.stop = min(run.start, start), max(run.stop, stop)
        return value, run

    def _describe(
        self, number: int, original: torch.Tensor, value: torch.Tensor, source: _ByteRun | list[int]
    ) -> None:
        first_byte = 0
        if isinstance(source, _ByteRun):
            first_byte = source.start
            size, epoch = source.stop - source.start, source.content[0]
            source = [AREA, source.offset, size, source.key, epoch]
        offset = value.storage_offset() - first_byte // value.element_size()
        name = NAME_OF[value.dtype]
        on_cpu = not isinstance(original, CudaTensor)
        shape, strides = list(value.size()), list(value.stride())
        self.inputs[number] = [source, name, shape, strides, offset, on_cpu]
        self._sent[number] = SentInput(value, original, first_byte)


class Results:
    """A worker's answer to one call, as tensors of this process."""

    def __init__(self, frame: Frame, channel: DataChannel) -> None:
        if not isinstance(frame.meta, list) or len(frame.meta) != _RESULT_FIELDS:
            raise BadFrame("a result of unknown shape")
        self.storages, self.views, self.changed, self.rng, self.times = frame.meta
        self.size_bytes = sum(aligned(entry[1]) for entry in self.storages)
        self.size_bytes += sum(aligned(entry[2]) for entry in self.changed)
        self._area, self._copies = self._open(frame, channel)
        self._next = 0

    def tensors(self) -> list[torch.UntypedStorage]:
        """Return the result's storages, which this process owns."""
        return [
            write_epochs.storage_of(self._take(offset, size)) for offset, size, _ in self.storages
        ]

    def changes(self) -> list[tuple[int, torch.Tensor]]:
        """Return the positions of the inputs that the program wrote to, with their new bytes."""
        return [(number, self._take(offset, size)) for number, offset, size in self.changed]

    def _open(self, frame: Frame, channel: DataChannel) -> tuple[Buffer, bool]:
        """Return the memory that holds the answer, and whether the bytes must be copied from it."""
        if frame.descriptors:
            return map_privately(frame.descriptors[0], max(self.size_bytes, ALIGNMENT)), False
        if frame.body:
            return frame.body, False
        if channel.arena is None:
            return bytearray(), False
        return channel.arena.memory, True

    def _take(self, offset: int, size: int) -> torch.Tensor:
        if offset < 0:
            offset = self._next
            self._next = aligned(offset + size)
        found = flat(self._area, torch.uint8, offset, size)
        return found.clone() if self._copies else found


def view(storage: torch.UntypedStorage, described: list[Any]) -> torch.Tensor:
    """Return the tensor that a result describes over one of its storages."""
    _, name, shape, strides, offset = described[:5]
    return tensor_over(storage, _DTYPE_OF[name], offset, shape, strides)


def alias(base: torch.Tensor, sent: SentInput | None, described: list[Any]) -> torch.Tensor:
    """Return the tensor that a result describes over the storage of an input."""
    _, name, shape, strides, offset = described[:5]
    if sent is not None and sent.value is not sent.original:
        raise BadFrame("a result aliases an input that was sent as a copy")
    dtype = _DTYPE_OF[name]
    offset += (sent.first_byte if sent is not None else 0) // dtype.itemsize
    if dtype == base.dtype:
        return base.as_strided(shape, strides, offset)
    return tensor_over(write_epochs.storage_of(base), dtype, offset, shape, strides)
