"""The tensors of one call: its inputs, bound or sent, and its outputs, which come or stay.

Inputs lie in the model's image, with the worker already, in shared memory, or are sent; features
may have a worker take them from elsewhere. Tensors are made of a worker's answer.
"""

import itertools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from torch_shim.errors import BadFrame
from torch_shim.tensors import write_epochs
from torch_shim.tensors.absent_bytes import RunThere, absent_of, storage_without_bytes
from torch_shim.tensors.handles import CudaParameter, CudaTensor
from torch_shim.tensors.moves import note_origin
from torch_shim.weights import ModelImage
from torch_shim.wire.data_channel import DataChannel
from torch_shim.wire.manager_session import Content, WorkerPeer
from torch_shim.wire.messages import (
    AS_RECORDED,
    BEHIND,
    STAYS,
    CallResult,
    ChangedInput,
    FromArea,
    FromImage,
    FromKept,
    Number,
    OutputPart,
    Residents,
    SentOutput,
    SentTensor,
)
from torch_shim.wire.protocol import ALIGNMENT, Frame, aligned, places_behind
from torch_shim.wire.shared_memory import (
    Buffer,
    Layout,
    LentPages,
    SharedBlock,
    block_of,
    copy_of_bytes,
    flat,
    is_lazy,
    layout_of,
    map_privately,
    span_of,
    tensor_over,
    write_bytes,
)

# Smaller storages are sent with every call: referring to a kept copy would cost as much.
KEEP_FROM_BYTES = 4096

_DTYPES = (
    "bfloat16 bool complex64 complex128 float16 float32 float64 float8_e4m3fn float8_e5m2 int8 "
    "int16 int32 int64 uint8 uint16 uint32 uint64"
)
NAME_OF = {getattr(torch, name): name for name in _DTYPES.split()}
DTYPE_OF = {name: dtype for dtype, name in NAME_OF.items()}
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
        args: Sequence[Any],
        unbound: Sequence[int],
        channel: DataChannel,
        peer: WorkerPeer,
        written: frozenset[int] = frozenset(),
        whole: frozenset[int] = frozenset(),
    ) -> None:
        self.inputs: list[Any] = [None] * len(args)
        self.size_bytes = 0
        self._channel = channel
        self._peer = peer
        self._kept = peer.kept
        self._written = written
        self._whole = whole
        self._runs: dict[int, _ByteRun] = {}
        self.sent: dict[int, SentInput] = {}  # by position; the others are bound
        self._changed: set[int] = set()
        tensors: list[tuple[int, torch.Tensor]] = []
        for number in unbound:
            value = args[number]
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
        if mark is not None and held is not None and number in self.sent:
            content = write_epochs.content_of(value)
            more = mark.key not in self._changed  # the worker counts a storage once in a call
            self._changed.add(mark.key)
            self._kept.epochs[mark.key] = (content, held[1] + more)

    def is_copy(self, position: int) -> bool:
        """Whether the worker got a copy of an input that lies otherwise than the input."""
        sent = self.sent.get(position)
        return sent is not None and sent.value is not sent.original

    def has_changed(self, value: torch.Tensor) -> bool:
        mark = write_epochs.mark_of(value)
        return mark is not None and mark.key in self._changed

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
            if run.block is None:
                run.offset = self.size_bytes
                self.size_bytes = aligned(run.offset + run.stop - run.start)
        for number, original, value, layout, source in placed:
            dtype, shape, strides, offset = layout
            first_byte = source.start if isinstance(source, _ByteRun) else 0
            sent_from = source.source() if isinstance(source, _ByteRun) else source
            offset -= first_byte // dtype.itemsize
            self.inputs[number] = SentTensor(sent_from, NAME_OF[dtype], shape, strides, offset)
            self.sent[number] = SentInput(value, original, first_byte)

    def _place(
        self, number: int, value: torch.Tensor, storage: torch.UntypedStorage, *, alone: bool
    ) -> tuple[torch.Tensor, Layout, _ByteRun | FromKept]:
        """Return the tensor to send (perhaps a compact copy) and the source of its bytes."""
        if is_lazy(value):
            self._bring(value)
            value = value.resolve_conj().resolve_neg()
            storage, alone = write_epochs.storage_of(value), True
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
        self._bring(value)  # the worker has other bytes than this one needs
        return None, key, content

    def _bring(self, value: torch.Tensor) -> None:
        lacks = absent_of(value)
        if lacks is not None:
            with_peer = lacks.holder is not None and lacks.holder.is_with(self._peer)
            lacks.bring(self._channel if with_peer else None)


