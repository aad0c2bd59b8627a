"""What operators read, write and compute, counted in one run of a program."""

from typing import Any

import pytest
import torch

from gpu_manager.worker.program.allowed_operators import OperatorTable
from gpu_manager.worker.program.build import BuiltProgram
from gpu_manager.worker.program.usage import OperatorCounts
from tests.kit.worlds.caller import step
from torch_shim.wire.programs import Program, Ref, Tuple, unpack

TABLE = OperatorTable(torch.device("cpu"))


def counted(what: Program, *inputs: Any) -> tuple[tuple[Any, ...], OperatorCounts]:
    """What a program gives when it is counted, and the counts."""
    built = BuiltProgram("digest", unpack(what.pack()), TABLE)
    with torch.no_grad():
        found = built.counted_run(list(inputs))
        assert all(map(torch.equal, found, built.run(list(inputs), built.constants)))
    assert built.counts is not None
    return found, built.counts


def test_product_counts_its_inputs_outputs_and_sums() -> None:
    """Of 2 x 3 and 3 x 4 numbers of 4 bytes each."""
    steps = (step("a:aten::mm.default", Ref(0), Ref(1)),)
    _, counts = counted(Program(2, (), steps, [Ref(2)]), torch.ones(2, 3), torch.ones(3, 4))
    assert counts.operators == 1
    assert counts.read_bytes == 4 * (6 + 12)
    assert counts.written_bytes == 4 * 8
    assert counts.arithmetic == 2 * 8 * 3
    assert counts.far_bytes == 0


@pytest.mark.parametrize(
    ("operator", "shapes", "sums"),
    [
        ("t:torch._C._nn.linear", ((2, 3), (5, 3)), 2 * 10 * 3),
        ("t:torch.conv2d", ((1, 2, 5, 5), (4, 2, 3, 3)), 2 * (4 * 9) * (2 * 9)),
        ("t:torch._C._nn.scaled_dot_product_attention", ((1, 1, 3, 8), (1, 1, 5, 8)), 4 * 24 * 5),
        ("m:add", ((4, 4), (4, 4)), 16),
    ],
)
def test_arithmetic_is_that_of_the_operator(
    operator: str, shapes: tuple[tuple[int, ...], ...], sums: int
) -> None:
    inputs = [torch.ones(shape) for shape in shapes]
    arguments = [Ref(number) for number in range(len(inputs))]
    if "attention" in operator:
        arguments.append(Ref(1))
    what = Program(2, (), (step(operator, *arguments),), [Ref(2)])
    assert counted(what, *inputs)[1].arithmetic == sums


def test_view_moves_nothing_and_an_operator_in_place_does() -> None:
    steps = (step("m:view", Ref(0), Tuple([6])), step("m:add_", Ref(1), 1.0))
    _, counts = counted(Program(1, (), steps, [Ref(2)]), torch.ones(2, 3))
    assert counts.operators == 2
    assert (counts.read_bytes, counts.written_bytes) == (24, 24)


def test_operator_that_is_too_large_for_a_cache_counts_as_far() -> None:
    steps = (step("m:add", Ref(0), 1.0), step("m:sum", Ref(1)))
    _, counts = counted(Program(1, (), steps, [Ref(2)]), torch.ones(1 << 18))
    assert counts.far_bytes == counts.read_bytes + counts.written_bytes == 3 * (1 << 20) + 4


def test_values_that_are_no_tensors_are_not_counted() -> None:
    steps = (step("m:size", Ref(0), 0), step("o:mul", Ref(1), 2))
    built = BuiltProgram("digest", unpack(Program(1, (), steps, [Ref(2)]).pack()), TABLE)
    assert built.counted_run([torch.ones(3)]) == (6,)
    assert built.counts is not None
    assert built.counts.operators == 0
