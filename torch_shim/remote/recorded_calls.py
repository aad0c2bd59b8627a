"""Calls that are the same again: function and worker have a recording of each, and repeat that.

After some equal calls of a program the worker is asked to record one. A recorded call copies its
inputs to the places of the recorded one in the arena, sends a frame that was packed once, waits for
one that it knows, and copies its outputs from their places. A recording answers only where all is
as it was recorded: the weights and their content, the other inputs' layouts and numbers, torch's
settings. Whatever differs, or is refused, is called as ever. What cannot be recorded is counted.
"""

import itertools
import math
import struct
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch

from torch_shim.errors import BadFrame, RemoteFailure, WireError
from torch_shim.leases.leasing import SessionLease
from torch_shim.process_report import report
from torch_shim.remote.program import CallLook, CallRecorder, RemoteCall, Tries, recorders
from torch_shim.remote.values import (
    DTYPE_OF,
    KEEP_FROM_BYTES,
    Bound,
    OutputView,
    Results,
    Shipment,
    batch_of,
    tensor_in,
)
from torch_shim.tensors import write_epochs
from torch_shim.tensors.handles import CudaParameter, CudaTensor, NoTorchFunction
from torch_shim.weights import ModelImage
from torch_shim.wire.arithmetic import settings_in_force
from torch_shim.wire.current_call import CallTiming
from torch_shim.wire.data_channel import DataChannel
from torch_shim.wire.manager_session import Content, WorkerStorages
from torch_shim.wire.messages import MOST_RECORDED, FromArea, OutputPart, Record, SentTensor
from torch_shim.wire.protocol import MOST_BINDINGS, NOTES_BYTES, FailureKind, FrameKind, pack_frame
from torch_shim.wire.shared_memory import Buffer, flat, span_of, tensor_over

# A program's calls are recorded after so many equal ones; others may never recur.
_EQUAL_BEFORE = 2
# One that the worker refused, perhaps for an output of another shape, waits for so many more.
_CALLS_AFTER_REFUSAL = 16
_MOST_KINDS = 64  # kinds of calls of one program that are counted
_TIMES = struct.Struct("<4d")
_MOST_S = 1e18
_MOST_TRACE = NOTES_BYTES - _TIMES.size - 1
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, CudaTensor, CudaParameter})
_HANDLES = frozenset({CudaTensor, CudaParameter})
_NUMBERS = frozenset({bool, int, type(None)})
_AS_IT_IS: AbstractContextManager[None] = nullcontext()
_RECORDED = ""  # what a worker says that has recorded a call

_base = torch._C.TensorBase  # noqa: SLF001 - has the originals of the methods
_size, _stride, _copy, _clone = _base.size, _base.stride, _base.copy_, _base.clone
_dtype: Callable[[torch.Tensor], torch.dtype] = _base.dtype.__get__  # type: ignore[attr-defined] # a descriptor of C there


@dataclass(slots=True)
class _Place:
    """An input of a recorded call: how it lies, and where in the arena."""

    position: int
    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]
    tensor: torch.Tensor
    last: tuple[int, Content] | None = None  # of large ones, the storage's key and content

    def takes(self, value: Any, kept: WorkerStorages) -> bool:
        """Whether an argument is like the recorded one, and would be sent in any case."""
        kind = type(value)
        if (
            kind not in _PLAIN
            or _dtype(value) is not self.dtype
            or _size(value) != self.shape
            or _stride(value) != self.strides
        ):
            return False
        return kind not in _HANDLES or not _is_large(value) or self._is_new(value, kept)

    def fill(self, value: torch.Tensor) -> None:
        _copy(self.tensor, value)
        if type(value) in _HANDLES and _is_large(value):
            mark = write_epochs.marked(value)
            self.last = mark.key, (mark.epoch, write_epochs.version_of(value))

    def _is_new(self, value: torch.Tensor, kept: WorkerStorages) -> bool:
        """Whether no worker is to have this content: else the call as ever has one keep it."""
        storage = write_epochs.storage_of(value)
        mark = write_epochs.mark_storage(storage)
        content = mark.epoch, write_epochs.version_of(value)
        held, sent = kept.epochs.get(mark.key), kept.sent.get(mark.key)
        if (mark.key, content) == self.last or content in (sent, held and held[0]):
            return False
        # Beside its mark a storage knows where else its bytes are: in a block, or another's data.
        return mark.absent is None and len(storage.__dict__) == 1

    @classmethod
    def of(cls, position: int, given: SentTensor, arena: Buffer) -> "_Place":
        assert isinstance(given.source, FromArea), "others are not recorded"
        tensor = tensor_over(
            flat(
                arena, torch.uint8, given.source.offset, given.source.size_bytes
            ).untyped_storage(),
            DTYPE_OF[given.dtype],
            given.offset,
            given.shape,
            given.strides,
        )
        return cls(position, tensor.dtype, tensor.size(), tensor.stride(), tensor)