_numbers = itertools.count(1)


class Bound:
    """The inputs of a graph that are a model's weights; valid until one of them is written to.

    Those at the positions in `never` are sent instead.
    """

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
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or is_lazy(value):
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


def batch_of(args: Sequence[Any], positions: Iterable[int] | None = None) -> int:
    """Return how many inputs a call has, by the first tensor (of those positions) that is none of
    the weights."""
    for value in args if positions is None else (args[position] for position in positions):
        # Torch answers the last question in Python: most are told by their class.
        kind = type(value)
        if kind is CudaTensor or (
            kind is not CudaParameter
            and isinstance(value, torch.Tensor)
            and not isinstance(value, torch.nn.Parameter)
        ):
            shape = value.size()
            return max(shape[0], 1) if shape else 1
    return 1


class OutputView(NamedTuple):
    """How an output lies in its storage; strides and offset in elements.

    A negative source -1 - n is the storage of input n.
    """

    source: int
    dtype: torch.dtype
    shape: list[int]
    strides: list[int]
    offset: int
    end_bytes: int


class AnswerLayout(NamedTuple):
    """The layout of an answer that was checked.

    It `holds` for every answer that says the same if it does not depend on the inputs: no output
    lies in one, none was written to, and all outputs are tensors.
    """

    holds: bool
    storages: list[OutputPart]
    sent: list[SentOutput | Number]
    views: list[Any]
    places: list[int]
    size_bytes: int

    @property
    def gives_no_input(self) -> bool:
        """Whether no output lies in an input."""
        return all(not isinstance(view, OutputView) or view.source >= 0 for view in self.views)

    def is_of(self, result: CallResult) -> bool:
        same = result.storages == self.storages and result.views == self.sent
        return self.holds and same and not result.changed and result.rng is None


class RecordedAnswer(NamedTuple):
    """What the answer to a recorded call said that others say to be theirs too."""

    layout: AnswerLayout
    changed: list[ChangedInput]


class Results:
    """A worker's answer to one call, as tensors of this process.

    Everything in it was computed by a process that may have gone mad: BadFrame for what does not
    fit together, before memory is taken or a byte is read. `layout` is for the next answer.
    """

    def __init__(
        self,
        frame: Frame,
        channel: DataChannel,
        peer: WorkerPeer,
        args: Sequence[Any],
        known: AnswerLayout | None = None,
        recorded: RecordedAnswer | None = None,
    ) -> None:
        """`known` is the layout of an earlier answer to the same program, `recorded` that to the
        call that this one repeats."""
        try:
            result: CallResult = frame.meta
            self.changed = result.changed
            self.rng, self.times, self.recorded = result.rng, result.times, result.recorded
            self.is_as_recorded = recorded is not None and result.recorded == AS_RECORDED
            if recorded is not None and self.is_as_recorded:
                known, self.changed = recorded
            elif known is None or not known.is_of(result):
                known = _layout_of(result, args)
            self.layout = known
            _, self.storages, _, self.views, places, self.size_bytes = known
            self.lent = peer.lent(result.file)
            arena = None if frame.descriptors or frame.body else channel.arena
            if arena is not None and any(part.offset == BEHIND for part in self.storages):
                raise BadFrame("a result is said to be behind its frame, where nothing is")
        except BaseException:
            frame.close_descriptors()
            raise
        self._places = iter(places)
        self._mapped: dict[int, int] = {}  # in the lent file, where each storage begins
        if self.lent is not None:
            sent = [number for number, part in enumerate(self.storages) if part.offset != STAYS]
            self._mapped.update(zip(sent, places, strict=False))  # those of changed inputs follow
        self._copies = arena is not None  # what stays in the arena is not this process's own
        self._area: Buffer = body_of(frame, self.size_bytes, self.lent) if arena is None else arena

    def bytes_at(self, offset: int, size: int) -> torch.UntypedStorage:
        """Return the next part, which this process owns.

        Parts are read in order: the storages' first, then those of changed inputs.
        """
        place = next(self._places)
        start = offset if offset >= 0 else place
        if start + size > len(self._area):
            raise BadFrame(f"{size} bytes of a result at {start} of {len(self._area)}")
        if self._copies:
            return copy_of_bytes(self._area, start, size)
        return flat(self._area, torch.uint8, start, size).untyped_storage()

    def aliased_inputs(self) -> frozenset[int]:
        """Return the inputs that outputs lie in."""
        views = [view for view in self.views if isinstance(view, OutputView)]
        return frozenset(-1 - view.source for view in views if view.source < 0)

    def note_origin(self, output: torch.Tensor, source: int) -> None:
        if self.lent is not None and source in self._mapped:
            note_origin(output, self.lent, self._mapped[source])


