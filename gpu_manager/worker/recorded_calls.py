"""Calls that run again by their numbers, with what their places in the arena hold then.

A channel's function has a call recorded that it makes again and again. Then nothing of it is read,
checked and described once more: its inputs come from the same places, its outputs go to the same
places, with the layout that the recorded answer had. Where that cannot be, the worker lacks the
recording, and the function makes the call as any other.
"""

import struct
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from gpu_manager.call_errors import CallRefused
from gpu_manager.devices.worker_device import WorkerDevice
from gpu_manager.worker.calls.call import (
    CallAnswer,
    ChannelCall,
    PackedResult,
    plain_output,
)
from gpu_manager.worker.features import ModelFeature, ModelSpace, WorkerFeature
from gpu_manager.worker.program.inputs import NO_AREA, TensorInput
from gpu_manager.worker.program.tensor_specs import DTYPES, bytes_of, extent_of
from torch_shim.wire.messages import FromArea, Record, SentOutput, SentTensor
from torch_shim.wire.protocol import NOTES_BYTES, FailureKind, FrameKind, pack_frame

_TIMES = struct.Struct("<4d")
_NOTHING = PackedResult([], [], [], [])


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
        self._recorded: dict[int, RecordedCall] = {}

    def keep(self, record: Record, asked: ChannelCall, answer: CallAnswer) -> str:
        """Record a call that was answered; else return why not."""
        self._recorded.pop(record.number, None)
        why_not = _why_not(record, asked, answer)
        if not why_not:
            self._recorded[record.number] = RecordedCall(self._device, record, asked, answer)
        return why_not

    def find(self, number: int, lease: int) -> ChannelCall:
        """Return the call, for this lease; CallRefused where it is not recorded any more."""
        recorded = self._recorded.get(number)
        if recorded is None or recorded.is_gone():
            raise _lacking(f"recorded call {number}")
        if recorded.call.lease != lease:
            recorded.call = recorded.call._replace(lease=lease)
        return recorded.call

    def clear(self) -> None:
        """Forget all: the arena is another one."""
        self._recorded.clear()


class _Place(NamedTuple):
    """Where in the arena an output goes, and how it has to lie."""

    number: int
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
        options = asked.options.alone()
        self.call = asked._replace(
            options=options, body=NO_AREA, deliver=_delivered_already, recorded=self
        )
        self.answer = pack_frame(FrameKind.RAN_AGAIN, (record.number, 0))
        self._device = device
        self._notes = record.notes
        self._arena = arena = asked.channel.arena
        self._places = [
            _place(arena, number, view, answer.result.storages[view.source].offset)
            for number, view in enumerate(answer.result.views)
        ]

    def is_gone(self) -> bool:
        """Whether what it was bound to has changed."""
        return self.call.binding is not None and self.call.binding.gone

    @property
    def trace(self) -> str:
        """The trace of the run that was asked for last."""
        start = self._notes + _TIMES.size
        size = min(self._arena[start], NOTES_BYTES - _TIMES.size - 1)
        return bytes(self._arena[start + 1 : start + 1 + size]).decode("ascii", "replace")

    def deliver(
        self, outputs: Sequence[Any], written: Sequence[TensorInput], times: list[float]
    ) -> PackedResult:
        """Put outputs where they belong; CallRefused if they are not laid out as recorded."""
        begun_s = time.perf_counter()
        if written or len(outputs) != len(self._places):
            raise _lacking("a recorded call that writes to no input")
        parts = [_part(place, outputs[place.number]) for place in self._places]
        self._device.send(parts, [place.memory for place in self._places])
        times[3] = time.perf_counter() - begun_s
        times[1] += times[3]
        _TIMES.pack_into(self._arena, self._notes, *times)
        return _NOTHING


def _delivered_already(answer: CallAnswer) -> None:
    """Nothing: `RecordedCall.deliver` has done it."""


def _why_not(record: Record, asked: ChannelCall, answer: CallAnswer) -> str:
    """Why a call cannot run again with what its places hold then; empty if it can."""
    arena, result = asked.channel.arena, answer.result
    if arena is None:
        return "no memory is shared"
    if asked.options.rng is not None:
        return "it draws random numbers"
    if result.changed:
        return "it writes to its inputs"
    if any(isinstance(given, SentTensor) and not _is_sent(given) for given in asked.inputs):
        return "an input stays with the worker"
    views = result.views
    if not all(isinstance(view, SentOutput) and view.source >= 0 for view in views):
        return "an output is no tensor, or lies in an input"
    if len({view.source for view in views}) < len(views):
        return "its outputs share memory"
    ends = [part.offset + part.size_bytes for part in result.storages]
    if any(part.offset < 0 or part.kept for part in result.storages):
        return "an output is large"
    if max([answer.end_bytes, *ends]) > record.notes or record.notes + NOTES_BYTES > len(arena):
        return "the arena is full"
    return ""


def _is_sent(given: SentTensor) -> bool:
    source = given.source
    return isinstance(source, FromArea) and not source.key and not source.block


def _place(arena: memoryview, number: int, view: SentOutput, offset: int) -> _Place:
    dtype = DTYPES[view.dtype]
    start = offset + view.offset * dtype.itemsize
    shape, strides = torch.Size(view.shape), tuple(view.strides)
    first, last = extent_of(torch.empty_strided(shape, strides, dtype=dtype, device="meta"))
    return _Place(number, dtype, shape, strides, arena[start : start + last - first])


def _part(place: _Place, output: Any) -> torch.Tensor:
    """The bytes of an output; CallRefused if it is another one than was recorded."""
    if not isinstance(output, torch.Tensor):
        raise _lacking("a recorded output that is a tensor")
    tensor = plain_output(output)
    if tensor.shape != place.shape or tensor.dtype is not place.dtype:
        raise _lacking("a recorded output of this shape")
    if tensor.stride() != place.strides:  # it ran as one with others
        tensor = torch.empty_strided(
            place.shape, place.strides, dtype=place.dtype, device=tensor.device
        ).copy_(tensor)
    return bytes_of(tensor.untyped_storage(), *extent_of(tensor))


def _lacking(what: str) -> CallRefused:
    return CallRefused(FailureKind.MISSING, what, {"missing": []})
