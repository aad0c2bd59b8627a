"""Calls that are the same again: function and worker have a recording of each, and repeat that.

After some equal calls of a program the worker is asked to record one. A recorded call copies its
inputs to the places of the recorded one in the arena, sends a frame that was packed once, waits for
one that it knows, and copies its outputs from their places. A recording answers only where all is
as it was recorded: the weights and their content, the other inputs' layouts and numbers, torch's
settings. Whatever differs, or is refused, is called as ever. What cannot be recorded is counted.

A call with a state draws random numbers, writes to inputs, or has inputs or outputs that stay with
the worker. It is made as ever, but described no more: the function names the recorded call and what
changes from one to the next, and the worker says that the answer is the recorded one.
"""

import itertools
import math
import struct
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar
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
    RecordedAnswer,
    Results,
    SentInput,
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
from torch_shim.wire.manager_session import Content, WorkerPeer, WorkerStorages
from torch_shim.wire.messages import (
    MOST_RECORDED,
    CallAgain,
    CallOptions,
    FromArea,
    FromKept,
    OutputPart,
    Record,
    SentTensor,
)
from torch_shim.wire.protocol import MOST_BINDINGS, NOTES_BYTES, FailureKind, FrameKind, pack_frame
from torch_shim.wire.shared_memory import (
    Buffer,
    Layout,
    flat,
    is_dense,
    is_lazy,
    layout_of,
    tensor_over,
)

# A program's calls are recorded after so many equal ones; others may never recur.
_EQUAL_BEFORE = 2
# One that the worker refused, perhaps for an output of another shape, waits for so many more.
_CALLS_AFTER_REFUSAL = 16
_MOST_KINDS = 64  # kinds of calls of one program that are counted
# Where so many calls in a row were of new kinds, one in so many is looked at: to tell takes long.
_MOST_NEW, _LOOKS_APART = 16, 16
_TIMES = struct.Struct("<4d")
_MOST_S = 1e18
_MOST_TRACE = NOTES_BYTES - _TIMES.size - 1
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, CudaTensor, CudaParameter})
_HANDLES = frozenset({CudaTensor, CudaParameter})
_NUMBERS = frozenset({bool, int, type(None)})
_AS_IT_IS: AbstractContextManager[None] = nullcontext()
_RECORDED = ""  # what a worker says that has recorded a call

_base = torch._C.TensorBase  # noqa: SLF001 - has the originals of the methods
_size, _stride, _offset = _base.size, _base.stride, _base.storage_offset
_copy, _clone = _base.copy_, _base.clone
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
            or is_lazy(value)
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
        return _is_only_here(storage)

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

    def __init__(self, number: int, kind: Hashable, call: RemoteCall, shipment: Shipment) -> None:
        arena = call.channel.arena
        assert arena is not None, "a worker has recorded what lies in it"
        self.number = number
        self.kind = kind
        self.bound = ref(call.bound)
        self.model = ref(call.held.model)
        self.inputs: list[_Place] = []
        self.numbers: list[tuple[int, Any]] = []
        self.kept: list[_KeptInput] = []
        for position in call.bound.others:
            given = shipment.inputs[position]
            if not isinstance(given, SentTensor):
                self.numbers.append((position, given))
            elif isinstance(given.source, FromKept):
                self.kept.append(_KeptInput(position, layout_of(call.args[position])))
            else:
                self.inputs.append(_Place.of(position, given, arena))

    def holds(
        self, args: Sequence[Any], bound: Bound, model: ModelImage, kept: WorkerStorages
    ) -> bool:
        """Whether a call with these arguments, whose weights are `bound`, is the recorded one."""
        if self.bound() is not bound or self.model() is not model:
            return False
        for place in self.inputs:
            if not place.takes(args[place.position], kept):
                return False
        return all(_is_same(args[position], value) for position, value in self.numbers)

    def fill(self, args: Sequence[Any]) -> None:
        with torch.no_grad() if torch.is_grad_enabled() else _AS_IT_IS:
            for place in self.inputs:
                place.fill(args[place.position])


