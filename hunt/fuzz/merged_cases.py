"""Cases run merged, by the worker's own code, and singly: `make fuzz`, and its seeded part.

A program is the case's operator, sometimes with another one behind it. Several calls of it, with
other numbers in their tensors, are tried as one as the worker tries them; what it would merge then
runs as one with new numbers, and has to give what single calls give, and to write what they write.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gpu_manager.worker.merging.group_runs import GroupRuns
from gpu_manager.worker.merging.merged_calls import REFUSALS
from gpu_manager.worker.merging.merged_run import (
    attention_rules,
    differs,
    inputs_in_outputs,
    layouts_of,
)
from gpu_manager.worker.program.build import BuiltProgram
from gpu_manager.worker.program.inputs import Inputs, InputStorage, TensorInput
from gpu_manager.worker.program.recorded_runs import ProgramRun
from gpu_manager.worker.program.tensor_specs import TensorSpec
from hunt.fuzz.arguments import NotStorable, TensorArgument
from hunt.fuzz.cases import Case, Cases
from torch_shim.wire.programs import (
    Complex,
    DeviceName,
    Ellipse,
    Named,
    Program,
    ProgramStep,
    Ref,
    Slice,
    Tuple,
)

_CALLS = 3
_CHAINED = 0.4  # of the programs have a second operator


class Differs(BaseException):
    """A merged call gave something else than a single one; no error that an operator may raise."""


class MergedCases(Cases):
    """The same names and arguments; a case is called as a program, merged and singly."""

    def call(self, case: Case) -> tuple[Any, list[Any]]:
        """What merged calls gave; NotStorable where the worker would not merge them."""
        attention_rules()
        chance = random.Random(f"{case.name}:{case.number}:merged")
        cases = [case]
        if chance.random() < _CHAINED:
            cases.append(Case(chance.choice(self.names), chance.randrange(8)))
        steps, tensors = _program(cases, [self.described(each)[:2] for each in cases])
        program, layouts, runs = self._watched(case, steps, tensors)
        trial = self._calls(case, tensors, 1)
        try:
            found = runs.try_out(program, trial, layouts)
        except REFUSALS as error:
            raise NotStorable("the worker refuses to merge it") from error
        for each, outputs, copies in zip(trial, found.outputs, found.copies, strict=True):
            merged = [*outputs, *copies.values()]
            single = [*program.run(each.values, []), *(each.values[place] for place in copies)]
            if found.loops or differs(single, merged):
                raise NotStorable("the worker never merges it again")
        return self._again(case, tensors, program, layouts, runs), []

    def _again(
        self,
        case: Case,
        tensors: Sequence[TensorArgument],
        program: BuiltProgram,
        layouts: Sequence[Any],
        runs: GroupRuns,
    ) -> list[Any]:
        """What calls with other numbers give as one, which is not compared in a worker."""
        merged, singly = (self._calls(case, tensors, 2) for _ in range(2))
        if not runs.is_ready(program, merged):
            raise NotStorable("it would be tried once more")
        try:
            found = runs.run(program, merged, layouts)
        except REFUSALS as error:
            raise NotStorable("it runs singly") from error
        for one, other, outputs in zip(singly, merged, found.outputs, strict=True):
            expected = program.run(one.values, [])
            if differs([*expected, *one.values], [*outputs, *other.values]):
                raise Differs(case.name)
        return [list(outputs) for outputs in found.outputs]

    def _watched(
        self, case: Case, steps: list[ProgramStep], tensors: Sequence[TensorArgument]
    ) -> tuple[BuiltProgram, list[Any], GroupRuns]:
        """The program, its outputs' layouts, and what one single call of it wrote to."""
        program = self._built(steps, len(tensors), Ref(len(tensors) + len(steps) - 1))
        (once, *_) = self._calls(case, tensors, 0)
        (given,) = program.run(once.values, [])
        if isinstance(given, (tuple, list)):
            last = Ref(len(tensors) + len(steps) - 1)
            steps += [ProgramStep("o:getitem", [last, place]) for place in range(len(given))]
            first = last.number + 1
            outputs = [Ref(first + place) for place in range(len(given))]
            program = self._built(steps, len(tensors), *outputs)
        (once, *_) = self._calls(case, tensors, 0)
        outs = program.run(once.values, [])
        if not tensors or any(isinstance(each, (tuple, list, dict)) for each in outs):
            raise NotStorable("no output of a program")
        written = {entry.position for entry in once.changed()}
        returned = inputs_in_outputs(once, ProgramRun(outs, {}, lasting=True), [])
        if returned is None:
            raise NotStorable("outputs lie in each other")
        runs = GroupRuns()
        runs.note_own(program.digest, written, returned)
        return program, layouts_of(outs), runs

    def _built(self, steps: list[ProgramStep], inputs: int, *outputs: Ref) -> BuiltProgram:
        program = Program(inputs, (), tuple(steps), Tuple(list(outputs)))
        return BuiltProgram("0" * 64, program, self.table)  # type: ignore[arg-type] # as a table

    def _calls(self, case: Case, tensors: Sequence[TensorArgument], times: int) -> list[Inputs]:
        """What each of several calls gets: shapes are equal, random numbers are not."""
        return [
            _inputs(tensors, random.Random(f"{case.name}:{case.number}:{times}:{number}"))
            for number in range(_CALLS)
        ]