class _Recording:
    """One recorded call of one channel. It keeps no weights: what was bound may end before it."""

    def __init__(
        self,
        number: int,
        kind: Hashable,
        call: RemoteCall,
        shipment: Shipment,
        results: Results,
    ) -> None:
        arena = call.channel.arena
        assert arena is not None, "a worker has recorded what lies in it"
        self.number = number
        self.kind = kind
        self.operators = call.program.operators
        self.bound = ref(call.bound)
        self.model = ref(call.held.model)
        self.settings = settings_in_force()
        self.inputs: list[_Place] = []
        self.numbers: list[tuple[int, Any]] = []
        for position in call.bound.others:
            given = shipment.inputs[position]
            if isinstance(given, SentTensor):
                self.inputs.append(_Place.of(position, given, arena))
            else:
                self.numbers.append((position, given))
        self.outputs = [output_in(arena, view, results.storages) for view in results.views]
        self.sent_bytes = sum(place.tensor.nbytes for place in self.inputs)
        self.received_bytes = sum(output.nbytes for output in self.outputs)
        self.notes = len(arena) - NOTES_BYTES
        self._lease, self._packed = -1, b""
        self._answer = pack_frame(FrameKind.RAN_AGAIN, (number, 0))

    def holds(
        self, args: Sequence[Any], bound: Bound, model: ModelImage, kept: WorkerStorages
    ) -> bool:
        """Whether a call with these arguments, whose weights are `bound`, is the recorded one."""
        if self.bound() is not bound or self.model() is not model:
            return False
        for place in self.inputs:
            if not place.takes(args[place.position], kept):
                return False
        for position, value in self.numbers:
            if not _is_same(args[position], value):
                return False
        return self.settings == settings_in_force()

    def run(
        self, args: Sequence[Any], lease: int, channel: DataChannel, timing: CallTiming | None
    ) -> tuple[list[Any], tuple[float, ...]]:
        """Return the outputs and the worker's times; RemoteFailure if the worker refuses."""
        arena = channel.arena
        assert arena is not None, "recordings end with their arena"
        if lease != self._lease:
            self._lease = lease
            self._packed = pack_frame(FrameKind.RUN_AGAIN, (self.number, lease))
        with torch.no_grad() if torch.is_grad_enabled() else _AS_IT_IS:
            for place in self.inputs:
                place.fill(args[place.position])
        start = self.notes + _TIMES.size
        trace = b"" if timing is None else timing.header.encode()[:_MOST_TRACE]
        arena[start] = len(trace)
        if trace:
            arena[start + 1 : start + 1 + len(trace)] = trace
        channel.run_again(self._packed, self._answer)
        outputs = [_clone(output) for output in self.outputs]
        times = _TIMES.unpack_from(arena, self.notes)
        if not abs(sum(times)) <= _MOST_S:  # no number is neither
            raise BadFrame(f"the times of a recorded call: {times}")
        return outputs, times