class _SameCall(_Recording):
    """A call of which all is the same but what its inputs hold."""

    def __init__(
        self, number: int, kind: Hashable, call: RemoteCall, shipment: Shipment, results: Results
    ) -> None:
        super().__init__(number, kind, call, shipment)
        arena = call.channel.arena
        assert arena is not None, "its inputs lie there"
        self.operators = call.program.operators
        if not results.layout.holds:
            raise BadFrame("a worker has recorded a call whose outputs lie elsewhere")
        self.outputs = [output_in(arena, view, results.storages) for view in results.views]
        self.sent_bytes = sum(place.tensor.nbytes for place in self.inputs)
        self.received_bytes = sum(output.nbytes for output in self.outputs)
        self.settings = settings_in_force()
        self.notes = len(arena) - NOTES_BYTES
        self._lease, self._packed = -1, b""
        self._answer = pack_frame(FrameKind.RAN_AGAIN, (number, 0))

    def holds(
        self, args: Sequence[Any], bound: Bound, model: ModelImage, kept: WorkerStorages
    ) -> bool:
        return super().holds(args, bound, model, kept) and self.settings == settings_in_force()

    def run(
        self, args: Sequence[Any], lease: int, channel: DataChannel, timing: CallTiming | None
    ) -> tuple[list[Any], tuple[float, ...]]:
        """Return the outputs and the worker's times; RemoteFailure if the worker refuses."""
        arena = channel.arena
        assert arena is not None, "recordings end with their arena"
        if lease != self._lease:
            self._lease = lease
            self._packed = pack_frame(FrameKind.RUN_AGAIN, (self.number, lease))
        self.fill(args)
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


class _KeptInput(NamedTuple):
    """An input whose storage the worker keeps."""

    position: int
    layout: Layout

    def named(self, value: Any, peer: WorkerPeer) -> tuple[int, int] | None:
        """Return by which key and epoch the worker has this content; None for another input."""
        if type(value) not in _HANDLES or layout_of(value) != self.layout or is_lazy(value):
            return None
        mark = write_epochs.marked(value)
        held = None if mark.untracked else peer.kept.epochs.get(mark.key)
        if held is None or held[0] != (mark.epoch, write_epochs.version_of(value)):
            return None
        mark.held_by(peer)
        return mark.key, held[1]


class _CallWithState(_Recording):
    """A call of which all is the same but what its inputs hold, and its state.

    The settings are said anew each time, and an answer of another layout is read as any other.
    """

    def __init__(
        self, number: int, kind: Hashable, call: RemoteCall, shipment: Shipment, results: Results
    ) -> None:
        super().__init__(number, kind, call, shipment)
        self.size_bytes = shipment.size_bytes
        self.answer = RecordedAnswer(results.layout, results.changed)

    def kept_now(self, call: RemoteCall) -> list[tuple[int, int]] | None:
        """Return by which keys and epochs the worker keeps inputs of a call; None for another."""
        args, peer, arena = call.args, call.peer, call.channel.arena
        if self.bound() is not call.bound:
            return None
        if arena is None or self.size_bytes + call.program.result_bytes > len(arena):
            return None  # a call as ever makes a larger one
        kept: list[tuple[int, int]] = []
        for each in self.kept:
            named = each.named(args[each.position], peer)
            if named is None:
                return None
            kept.append(named)
        if not self.holds(args, call.bound, call.held.model, peer.kept):
            return None
        if self.answer.changed:  # what it writes to one input is seen in none of the others
            sent = [write_epochs.storage_of(args[place.position]) for place in self.inputs]
            others = [write_epochs.storage_of(args[each.position]) for each in self.kept]
            numbers = set(map(id, sent))
            if len(numbers) < len(sent) or not numbers.isdisjoint(map(id, others)):
                return None
        return kept

    def shipment(self, call: RemoteCall) -> Shipment:
        """The inputs of such a call, which are described already."""
        shipment = Shipment(call.args, (), call.channel, call.peer)
        shipment.size_bytes = self.size_bytes
        for place in self.inputs:
            value = call.args[place.position]
            first_byte = int(_offset(value)) * place.dtype.itemsize
            shipment.sent[place.position] = SentInput(value, value, first_byte)
        for each in self.kept:
            value = call.args[each.position]
            shipment.sent[each.position] = SentInput(value, value, 0)
        return shipment


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
    ) -> _SameCall | None:
        kept = held.lease.peer.kept
        for recording in self._recordings.get(program, {}).values():
            if isinstance(recording, _SameCall) and recording.holds(args, bound, held.model, kept):
                return recording
        return None

    def find_with_state(
        self, program: int, call: RemoteCall
    ) -> tuple[_CallWithState, list[tuple[int, int]]] | None:
        """Return a recording, and what the worker keeps of the call's inputs."""
        for recording in self._recordings.get(program, {}).values():
            if isinstance(recording, _CallWithState):
                kept = recording.kept_now(call)
                if kept is not None:
                    return recording, kept
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
            del self._recordings[program][number]
            if not self._recordings[program]:
                del self._recordings[program]


