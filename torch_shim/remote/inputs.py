"""The inputs of one call: bound weights, tensors that are sent, data of other functions."""

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

from torch_shim.tensors import write_epochs
from torch_shim.tensors.absent_bytes import absent_of
from torch_shim.tensors.dispatch import names
from torch_shim.tensors.handles import CudaTensor
from torch_shim.weights import ModelImage
from torch_shim.wire.messages import FromArea, FromImage, FromKept, SentTensor
from torch_shim.wire.protocol import MOST_BINDINGS, aligned
from torch_shim.wire.shared_memory import (
    Buffer,
    Layout,
    SharedBlock,
    block_of,
    layout_of,
    span_of,
    write_bytes,
)
from torch_shim.wire.worker_peer import Content, DataChannel, WorkerPeer

# Smaller storages are sent with every call: referring to a kept copy would cost as much.
KEEP_FROM_BYTES = 4096

_DTYPES = names(
    "bfloat16 bool complex64 complex128 float16 float32 float64 float8_e4m3fn float8_e5m2 int8 "
    "int16 int32 int64 uint8 uint16 uint32 uint64"
)
NAME_OF = {getattr(torch, name): name for name in sorted(_DTYPES) if hasattr(torch, name)}
_WIDEST_ELEMENT_BYTES = 16

# Have a worker keep a storage's content from where else that lies, if it can: features add to it.
Taker = Callable[[torch.UntypedStorage, int, Content, WorkerPeer, DataChannel], bool]
takers: list[Taker] = []


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

    def source(self) -> FromArea:
        size, epoch = self.stop - self.start, self.content[0]
        if self.block is None:
            return FromArea(self.offset, size, self.key, epoch)
        return FromArea(self.start, size, self.key, epoch, self.block.key)


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
            content = write_epochs.content_of(value)
            more = mark.key not in self._changed  # the worker counts a storage once in a call
            self._changed.add(mark.key)
            self._kept.epochs[mark.key] = (content, held[1] + more)

    def has_changed(self, value: torch.Tensor) -> bool:
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
    ) -> tuple[torch.Tensor, Layout, _ByteRun | FromKept]:
        """Return the tensor to send (perhaps a compact copy) and the source of its bytes."""
        layout = layout_of(value)
        key, content = 0, (0, 0)
        # Writes to others than handles go unseen.
        if storage.nbytes() >= KEEP_FROM_BYTES and isinstance(value, CudaTensor):
            kept, key, content = self._kept_there(number, value, storage)
            if kept is not None:
                return value, layout, kept
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
            start, stop = 0, storage.nbytes()
        run = self._runs.get(id(storage))
        if run is None:
            run = self._runs[id(storage)] = _ByteRun(storage, start, stop, key, content, block)
        run.start, run.stop = min(run.start, start), max(run.stop, stop)
        return value, layout, run

    def _kept_there(
        self, number: int, value: torch.Tensor, storage: torch.UntypedStorage
    ) -> tuple[FromKept | None, int, Content]:
        """Return what the worker keeps of a storage, or the key to keep it by if it is sent."""
        mark, key = write_epochs.marked(value), 0
        mark.held_by(self._peer)  # it may keep a copy
        content = mark.epoch, write_epochs.version_of(value)
        held = self._kept.epochs.get(mark.key)
        if not mark.untracked:
            if held is not None and held[0] == content:
                return FromKept(mark.key, held[1]), 0, content
            if number in self._written or self._kept.sent.get(mark.key) == content:
                key = mark.key  # unchanged since the last call: keep it now
            else:
                self._kept.sent[mark.key] = content
        for take in takers:
            if take(storage, mark.key, content, self._peer, self._channel):
                return FromKept(mark.key, 0), 0, content
        lacks = absent_of(value)
        if lacks is not None:  # the worker has other bytes than this one needs
            with_peer = lacks.holder is not None and lacks.holder.is_with(self._peer)
            lacks.bring(self._channel if with_peer else None)
        return None, key, content

    def _describe(
        self,
        number: int,
        original: torch.Tensor,
        value: torch.Tensor,
        layout: Layout,
        source: _ByteRun | FromKept,
    ) -> None:
        first_byte = 0
        if isinstance(source, _ByteRun):
            first_byte = source.start
            sent_from: FromArea | FromKept = source.source()
        else:
            sent_from = source
        dtype, shape, strides, offset = layout
        offset -= first_byte // dtype.itemsize
        self.inputs[number] = SentTensor(sent_from, NAME_OF[dtype], shape, strides, offset)
        self._sent[number] = SentInput(value, original, first_byte)


_numbers = itertools.count(1)


class Bindings:
    """The latest bindings of one program, which all models of one structure share.

    What is bound for a model lasts as long as the model's image, since it keeps the weights.
    """

    def __init__(self) -> None:
        self._of: WeakKeyDictionary[ModelImage, list[Bound]] = WeakKeyDictionary()

    def find(self, args: Sequence[Any], model: ModelImage, never: frozenset[int]) -> "Bound":
        """Return the binding that holds for these arguments; the positions in `never` are free."""
        bindings = self._of.get(model, [])
        for bound in bindings:
            if bound.holds(args):
                return bound
        bound = Bound(args, model, never)
        self._of[model] = [bound, *bindings][:MOST_BINDINGS]
        return bound


class Bound:
    """The inputs of a graph that are a model's weights; valid until one of them is written to."""

    def __init__(self, args: Sequence[Any], model: ModelImage, never: frozenset[int]) -> None:
        self.number = next(_numbers)
        self.positions: list[int] = []
        self.tensors: dict[int, SentTensor] = {}
        self._writes = write_epochs.writes
        marks = []
        for position, value in enumerate(args):
            described = None if position in never else _describe(value, model)
            if described is not None:
                self.positions.append(position)
                self.tensors[position] = described
                marks.append(write_epochs.marked(value))
        self._values = [args[position] for position in self.positions]
        self._versions = write_epochs.versions_of(self._values)
        self._marks = marks
        self._epochs = [mark.epoch for mark in marks]
        taken = set(self.positions)
        self.others = [position for position in range(len(args)) if position not in taken]

    def holds(self, args: Sequence[Any]) -> bool:
        """Whether these arguments are the bound weights, and unchanged since binding."""
        values = [args[position] for position in self.positions]
        return all(map(operator.is_, values, self._values)) and self.unchanged()

    def given(self) -> list[tuple[int, torch.Tensor]]:
        return list(zip(self.positions, self._values, strict=True))

    def unchanged(self) -> bool:
        values = self._values
        if write_epochs.versions_of(values) != self._versions:
            return False
        if self._writes != write_epochs.writes:
            writes = write_epochs.writes
            marks = [write_epochs.marked(value) for value in values]
            if not all(map(operator.is_, marks, self._marks)):
                return False
            if [mark.epoch for mark in marks] != self._epochs:
                return False
            self._writes = writes
        return True


def _describe(value: Any, model: ModelImage) -> SentTensor | None:
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    mark = write_epochs.mark_of(value)
    place = (
        None
        if mark is None or mark.untracked
        else model.place_of(mark, write_epochs.version_of(value))
    )
    if place is None:
        return None
    source = FromImage(model.digest, place.offset, place.size_bytes)
    shape, strides = list(value.size()), list(value.stride())
    return SentTensor(source, NAME_OF[value.dtype], shape, strides, int(value.storage_offset()))