def _layout_of(result: CallResult, args: Sequence[Any]) -> AnswerLayout:
    parts: list[OutputPart | ChangedInput] = [*result.storages, *result.changed]
    sizes = [part.size_bytes for part in parts if part.offset != STAYS]
    for change in result.changed:
        written = _input(args, change.position)
        if change.size_bytes > write_epochs.storage_of(written).nbytes():
            size = change.size_bytes
            raise BadFrame(f"{size} bytes were written to an input that is smaller")
    views = [
        _view(output, result.storages, args) if isinstance(output, SentOutput) else output
        for output in result.views
    ]
    own = all(isinstance(view, OutputView) and view.source >= 0 for view in views)
    holds = own and not result.changed and result.rng is None
    return AnswerLayout(holds, result.storages, result.views, views, *places_behind(0, sizes))


def _view(sent: SentOutput, storages: Sequence[OutputPart], args: Sequence[Any]) -> OutputView:
    output = read_view(sent, "an output:")
    if output.source < 0:
        _input(args, -1 - output.source)
    elif output.source >= len(storages):
        raise BadFrame(f"an output in storage {output.source} of {len(storages)}")
    elif output.end_bytes > storages[output.source].size_bytes:
        size = storages[output.source].size_bytes
        raise BadFrame(f"an output up to byte {output.end_bytes} of {size}")
    return output


def body_of(frame: Frame, size_bytes: int, lent: LentPages | None = None) -> Buffer:
    """Return the memory that came with a frame, which this process owns."""
    if frame.descriptors:
        return map_privately(frame.descriptors[0], max(size_bytes, ALIGNMENT), lent)
    if len(frame.body) < size_bytes:
        raise BadFrame(f"a result of {size_bytes} bytes in a body of {len(frame.body)}")
    return frame.body or bytearray()


def tensor_in(storage: torch.UntypedStorage, output: OutputView) -> torch.Tensor:
    return tensor_over(storage, output.dtype, output.offset, output.shape, output.strides)


def alias(base: torch.Tensor, sent: SentInput | None, output: OutputView) -> torch.Tensor:
    """Return an output that lies in this input; in the copy of the input that was sent, if any."""
    base, first_byte = (base, 0) if sent is None else (sent.value, sent.first_byte)
    offset = output.offset + first_byte // output.dtype.itemsize
    storage = write_epochs.storage_of(base)
    if first_byte + output.end_bytes > storage.nbytes():
        raise BadFrame(f"an output up to byte {first_byte + output.end_bytes} of an input's")
    if output.dtype == base.dtype:
        return base.as_strided(output.shape, output.strides, offset)
    return tensor_over(storage, output.dtype, offset, output.shape, output.strides)


def laid_out(data: torch.UntypedStorage, like: torch.Tensor) -> torch.Tensor:
    """Return new content of a tensor, from its first element to its last, with its layout."""
    dtype, shape, strides, _ = layout_of(like)
    needed = span_of(shape, strides) * dtype.itemsize
    if data.nbytes() < needed:
        raise BadFrame(f"{data.nbytes()} bytes came for an input of {needed}")
    return tensor_over(data, dtype, 0, shape, strides)


def _input(args: Sequence[Any], position: int) -> torch.Tensor:
    value = args[position] if position < len(args) else None
    if not isinstance(value, torch.Tensor):
        raise BadFrame(f"a result names input {position}, which is no tensor")
    return value