class RepeatedCalls(CallRecorder):
    """Counts the equal calls of one program, has them recorded, and repeats what is recorded."""

    def __init__(self, program: int) -> None:
        super().__init__(program)
        self._bounds: list[ref[Bound]] = []  # of the calls that were recorded last
        self._counts: OrderedDict[Hashable, int] = OrderedDict()
        self._refused: dict[Hashable, str] = {}  # kinds of calls that are not recorded, and why
        self._with_state: set[Hashable] = set()  # those that a worker can record only so
        self._new_kinds = 0  # in a row
        self._looks = itertools.count(1)

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
                self._forget(recordings, found)
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

    def repeat(self, call: RemoteCall, options: CallOptions) -> tuple[Shipment, Results] | None:
        recordings: ChannelRecordings | None = call.channel.recordings
        if recordings is None:
            return None
        with NoTorchFunction():
            found = recordings.find_with_state(self.program, call)
            if found is None:
                return None
            recording, kept = found
            recording.fill(call.args)
            shipment = recording.shipment(call)
        # On both sides it is the binding that was used last.
        call.channel.bind(self.program, call.bound.number, call.bound.tensors)
        message = CallAgain(call.held.lease.number, recording.number, kept, options)
        frame = call.ask(FrameKind.CALL_AGAIN, message)
        known = recording.answer
        results = Results(frame, call.channel, call.peer, call.args, recorded=known)
        if not results.is_as_recorded:
            report.unrecorded_call("its answer is another one")
            self._forget(recordings, recording)
        return shipment, results

    def _forget(self, recordings: ChannelRecordings, recording: _Recording) -> None:
        """End a recording that was of no use: such a call is recorded again some calls later."""
        recordings.forget(recording.number)
        self._counts[recording.kind] = -_CALLS_AFTER_REFUSAL

    def look(self, call: RemoteCall, shipment: Shipment) -> CallLook:
        if self._new_kinds >= _MOST_NEW and next(self._looks) % _LOOKS_APART:
            return CallLook(None, "its calls are of another kind each time")
        why_not = _why_not(call, shipment)
        kind = None if why_not else _kind_of(call, shipment)
        why_not = why_not or self._refused.get(kind, "")
        if why_not:
            return CallLook(kind, why_not)
        count = self._counts[kind] = self._counts.pop(kind, 0) + 1
        self._new_kinds = self._new_kinds + 1 if count == 1 else 0
        if len(self._counts) > _MOST_KINDS:
            self._counts.popitem(last=False)
        channel = call.channel
        if count <= _EQUAL_BEFORE or channel.arena is None:
            return CallLook(kind)
        if channel.recordings is None:
            channel.recordings = ChannelRecordings()
        number = channel.recordings.next_number()
        has_state = kind in self._with_state or _has_state(call, shipment)
        notes = 0 if has_state else len(channel.arena) - NOTES_BYTES
        return CallLook(kind, "", Record(number, notes))

    def note(self, look: CallLook, call: RemoteCall, shipment: Shipment, results: Results) -> None:
        kind, why_not, record = look
        if record is not None:
            why_not = self._recorded(kind, record, call, shipment, results)
        if why_not:
            report.unrecorded_call(why_not)

    def _recorded(
        self,
        kind: Hashable,
        record: Record,
        call: RemoteCall,
        shipment: Shipment,
        results: Results,
    ) -> str:
        """Add what the worker has recorded, if it has; return why the call is not recorded."""
        if results.recorded and record.notes:
            _bounded(self._with_state).add(kind)  # the next time it is asked for that
            return ""
        if results.recorded != _RECORDED:
            why_not = results.recorded or "the worker records nothing"
            _bounded(self._refused)[kind] = why_not
            return why_not
        if any(each.position not in shipment.sent for each in results.changed):
            return "it writes to a weight"  # which is bound no more
        recorded = _SameCall if record.notes else _CallWithState
        with torch.inference_mode(mode=False), torch.no_grad():
            recording = recorded(record.number, kind, call, shipment, results)
        call.channel.recordings.add(self.program, recording)
        if record.notes:
            self._note_bound(call)
        return ""

    def _note_bound(self, call: RemoteCall) -> None:
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
        kept_from = given.offset if isinstance(given.source, FromKept) else None
        return given.dtype, tuple(given.shape), tuple(given.strides), kept_from
    return type(given), given