def _program(
    cases: Sequence[Case], described: Sequence[tuple[list[Any], dict[str, Any]]]
) -> tuple[list[ProgramStep], list[TensorArgument]]:
    """Steps one behind the other, each of which takes what the one before gave, and the inputs."""
    count = [len(_tensors(list(each))) for each in described]
    inputs = sum(count) - sum(1 for each in count[1:] if each)
    steps: list[ProgramStep] = []
    tensors: list[TensorArgument] = []
    for case, (arguments, named) in zip(cases, described, strict=True):
        before = [Ref(inputs + len(steps) - 1)] if steps else []

        def number(tensor: TensorArgument, before: list[Ref] = before) -> Ref:
            if before:
                return before.pop()
            tensors.append(tensor)
            return Ref(len(tensors) - 1)

        plain = [_argument(each, number) for each in arguments]
        keywords = {name: _argument(each, number) for name, each in named.items()}
        steps.append(ProgramStep(case.name, plain, keywords))
    return steps, tensors


def _tensors(value: Any) -> list[TensorArgument]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [tensor for item in value for tensor in _tensors(item)]
    return [value] if isinstance(value, TensorArgument) else []


def _argument(value: Any, number: Callable[[TensorArgument], Ref]) -> Any:
    """An argument as a program has it; NotStorable if none can."""
    if isinstance(value, TensorArgument):
        return number(value)
    if isinstance(value, list):
        return [_argument(item, number) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, slice):
        return Slice(value.start, value.stop, value.step)
    if value is ...:
        return Ellipse()
    if isinstance(value, complex):
        return Complex(value.real, value.imag)
    if isinstance(value, torch.device):
        return DeviceName(value.type)
    kind, name = type(value).__name__, str(value).removeprefix("torch.")
    if kind in {"dtype", "memory_format"}:
        return Named(kind, name)
    raise NotStorable(kind)


def _inputs(tensors: Sequence[TensorArgument], chance: random.Random) -> Inputs:
    made = [each.make(chance) for each in tensors]
    sent = [
        TensorInput(position, tensor, InputStorage(tensor.untyped_storage()), _spec(tensor))
        for position, tensor in enumerate(made)
    ]
    return Inputs(list(made), sent, None)


def _spec(tensor: torch.Tensor) -> TensorSpec:
    end_bytes = tensor.untyped_storage().nbytes()
    layout = list(tensor.shape), list(tensor.stride()), int(tensor.storage_offset())
    return TensorSpec(tensor.dtype, *layout, end_bytes)
