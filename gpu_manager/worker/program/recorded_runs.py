"""Recorded runs: a program called again with inputs of the same kind is replayed as one launch.

Only where the device can record (CUDA graphs) and the program allows it: it draws no random
numbers, writes to no input, and never makes the host wait for a value. Whatever cannot be recorded
runs step by step for ever, and is counted.
"""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch

from gpu_manager.call_errors import CannotRecord
from gpu_manager.devices.worker_device import Recording, WorkerDevice
from gpu_manager.worker.program.build import BuiltProgram
from gpu_manager.worker.program.inputs import Binding, Inputs, InputStorage, TensorInput
from gpu_manager.worker.program.tensor_specs import TensorSpec, identity, versions_of, view

# Runs step by step before a recording: libraries pick their kernels, and many calls never recur.
_RUNS_BEFORE = 2
_MOST_RECORDINGS = 32
_MOST_KEYS = 4096


class ProgramRun(NamedTuple):
    """What a program gave.

    `positions` says which input lies in a storage that stood in for it. What is not `lasting` lies
    in memory that the next replay uses again.
    """

    outputs: tuple[Any, ...]
    positions: dict[int, int]
    lasting: bool


class _Recorded(NamedTuple):
    """A recorded run: the memory its inputs are copied to, and what else it reads, held alive."""

    recording: Recording
    stand_ins: list[torch.UntypedStorage]
    run: ProgramRun
    reads: tuple[Binding | None, list[torch.Tensor]]


class Graphs:
    """Runs programs, recorded where that pays. One call at a time."""

    def __init__(self, device: WorkerDevice) -> None:
        self.replayed = 0
        self.recorded = 0  # recordings made so far, those given up too
        self.refused: dict[str, int] = {}  # recordings that failed, by reason
        self._device = device
        self._recorded: OrderedDict[Any, _Recorded] = OrderedDict()
        self._runs: dict[Any, int] = {}
        self._never: set[str] = set()

    def run(
        self, program: BuiltProgram, binding: Binding | None, inputs: Inputs, mode: Hashable
    ) -> ProgramRun:
        """The program's outputs for these inputs; the thread computes in this `mode` already."""
        recorder = self._device.recorder
        if recorder is None or program.random or program.digest in self._never:
            return self._step_by_step(program, inputs)
        key = _key(program, binding, inputs, mode)
        recorded = self._recorded.get(key)
        if recorded is not None:
            self._recorded.move_to_end(key)
            return self._replay(recorded, inputs)
        if self._runs.get(key, 0) < _RUNS_BEFORE:
            return self._watched(key, program, inputs)
        try:
            recorded = self._record(program, binding, inputs)
        except CannotRecord as error:
            self._refuse(program, str(error))
            return self._step_by_step(program, inputs)
        except torch.OutOfMemoryError:
            # No other model should leave for a recording: its program runs without one.
            self._refuse(program, "no memory for a recording")
            self._device.release()
            return self._step_by_step(program, inputs)
        self._recorded[key] = recorded
        self.recorded += 1
        if len(self._recorded) > _MOST_RECORDINGS:
            self._recorded.popitem(last=False)
        return self._replay(recorded, inputs)

    def clear(self) -> None:
        self._recorded.clear()
        self._runs.clear()

    def _step_by_step(self, program: BuiltProgram, inputs: Inputs) -> ProgramRun:
        if program.counts is None:
            return ProgramRun(program.counted_run(inputs.values), {}, lasting=True)
        return ProgramRun(program.run(inputs.values, program.constants), {}, lasting=True)

    def _watched(self, key: Any, program: BuiltProgram, inputs: Inputs) -> ProgramRun:
        """A run before the recording, which shows whether one would be right."""
        before = versions_of(program.constants)
        run = self._step_by_step(program, inputs)
        if inputs.changed() or before != versions_of(program.constants):
            self._refuse(program, "writes to an input or constant")
        elif len(self._runs) < _MOST_KEYS:
            self._runs[key] = self._runs.get(key, 0) + 1
        return run

    def _record(self, program: BuiltProgram, binding: Binding | None, inputs: Inputs) -> _Recorded:
        recorder = self._device.recorder
        assert recorder is not None
        stand_ins: dict[int, torch.UntypedStorage] = {}
        values = list(inputs.values)
        positions: dict[int, int] = {}
        for entry in inputs.sent:
            if entry.held.image is not None:
                continue
            storage = stand_ins.get(id(entry.held))
            if storage is None:
                storage = stand_ins[id(entry.held)] = entry.held.storage.clone()  # type: ignore[no-untyped-call] # torch gives it no types
            values[entry.position] = view(storage, entry.spec)
            positions.setdefault(identity(storage), entry.position)
        recording, outputs = recorder.record(lambda: program.run(values, program.constants))
        run = ProgramRun(outputs, positions, lasting=False)
        reads = (binding, program.constants)
        return _Recorded(recording, list(stand_ins.values()), run, reads)

    def _replay(self, recorded: _Recorded, inputs: Inputs) -> ProgramRun:
        for storage, held in zip(recorded.stand_ins, _held(inputs.sent), strict=True):
            storage.copy_(held.storage, non_blocking=True)
        recorded.recording.replay()
        self.replayed += 1
        return recorded.run

    def _refuse(self, program: BuiltProgram, reason: str) -> None:
        self._never.add(program.digest)
        self.refused[reason] = self.refused.get(reason, 0) + 1


def _held(sent: list[TensorInput]) -> list[InputStorage]:
    """The storages that travelled, each once, in the order of the first input in them."""
    found = {id(entry.held): entry.held for entry in sent if entry.held.image is None}
    return list(found.values())


def _key(program: BuiltProgram, binding: Binding | None, inputs: Inputs, mode: Hashable) -> Any:
    """Equal for calls that differ in the content of tensors alone."""
    order = {id(held): number for number, held in enumerate(_held(inputs.sent))}
    tensors = tuple(
        (
            entry.position,
            _layout(entry.spec),
            order.get(id(entry.held), entry.held.place),
            entry.held.storage.nbytes(),
        )
        for entry in inputs.sent
    )
    numbers = tuple(
        (position, type(value), repr(value))
        for position, value in enumerate(inputs.values)
        if not isinstance(value, torch.Tensor)
    )
    return (program.digest, id(binding), tensors, numbers, mode)


def _layout(spec: TensorSpec) -> tuple[Any, ...]:
    return (spec.dtype, tuple(spec.shape), tuple(spec.strides), spec.offset)
