"""The results of one call: tensors made of a worker's answer, and outputs that stay with it."""

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from torch_shim.errors import BadFrame
from torch_shim.remote.inputs import NAME_OF, SentInput, Shipment
from torch_shim.tensors import write_epochs
from torch_shim.tensors.absent_bytes import RunThere, storage_without_bytes
from torch_shim.tensors.handles import CudaTensor
from torch_shim.tensors.large_copies import note_origin
from torch_shim.wire.frame_socket import Frame
from torch_shim.wire.messages import (
    BEHIND,
    STAYS,
    CallResult,
    ChangedInput,
    Number,
    OutputPart,
    Residents,
    SentOutput,
)
from torch_shim.wire.protocol import ALIGNMENT, places_behind
from torch_shim.wire.shared_memory import (
    Buffer,
    LentPages,
    copy_of_bytes,
    flat,
    layout_of,
    map_privately,
    span_of,
    tensor_over,
)
from torch_shim.wire.worker_peer import DataChannel, WorkerPeer

_DTYPE_OF = {name: dtype for dtype, name in NAME_OF.items()}


class AliasOfCopy(Exception):
    """An output lies in an input of which the worker has a compact copy.

    Where the output lies in the input itself cannot be told from that: the call has to be repeated
    with these inputs as they lie.
    """

    def __init__(self, positions: frozenset[int]) -> None:
        super().__init__(positions)
        self.positions = positions


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
    """The layout of an answer that was checked: it holds for every answer that says the same.

    It does not depend on the inputs: no output lies in one, none was written to, and all outputs
    are tensors.
    """

    storages: list[OutputPart]
    sent: list[SentOutput | Number]
    views: list[Any]
    places: list[int]
    size_bytes: int

    def is_of(self, result: CallResult) -> bool:
        same = result.storages == self.storages and result.views == self.sent
        return same and not result.changed and result.rng is None


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
    ) -> None:
        """`known` is the layout of an earlier answer to the same program."""
        try:
            result: CallResult = frame.meta
            self.storages, self.changed = result.storages, result.changed
            self.rng, self.times = result.rng, result.times
            self.layout = known if known is not None and known.is_of(result) else None
            if self.layout is None:
                self.layout = self._checked(result, args)
            else:
                _, _, self.views, self._places_of_parts, self.size_bytes = self.layout
            places = self._places_of_parts
            self.lent = peer.lent(result.file)
            sent_here = frame.descriptors or frame.body or channel.arena is None
            if not sent_here and any(part.offset == BEHIND for part in self.storages):
                raise BadFrame("a result is said to be behind its frame, where nothing is")
        except BaseException:
            frame.close_descriptors()
            raise
        self._places = iter(places)
        self._mapped: dict[int, int] = {}  # in the lent file, where each storage begins
        if self.lent is not None:
            sent = [number for number, part in enumerate(self.storages) if part.offset != STAYS]
            self._mapped.update(zip(sent, places, strict=False))  # those of changed inputs follow
        self._area, self._copies = self._open(frame, channel)

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

    def _checked(self, result: CallResult, args: Sequence[Any]) -> AnswerLayout | None:
        """Take the fields of an answer; return its layout if it holds for other inputs too."""
        parts: list[OutputPart | ChangedInput] = [*result.storages, *result.changed]
        sizes = [part.size_bytes for part in parts if part.offset != STAYS]
        for change in result.changed:
            written = _input(args, change.position)
            if change.size_bytes > write_epochs.storage_of(written).nbytes():
                size = change.size_bytes
                raise BadFrame(f"{size} bytes were written to an input that is smaller")
        self.views = [
            self._view(output, args) if isinstance(output, SentOutput) else output
            for output in result.views
        ]
        self._places_of_parts, self.size_bytes = places_behind(0, sizes)
        own = all(isinstance(view, OutputView) and view.source >= 0 for view in self.views)
        if not own or result.changed or result.rng is not None:
            return None
        places = self._places_of_parts
        return AnswerLayout(result.storages, result.views, self.views, places, self.size_bytes)

    def _view(self, sent: SentOutput, args: Sequence[Any]) -> OutputView:
        output = _read_view(sent)
        if output.source < 0:
            _input(args, -1 - output.source)
        elif output.source >= len(self.storages):
            raise BadFrame(f"an output in storage {output.source} of {len(self.storages)}")
        elif output.end_bytes > self.storages[output.source].size_bytes:
            size = self.storages[output.source].size_bytes
            raise BadFrame(f"an output up to byte {output.end_bytes} of {size}")
        return output

    def check_aliases(self, shipment: Shipment) -> None:
        """Raise AliasOfCopy where an output lies in an input that was sent compactly."""
        aliased = [
            -1 - output.source
            for output in self.views
            if isinstance(output, OutputView) and output.source < 0
        ]
        if not aliased:
            return
        sent = {position: shipment.sent(position) for position in aliased}
        copies = [at for at, item in sent.items() if item and item.value is not item.original]
        if copies:
            raise AliasOfCopy(frozenset(copies))

    def note_origin(self, output: torch.Tensor, source: int) -> None:
        if self.lent is not None and source in self._mapped:
            note_origin(output, self.lent, self._mapped[source])

    def _open(self, frame: Frame, channel: DataChannel) -> tuple[Buffer, bool]:
        """Return the memory that holds the answer, and whether the bytes must be copied from it."""
        if frame.descriptors or frame.body or channel.arena is None:
            return body_of(frame, self.size_bytes, self.lent), False
        return channel.arena.memory, True


def body_of(frame: Frame, size_bytes: int, lent: LentPages | None = None) -> Buffer:
    """Return the memory that came with a frame, which this process owns."""
    if frame.descriptors:
        return map_privately(frame.descriptors[0], max(size_bytes, ALIGNMENT), lent)
    if len(frame.body) < size_bytes:
        raise BadFrame(f"a result of {size_bytes} bytes in a body of {len(frame.body)}")
    return frame.body or bytearray()


def view(storage: torch.UntypedStorage, output: OutputView) -> torch.Tensor:
    return tensor_over(storage, output.dtype, output.offset, output.shape, output.strides)


def alias(base: torch.Tensor, sent: SentInput | None, output: OutputView) -> torch.Tensor:
    first_byte = sent.first_byte if sent is not None else 0
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


def _read_view(sent: SentOutput) -> OutputView:
    dtype = _DTYPE_OF.get(sent.dtype)
    if dtype is None or len(sent.shape) != len(sent.strides):
        raise BadFrame(f"an output: {sent!r:.200}")
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