def output_in(arena: Buffer, view: OutputView, storages: Sequence[OutputPart]) -> torch.Tensor:
    """The place of an output; BadFrame where a worker that has gone mad says that it is none."""
    part = storages[view.source]
    is_there = 0 <= part.offset <= len(arena) - NOTES_BYTES - part.size_bytes
    if not is_there or math.prod(view.shape) * view.dtype.itemsize > part.size_bytes:
        raise BadFrame(f"a recorded output of {view.shape!r:.80} in {part!r:.80}")
    storage = flat(arena, torch.uint8, part.offset, part.size_bytes).untyped_storage()
    return tensor_in(storage, view)


class ChannelRecordings:
    """The recorded calls of one channel, by program."""

    def __init__(self) -> None:
        self._numbers = itertools.cycle(range(1, MOST_RECORDED + 1))
        self._programs: dict[int, int] = {}  # of each number
        self._recordings: dict[int, dict[int, _Recording]] = {}  # by program and number

    def find(
        self, program: int, args: Sequence[Any], bound: Bound, held: SessionLease
    ) -> _Recording | None:
        kept = held.lease.peer.kept
        for recording in self._recordings.get(program, {}).values():
            if recording.holds(args, bound, held.model, kept):
                return recording
        return None

    def next_number(self) -> int:
        """Return the number of the next recording, which ends the one that has it."""
        number = next(self._numbers)
        self.forget(number)
        return number

    def add(self, program: int, recording: _Recording) -> None:
        self._programs[recording.number] = program
        self._recordings.setdefault(program, {})[recording.number] = recording

    def forget(self, number: int) -> None:
        program = self._programs.pop(number, None)
        if program is not None:
            self._recordings[program].pop(number, None)


class RepeatedCalls(CallRecorder):
    """Counts the equal calls of one program, has them recorded, and repeats what is recorded."""

    def __init__(self, program: int) -> None:
        super().__init__(program)
        self._bounds: list[ref[Bound]] = []  # of the calls that were recorded last
        self._counts: OrderedDict[Hashable, int] = OrderedDict()
        self._refused: dict[Hashable, str] = {}  # kinds of calls that are not recorded, and why

    def answer(
        self, args: Sequence[Any], held: SessionLease, timing: CallTiming | None, tries: Tries
    ) -> list[Any] | None:
        bound = self._bound_again(args)
        if bound is None:
            return None
        channel = held.lease.session.idle_channel(held.lease)
        if channel is None:
            return None
        try:
            with NoTorchFunction():
                return self._answer_on(channel, args, bound, held, timing)
        except WireError as error:
            held.lease.session.mark_lost(held.lease)
            tries.lose_worker(held.lease.peer.name, error)
            return None
        finally:
            held.lease.session.give(held.lease, channel)

    def _answer_on(
        self,
        channel: DataChannel,
        args: Sequence[Any],
        bound: Bound,
        held: SessionLease,
        timing: CallTiming | None,
    ) -> list[Any] | None:
        recordings: ChannelRecordings | None = channel.recordings
        if recordings is None:
            return None
        found = recordings.find(self.program, args, bound, held)
        if found is None:
            return None
        held.begin_call()
        answered = False
        try:
            if held.lease.peer.has_dropped:  # the call as ever has told the worker along with it
                channel.ask(FrameKind.DROP, held.lease.peer.take_dropped())
            outputs, times = found.run(args, held.lease.number, channel, timing)
            answered = True
        except RemoteFailure as failure:  # the call as ever finds out what to do
            if failure.failure == FailureKind.LEASE:
                held.lease.over = True
            else:
                recordings.forget(found.number)
                self._counts[found.kind] = -_CALLS_AFTER_REFUSAL
            return None
        finally:
            held.end_call(answered=answered)
        moved = found.sent_bytes, found.received_bytes
        report.graph_call(found.operators, *moved, times, recorded=True)
        if timing is not None:
            batch = batch_of(args, bound.others)
            timing.answered(held.lease.number, held.model.digest, batch, times)
        return outputs

    def _bound_again(self, args: Sequence[Any]) -> Bound | None:
        for each in self._bounds:
            bound = each()
            if bound is not None and bound.holds(args):
                return bound
        return None

    # -- calls as ever --------------------------------------------------------------------------

    def look(self, call: RemoteCall, shipment: Shipment) -> CallLook:
        why_not = _why_not(call, shipment)
        kind = None if why_not else _kind_of(call, shipment)
        why_not = why_not or self._refused.get(kind, "")
        if why_not:
            return CallLook(kind, why_not)
        count = self._counts[kind] = self._counts.pop(kind, 0) + 1
        if len(self._counts) > _MOST_KINDS:
            self._counts.popitem(last=False)
        channel = call.channel
        if count <= _EQUAL_BEFORE or channel.arena is None:
            return CallLook(kind)
        if channel.recordings is None:
            channel.recordings = ChannelRecordings()
        number = channel.recordings.next_number()
        return CallLook(kind, "", Record(number, len(channel.arena) - NOTES_BYTES))

    def note(self, look: CallLook, call: RemoteCall, shipment: Shipment, results: Results) -> None:
        kind, why_not, record = look
        if record is not None and results.recorded != _RECORDED:
            if len(self._refused) >= _MOST_KINDS:
                self._refused.clear()
            why_not = self._refused[kind] = results.recorded or "the worker records nothing"
        if why_not:
            report.unrecorded_call(why_not)
        elif record is not None:
            if not results.layout.holds:
                raise BadFrame("a worker has recorded a call whose outputs lie elsewhere")
            with torch.inference_mode(mode=False), torch.no_grad():
                recording = _Recording(record.number, kind, call, shipment, results)
            self._add(call, recording)

    def _add(self, call: RemoteCall, recording: _Recording) -> None:
        call.channel.recordings.add(self.program, recording)
        others = [each for each in self._bounds if each() not in (None, call.bound)]
        self._bounds = [ref(call.bound), *others][:MOST_BINDINGS]
        self.is_used = True


