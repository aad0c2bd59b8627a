"""Calls that run again by their numbers, with what their places in the arena hold then.

A channel's function has a call recorded that it makes again and again. Then nothing of it is read,
checked and described once more: its inputs come from the same places, its outputs go to the same
places, with the layout that the recorded answer had. Where that cannot be, the worker lacks the
recording, and the function makes the call as any other.

Of a call with a state, which draws random numbers, writes, or has tensors that are kept here, the
form is recorded: what the function said that is the same in the next call, and the answer. The
next call is filled in and run as any other, and its answer is short where it is the same.
"""

import math
import operator
import struct
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from msgspec import structs

from gpu_manager.call_errors import CallRefused, OutOfMemory
from gpu_manager.devices.worker_device import WorkerDevice
from gpu_manager.worker.calls.call import (
    CallAnswer,
    ChannelCall,
    Computing,
    PackedResult,
    plain_output,
)
from gpu_manager.worker.executor import OPERATOR_ERRORS, Executor, shapes_of
from gpu_manager.worker.features import ModelFeature, ModelSpace, WorkerFeature
from gpu_manager.worker.program.inputs import NO_AREA, Inputs, TensorInput
from gpu_manager.worker.program.tensor_specs import DTYPES, versions_of
from torch_shim.wire.messages import (
    AS_RECORDED,
    BEHIND,
    Call,
    CallAgain,
    CallResult,
    ChangedInput,
    FromArea,
    FromKept,
    OutputPart,
    Record,
    SentOutput,
    SentTensor,
)
from torch_shim.wire.protocol import NOTES_BYTES, FailureKind, FrameKind, pack_frame

_MOST_INPUT_BYTES = 64 << 10
_MOST_IN_FORM = 4096  # inputs and outputs
_TIMES = struct.Struct("<4d")
_NOTHING = PackedResult([], [], [], [])
_what_it_says = operator.attrgetter("storages", "views", "changed")


class RecordedCalls(WorkerFeature):
    """Runs calls again that their functions have had recorded."""

    def begin(self, model: ModelSpace) -> ModelFeature:
        return _ModelRecordings(model.executor.device)


class _ModelRecordings(ModelFeature):
    def __init__(self, device: WorkerDevice) -> None:
        self.recorder = partial(ChannelRecordings, device)


class ChannelRecordings:
    """The recorded calls of one channel, whose thread alone uses them."""

    def __init__(self, device: WorkerDevice) -> None:
        self._device = device
        self._calls: dict[int, ChannelCall] = {}
        self._forms: dict[int, _CallForm] = {}

    def keep(self, record: Record, asked: ChannelCall, answer: CallAnswer) -> str:
        """Record a call that was answered; else return why not."""
        self._calls.pop(record.number, None)
        self._forms.pop(record.number, None)
        if not record.notes:
            return self._keep_form(record.number, asked, answer)
        why_not = _why_not(record, asked, answer)
        if not why_not:
            recorded = RecordedCall(self._device, record, asked, answer)
            self._calls[record.number] = asked._replace(
                options=asked.options.alone(), body=NO_AREA, deliver=_delivered, recorded=recorded
            )
        return why_not

    def find(self, number: int, lease: int) -> ChannelCall:
        """Return the call, for this lease; CallRefused where it is not recorded any more."""
        call = self._calls.get(number)
        if call is None or (call.binding is not None and call.binding.gone):
            raise _lacking(f"recorded call {number}")
        if call.lease != lease:
            call = self._calls[number] = call._replace(lease=lease)
        return call

    def _keep_form(self, number: int, asked: ChannelCall, answer: CallAnswer) -> str:
        result = structs.replace(answer.sent(0), rng=None)
        parts: list[OutputPart | ChangedInput] = [*result.storages, *result.changed]
        if len(asked.inputs) + len(result.views) > _MOST_IN_FORM:
            return "it has too many inputs and outputs"
        if asked.channel.arena is None or any(part.offset == BEHIND for part in parts):
            return "what it gives lies outside of the arena"
        if not all(view is None or isinstance(view, SentOutput) for view in result.views):
            return "an output is a number"
        binding = None if asked.binding is None else asked.binding.number
        kept = [at for at, given in enumerate(asked.inputs) if _is_kept(given)]
        self._forms[number] = _CallForm(asked.number, binding, asked.inputs, kept, result)
        return ""

    def again(self, asked: CallAgain) -> Call:
        """Return a recorded call as it is to be made now; CallRefused where there is none."""
        form = self._forms.get(asked.number)
        if form is None:
            raise _lacking(f"recorded call {asked.number}")
        inputs = form.inputs_with(asked.kept)
        return Call(asked.lease, form.program, form.binding, inputs, asked.options)

    def answered(self, number: int, answer: CallResult) -> CallResult:
        """Return the answer to such a call as it is sent: shortly, if it is the recorded one."""
        if _what_it_says(answer) != _what_it_says(self._forms[number].answer):
            return answer
        return CallResult([], [], [], answer.rng, answer.times, 0, AS_RECORDED)

    def clear(self) -> None:
        """Forget all: the arena is another one, or the channel has ended."""
        self._calls.clear()
        self._forms.clear()