def _has_state(call: RemoteCall, shipment: Shipment) -> bool:
    """Whether a call is known to have a state before it is answered."""
    if call.rng is not None or call.program.only_reads is False:
        return True
    given = (shipment.inputs[position] for position in call.bound.others)
    return any(isinstance(each, SentTensor) and isinstance(each.source, FromKept) for each in given)


def _why_not(call: RemoteCall, shipment: Shipment) -> str:
    """Why a call cannot be repeated by its number; empty if it perhaps can."""
    if not call.channel.wire.local:
        return "the worker is on another machine"
    starts: set[int] = set()
    for position in call.bound.others:
        value, given = call.args[position], shipment.inputs[position]
        if not isinstance(given, SentTensor):
            if type(value) not in _NUMBERS:
                return f"an input is a {type(value).__name__}"
            continue
        source = given.source
        if isinstance(source, FromKept):
            if type(value) not in _HANDLES or source.key not in call.peer.kept.epochs:
                return "an input comes from elsewhere"
            continue
        if not isinstance(source, FromArea) or source.key or source.block:
            return "an input is kept from then on, or lies in a block"
        if source.size_bytes:
            if source.offset in starts:  # those of another call may be two
                return "inputs share memory"
            starts.add(source.offset)
        why_not = _why_not_sent(value, given, is_copy=shipment.is_copy(position))
        if why_not:
            return why_not
    return ""


def _why_not_sent(value: torch.Tensor, given: SentTensor, *, is_copy: bool) -> str:
    """Why an input is none whose bytes could be copied to the same place each time."""
    is_as_it_lies = not given.offset and is_dense(given.shape, given.strides) and not is_copy
    if not is_as_it_lies or type(value) not in _PLAIN:
        return "an input has gaps, or a class of its own"
    storage = write_epochs.storage_of(value)
    if type(value) in _HANDLES and _is_large(value) and not _is_only_here(storage):
        return "the bytes of an input have been elsewhere"
    return ""


Kinds = TypeVar("Kinds", dict[Hashable, str], set[Hashable])


def _bounded(kinds: Kinds) -> Kinds:
    """Make room for one more kind of calls."""
    if len(kinds) >= _MOST_KINDS:
        kinds.clear()
    return kinds


def _is_large(value: torch.Tensor) -> bool:
    """Whether workers may keep what an input has, so that it is not always sent."""
    return write_epochs.storage_of(value).nbytes() >= KEEP_FROM_BYTES


def _is_only_here(storage: torch.UntypedStorage) -> bool:
    """Whether the bytes of a storage are nowhere but here, as far as it knows."""
    # Beside its mark a storage knows where else they are: in a block, or another's data.
    mark = write_epochs.mark_storage(storage)
    return mark.absent is None and not mark.untracked and len(storage.__dict__) == 1


def _is_same(given: Any, known: Any) -> bool:
    return type(given) is type(known) and given == known