def read_view(sent: SentOutput, what: str) -> OutputView:
    """Return how a tensor lies; BadFrame, which says `what` it is, for one that fits nothing."""
    dtype = DTYPE_OF.get(sent.dtype)
    if dtype is None or len(sent.shape) != len(sent.strides):
        raise BadFrame(f"{what} {sent!r:.200}")
    span = span_of(sent.shape, sent.strides)
    end_bytes = (sent.offset + span) * dtype.itemsize if span else 0
    return OutputView(sent.source, dtype, sent.shape, sent.strides, sent.offset, end_bytes)


# Which outputs of a program stay with the worker until the function looks at them.

# A smaller output is sent: asking for it later would cost more than its bytes.
LEAST_BYTES = 64 << 10
# Whether larger outputs are still looked at is tried again now and then.
_TRIED_FROM_BYTES = 1 << 20
_TRIED_EVERY = 16
_GROWTH = 2  # an output that has grown by this factor is perhaps not what was looked at

# Each call has the keys from one of these numbers on: no other storage has any of them.
_first_keys = itertools.count(1 << 40, 1 << 16)
_use_count = torch._C._storage_Use_Count  # noqa: SLF001 - shows whether another tensor uses it
_set = torch._C.TensorBase.set_  # noqa: SLF001 - the original, not the shim's replacement


class OutputHabits:
    """What a function did with one program's outputs: what it looks at is sent at once."""

    def __init__(self) -> None:
        self._looked: dict[int, int] = {}  # the sizes of outputs that were fetched, by number
        self._calls = 0

    def wanted(self) -> dict[int, int]:
        """Return what the next call should send: outputs by number, and up to which size."""
        self._calls += 1
        tries = not self._calls % _TRIED_EVERY
        return {
            number: _GROWTH * size
            for number, size in list(self._looked.items())
            if not tries or size < _TRIED_FROM_BYTES
        }

    def look(self, number: int, size_bytes: int) -> None:
        self._looked[number] = size_bytes


class StayingOutputs:
    """The outputs and changed inputs of one call that stay with the worker."""

    def __init__(self, habits: OutputHabits, peer: WorkerPeer, run_there: RunThere) -> None:
        self._run_there = run_there
        self._habits = habits
        self._peer = peer
        self._first_key = next(_first_keys)
        self._dropped = peer.take_dropped()
        self.large: list[int] = []  # outputs in storages of their own, which stayed or came
        self.repeatable = True  # False once it has written to an input
        self.residents = Residents(self._first_key, LEAST_BYTES, habits.wanted(), self._dropped)

    def give_up(self) -> None:
        """The call has failed: name again what the function needs no more."""
        for key in self._dropped:
            self._peer.drop(key)

    def output(self, number: int, size_bytes: int) -> torch.UntypedStorage:
        if not size_bytes:
            raise BadFrame("an output without bytes stays with the worker")
        mark = write_epochs.WriteMark(self._first_key + number)
        storage = storage_without_bytes(mark, size_bytes)
        looked = partial(self._habits.look, number, size_bytes)
        mark.absent.leave(self._peer, self._run_there, looked)
        return storage

    def changed(self, value: torch.Tensor) -> bool:
        """Note that the worker wrote to a storage that it keeps.

        Return False if this process needs the bytes, because other tensors use its storage.
        """
        mark = write_epochs.marked(value)
        if mark.absent is None and not _adopt(value, mark):
            return False
        mark.absent.leave(self._peer, self._run_there)
        return True


def _adopt(value: torch.Tensor, mark: write_epochs.WriteMark) -> bool:
    """Move a tensor to a storage whose bytes can be absent, if no other tensor uses the former."""
    former = write_epochs.storage_of(value)
    fixed = value.is_inference() and not torch.is_inference_mode_enabled()
    alone = _use_count(former._cdata) == len(("the tensor", "former"))  # noqa: SLF001 - as above
    if fixed or not alone or not isinstance(value, CudaTensor):
        return False
    storage = storage_without_bytes(mark, former.nbytes())
    with torch.no_grad():
        _set(value, storage, value.storage_offset(), value.size(), value.stride())
    return True


def overwrite(value: torch.Tensor, content: torch.Tensor) -> None:
    storage = write_epochs.storage_of(value)
    with torch.no_grad():
        tensor_over(storage, torch.uint8, 0, (storage.nbytes(),), (1,)).copy_(content)