class _CallForm(NamedTuple):
    """What a call said, beside what differs from one call to the next, and its answer."""

    program: int
    binding: int | None
    inputs: list[Any]
    kept: list[int]  # the positions of those whose storages each call names
    answer: CallResult

    def inputs_with(self, kept: Sequence[tuple[int, int]]) -> list[Any]:
        """Return the inputs, whose kept storages are these keys and epochs; CallRefused if they
        are not as many."""
        if len(self.kept) != len(kept):
            detail = f"{len(kept)} kept storages for {len(self.kept)} inputs"
            raise CallRefused(FailureKind.BAD_FRAME, detail)
        inputs = self.inputs.copy()
        for at, named in zip(self.kept, kept, strict=True):
            sent: SentTensor = inputs[at]
            layout = sent.dtype, sent.shape, sent.strides, sent.offset
            inputs[at] = SentTensor(FromKept(*named), *layout)
        return inputs


class _Place(NamedTuple):
    """Where in the arena an output goes, and how it has to lie."""

    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]
    memory: memoryview


class RecordedCall:
    """One call as its function asked for it, without what was that one call's alone."""

    def __init__(
        self, device: WorkerDevice, record: Record, asked: ChannelCall, answer: CallAnswer
    ) -> None:
        assert asked.channel.arena is not None, "there are places in it"
        self.answer = pack_frame(FrameKind.RAN_AGAIN, (record.number, 0))
        self._program, self._mode = asked.program, asked.mode
        self._device = device
        self._notes = record.notes
        self._arena = arena = asked.channel.arena
        self._places = [
            _place(arena, view, answer.result.storages[view.source].offset)
            for view in answer.result.views
        ]
        self._memory = [place.memory for place in self._places]
        self._inputs = _lasting_inputs(asked)
        if self._inputs is not None:
            self._shapes = shapes_of(asked.program, self._inputs)
            self._moved = self._inputs.received_bytes, sum(map(len, self._memory))

    @property
    def trace(self) -> str:
        """The trace of the run that was asked for last."""
        start = self._notes + _TIMES.size
        size = min(self._arena[start], NOTES_BYTES - _TIMES.size - 1)
        return bytes(self._arena[start + 1 : start + 1 + size]).decode("ascii", "replace")

    def run(self, executor: Executor, asked: ChannelCall, asked_s: float) -> CallAnswer | None:
        """Run it with tensors that are there; None where they are not, or memory may be short.

        CallRefused where anything goes wrong: the call as any other finds out what.
        """
        inputs, device, program = self._inputs, self._device, self._program
        if inputs is None or device.recorder is not None:
            return None
        if not executor.memory.is_enough(self._shapes):
            return None
        executor.leases.in_force(asked.lease)
        begun_s = time.perf_counter()
        inputs.refilled(self._arena)
        before = versions_of(program.constants)
        used, computes_s = executor.usage.begin(), time.perf_counter()
        is_done = False
        try:
            outputs, _ = device.run(self._outputs, measure=False)
            spent_s = time.perf_counter() - computes_s
            took_s = executor.emulated_s(spent_s)
            executor.usage.ran(used, program.counts, (spent_s, took_s), self._moved)
            times = [begun_s - asked_s, computes_s - begun_s, took_s, 0.0]
            result = self.deliver(outputs, inputs.changed(), times)
            is_done = True
        except (OutOfMemory, *OPERATOR_ERRORS) as error:
            raise _lacking(f"what a recorded call needs: {error}"[:500]) from error
        finally:
            executor.tidy(program, before)
            if not is_done:
                executor.settle_all(asked, inputs, None)
        return CallAnswer(result, 0, None, times, inputs.batch)

    def deliver(
        self, outputs: Sequence[Any], written: Sequence[TensorInput], times: list[float]
    ) -> PackedResult:
        """Put outputs where they belong; CallRefused if they are not laid out as recorded."""
        begun_s = time.perf_counter()
        if written or len(outputs) != len(self._places):
            raise _lacking("a recorded call that writes to no input")
        self._device.send(list(map(_laid_out, self._places, outputs)), self._memory)
        times[3] = time.perf_counter() - begun_s
        times[1] += times[3]
        _TIMES.pack_into(self._arena, self._notes, *times)
        return _NOTHING

    def _outputs(self) -> tuple[Any, ...]:
        program, inputs = self._program, self._inputs
        assert inputs is not None, "they last"
        with Computing(self._device.device, self._mode, enters=program.enters_modes):
            return program.run(inputs.values, program.constants)