def install() -> None:
    """Have the calls of all programs recorded."""
    recorders.append(RepeatedCalls)


def _kind_of(call: RemoteCall, shipment: Shipment) -> Hashable:
    """Equal for calls that one recording may answer."""
    inputs = [_look_of(shipment.inputs[position]) for position in call.bound.others]
    return call.bound.number, tuple(inputs), settings_in_force()


def _look_of(given: Any) -> Hashable:
    if isinstance(given, SentTensor):
        return given.dtype, tuple(given.shape), tuple(given.strides)
    return type(given), given


def _why_not(call: RemoteCall, shipment: Shipment) -> str:
    """Why a call cannot be repeated from the arena; empty if it perhaps can."""
    if call.rng is not None:
        return "it draws random numbers"
    if not call.channel.wire.local:
        return "the worker is on another machine"
    starts: set[int] = set()
    for position in call.bound.others:
        value, given = call.args[position], shipment.inputs[position]
        if not isinstance(given, SentTensor):
            if type(value) not in _NUMBERS:
                return f"an input is a {type(value).__name__}"
            continue
        source, sent = given.source, shipment.sent[position]
        if not isinstance(source, FromArea) or source.key or source.block:
            return "an input stays with the worker"
        dense = span_of(given.shape, given.strides) == math.prod(given.shape)
        if not dense or type(value) not in _PLAIN or sent.value is not sent.original:
            return "an input has gaps, or a class of its own"
        if source.size_bytes and source.offset in starts:  # those of another call may be two
            return "inputs share memory"
        starts.add(source.offset)
    return ""


def _is_large(value: torch.Tensor) -> bool:
    """Whether workers may keep what an input has, so that it is not always sent."""
    return write_epochs.storage_of(value).nbytes() >= KEEP_FROM_BYTES


def _is_same(given: Any, known: Any) -> bool:
    return type(given) is type(known) and given == known
