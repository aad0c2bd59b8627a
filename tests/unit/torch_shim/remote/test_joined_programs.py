"""Programs that select some of their inputs themselves: every value has the right number."""

from typing import Any

import torch

from torch_shim.remote.operators_there import Chosen, with_selections
from torch_shim.wire.programs import (
    Constant,
    Mapping,
    Program,
    ProgramStep,
    Ref,
    Slice,
    Tuple,
    unpack,
)

ADDS, TAKES, SELECTS = "t:torch.add", "o:getitem", "m:index_select"


def value_of(argument: Any, values: list[Any]) -> Any:
    if isinstance(argument, Ref):
        return values[argument.number]
    if isinstance(argument, Slice):
        return slice(*(value_of(part, values) for part in argument))
    if isinstance(argument, (Tuple, Mapping)):
        return tuple(value_of(item, values) for item in argument.items)
    if isinstance(argument, list):
        return [value_of(item, values) for item in argument]
    return argument


def result_of(program: Program, *inputs: torch.Tensor) -> Any:
    """What a worker would compute, for the operators of this module."""
    values: list[Any] = [*inputs, *(torch.tensor(5.0) for _ in program.constants)]
    does: dict[str, Any] = {
        ADDS: torch.add,
        TAKES: lambda of, at: of[at],
        SELECTS: torch.Tensor.index_select,
    }
    for step in program.steps:
        named = {name: value_of(value, values) for name, value in step.named.items()}
        values.append(does[step.operator](*value_of(step.arguments, values), **named))
    return value_of(program.output, values)


def test_program_selects_what_was_chosen_and_does_the_same_work() -> None:
    steps = (
        ProgramStep(ADDS, [Ref(0), Ref(3)], {"alpha": 2}),  # 4
        ProgramStep(ADDS, [Ref(4)], {"other": Ref(2)}),  # 5
        ProgramStep(TAKES, [Ref(5), Tuple([Slice(1, Ref(1), None), 0])]),  # 6
    )
    output = Tuple([Ref(6), [Ref(2)], Mapping(["last", Ref(4)])])
    program = Program(3, (Constant("float32", (), b"\0" * 4),), steps, output)
    a, b = torch.arange(12.0).view(4, 3), torch.arange(100.0, 106.0).view(2, 3)
    rows, columns = torch.tensor([3, 0]), torch.tensor([2, 2, 1])
    wanted = result_of(program, a[rows], torch.tensor(2), b[:, columns])

    chosen = [Chosen(0, 0, 0), Chosen(2, 1, 1)]
    joined = unpack(with_selections(program, chosen).pack())
    found = result_of(joined, a, torch.tensor(2), b, rows, columns)

    assert joined.inputs == program.inputs + 2
    assert joined.constants == program.constants
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1][0], wanted[1][0])
    assert torch.equal(found[2][1], wanted[2][1])


def test_rows_may_be_shared_by_inputs() -> None:
    program = Program(2, (), (ProgramStep(ADDS, [Ref(0), Ref(1)]),), Tuple([Ref(2)]), random=True)
    joined = with_selections(program, [Chosen(0, 0, 0), Chosen(1, -1, 0)])
    a, rows = torch.arange(4.0).view(2, 2), torch.tensor([1, 0])
    assert torch.equal(result_of(joined, a, a, rows)[0], a[rows] + a[:, rows])
    assert joined.random