def _lasting_inputs(asked: ChannelCall) -> Inputs | None:
    """The tensors of a call's inputs, if each run may have them again, and they are small.

    A channel has many recordings; larger inputs are kept for the last call of each program alone.
    """
    inputs: Inputs | None = asked.channel.prepared(asked.number, asked.inputs, asked.binding)
    return None if inputs is None or inputs.received_bytes > _MOST_INPUT_BYTES else inputs


def _delivered(_: CallAnswer) -> None:
    """Nothing: `RecordedCall.deliver` has done it."""


def _why_not(record: Record, asked: ChannelCall, answer: CallAnswer) -> str:
    """Why a call cannot run again with what its places hold then; empty if it can."""
    arena, result = asked.channel.arena, answer.result
    if asked.options.rng is not None or result.changed:
        return "it draws random numbers, or writes to its inputs"
    if any(isinstance(given, SentTensor) and not _is_sent(given) for given in asked.inputs):
        return "an input stays with the worker"
    views = result.views
    if not all(isinstance(view, SentOutput) and view.source >= 0 for view in views):
        return "an output is no tensor, or lies in an input"
    ends = [part.offset + part.size_bytes for part in result.storages]
    if arena is None or any(part.offset < 0 or part.kept for part in result.storages):
        return "an output is large"
    if len({view.source for view in views}) < len(views) or any(
        _has_gaps(view, result.storages[view.source].size_bytes) for view in views
    ):
        return "its outputs share memory, or have gaps"
    if max([answer.end_bytes, *ends]) > record.notes or record.notes + NOTES_BYTES > len(arena):
        return "the arena is full"
    return ""


def _is_kept(given: Any) -> bool:
    return isinstance(given, SentTensor) and isinstance(given.source, FromKept)


def _is_sent(given: SentTensor) -> bool:
    source = given.source
    return isinstance(source, FromArea) and not source.key and not source.block


def _place(arena: memoryview, view: SentOutput, offset: int) -> _Place:
    dtype, shape = DTYPES[view.dtype], torch.Size(view.shape)
    start = offset + view.offset * dtype.itemsize
    memory = arena[start : start + shape.numel() * dtype.itemsize]
    return _Place(dtype, shape, tuple(view.strides), memory)


def _has_gaps(view: SentOutput, size_bytes: int) -> bool:
    """Whether a copy of an output, which lies in so many bytes, would lie in another way."""
    dtype, strides = DTYPES[view.dtype], tuple(view.strides)
    if math.prod(view.shape) * dtype.itemsize > size_bytes:
        return True
    return torch.empty_strided(view.shape, strides, dtype=dtype).clone().stride() != strides


def _laid_out(place: _Place, output: Any) -> torch.Tensor:
    """An output as it goes to its place; CallRefused if it is another one than was recorded."""
    dtype, shape, strides, _ = place
    if not isinstance(output, torch.Tensor) or output.dtype is not dtype or output.shape != shape:
        raise _lacking("a recorded output of this shape")
    tensor = plain_output(output) if output.is_neg() or output.is_conj() else output
    if tensor.stride() == strides:
        return tensor
    like = torch.empty_strided(shape, strides, dtype=dtype, device=tensor.device)
    return like.copy_(tensor)  # it ran as one with others


def _lacking(what: str) -> CallRefused:
    return CallRefused(FailureKind.MISSING, what, {"missing": []})
