"""Numbers, texts and lists of Python have bounds in programs; tensors have none here."""

import operator
from typing import Any

import pytest
import torch

from gpu_manager.worker.program.allowed_operators import OperatorTable
from gpu_manager.worker.program.build import BuiltProgram
from gpu_manager.worker.program.plain_values import of_tensors
from tests.kit.worlds.caller import CallFailed, LocalWorker, program, step
from torch_shim.wire.programs import ProgramStep, Ref, Slice, Tuple

TABLE = OperatorTable(torch.device("cpu"))
MILLION = 1 << 20
ROWS = torch.zeros(1).expand(5 * MILLION)


def doubling(first: ProgramStep, again: str, times: int) -> list[ProgramStep]:
    return [first, *(step(again, Ref(number), Ref(number)) for number in range(1, times))]


def nested(depth: int) -> list[ProgramStep]:
    """Lists of two, each twice the one before."""
    return [
        step("b:max", [[0, 0]]),
        *(step("b:max", [[Ref(number), Ref(number)]]) for number in range(1, depth)),
    ]


def shared(depth: int) -> list[ProgramStep]:
    """The same, made by what reads no more of a list than it gives."""
    return [
        step("o:getitem", [[0, 0]], 0),
        *(step("o:getitem", [[Ref(number)] * 2], 0) for number in range(1, depth)),
    ]


REFUSED: dict[str, list[ProgramStep]] = {
    "a power": [step("o:pow", 3, 5000)],
    "a power in place": [step("o:ipow", 3, 5000)],
    "a power by name": [step("b:pow", base=3, exp=5000)],
    "NumPy's power": [step("n:operator.pow", 3, 5000)],
    "a shifted number": [step("o:lshift", 1, 5000)],
    "a shifted sum": [step("o:add", 1, 1), step("o:ilshift", Ref(1), 5000)],
    "squares of squares": doubling(step("o:add", 3, 4), "o:mul", 20),
    "a product of many": [step("M:prod", [1 << 62] * 100)],
    "a common multiple": [step("M:lcm", *((1 << 62) - number for number in range(100)))],
    "digits before the point": [step("b:round", 5, -5000)],
    "digits that a tensor says": [
        step("t:torch.tensor", -5000),
        step("b:round", 5, Ref(1)),
    ],
    "a number from a text": [step("b:int", "f" * 5000, 16), step("o:sub", Ref(1), 1)],
    "a number that torch read": [
        step("t:torch.sym_int", "9" * 4000),
        step("o:sub", Ref(1), 1),
    ],
    "a tensor of lists in lists": [*shared(22), step("t:torch.tensor", Ref(22))],
    "a tensor like another of lists in lists": [
        *shared(22),
        step("t:torch.zeros", 1),
        step("m:new_tensor", Ref(23), Ref(22)),
    ],
    "NumPy's function of lists in lists": [*shared(22), step("n:abs", Ref(22))],
    "a place that lists in lists name": [
        *shared(22),
        step("t:torch.zeros", 1),
        step("o:getitem", Ref(23), Ref(22)),
    ],
    "places that lists in lists name": [
        *shared(22),
        step("t:torch.zeros", 1),
        step("o:setitem", Ref(23), Tuple([Ref(22)]), 1),
    ],
    "a repeated list": [step("o:mul", [1], 5 * MILLION)],
    "a repeated tuple, the number first": [step("o:imul", 5 * MILLION, Tuple([1]))],
    "a repeated text": [step("o:mul", "x", 5 * MILLION)],
    "a tensor that repeats a list": [
        step("t:torch.tensor", 5 * MILLION),
        step("o:mul", Ref(1), [1]),
    ],
    "a product that is large before it is zero": [step("M:prod", [*([1 << 62] * 100), 0])],
    "a common multiple of tensors": [
        *(step("t:torch.tensor", (1 << 62) - number) for number in range(30)),
        step("M:lcm", *(Ref(number) for number in range(1, 31))),
    ],
    "a common multiple of a tensor": [
        step("t:torch.tensor", 2),
        step("M:lcm", Ref(1), *((1 << 62) - number for number in range(100))),
    ],
    "a list that a tensor repeats": [
        step("t:torch.tensor", 5 * MILLION),
        step("o:mul", [1], Ref(1)),
    ],
    "a product of a list and a number": [step("M:prod", [[1], 5 * MILLION])],
    "doubled lists": doubling(step("o:mul", [1], 2), "o:add", 22),
    "doubled texts": doubling(step("o:mul", "x", 2), "o:iadd", 22),
    "many lists": [step("o:mul", [number], MILLION) for number in range(5)],
    "texts that torch puts together": doubling(step("a:aten::add", "xx", "x"), "a:aten::add", 23),
    "rows in a list": [step("o:iadd", [1], Ref(0))],
    "a sum of rows": [step("b:sum", Ref(0))],
    "the largest row": [step("b:max", Ref(0))],
    "rows of which each is a tensor": [
        step("m:narrow", Ref(0), 0, 0, 1 << 18),
        step("M:fsum", Ref(1)),
    ],
    "a sum of many lists": [
        step("o:mul", [[1, 2]], 3000),
        step("b:sum", Ref(1), []),
    ],
    "parts of a list": [
        step("o:mul", [0], 2 * MILLION),
        *(step("o:getitem", Ref(1), Slice(number, None, None)) for number in range(3)),
    ],
    "a part of a text, backwards": [
        step("o:mul", "x", 3 * MILLION),
        step("o:getitem", Ref(1), Slice(None, None, -1)),
    ],
    "a list in itself": [
        step("o:mul", [1], 2 * MILLION),
        step("o:setitem", Ref(1), Slice(0, 0, None), Ref(1)),
    ],
    "a text with a width": [step("o:mod", "%5000000d", 1)],
    "compared lists in lists": [*nested(22), step("o:eq", Ref(22), Ref(22))],
    "a tensor for each row": [step("m:unbind", Ref(0))],
    "pieces of one row": [step("t:torch.split", Ref(0), 1, dim=0)],
    "pieces of a size that a tensor says": [
        step("t:torch.tensor", 1),
        step("m:split", Ref(0), Ref(1)),
    ],
    "pieces without rows": [step("t:torch.tensor_split", Ref(0), MILLION)],
    "pieces that a tensor counts": [
        step("t:torch.tensor", MILLION),
        step("t:torch.tensor_split", Ref(0), Ref(1)),
    ],
    "pieces, named before their tensor": [
        step("t:torch.tensor_split", sections=MILLION, input=Ref(0))
    ],
    "rows, along an axis": [step("t:torch.unbind", axis=0, input=Ref(0))],
    "pieces of a size, named before their tensor": [
        step("t:torch.functional.split", split_size_or_sections=1, tensor=Ref(0))
    ],
    "pieces of no rows": [
        step("m:narrow", Ref(0), 0, 0, 0),
        step("t:torch.chunk", Ref(1), MILLION),
    ],
    "chunks of many rows": [step("t:torch.chunk", chunks=MILLION, input=Ref(0))],
    "pieces of a long list": [
        step("o:mul", [0], MILLION),
        step("m:tensor_split", Ref(0), Ref(1)),
    ],
}


@pytest.mark.parametrize("steps", REFUSED.values(), ids=REFUSED)
def test_call_fails_when_a_plain_value_would_be_absurdly_large(steps: list[ProgramStep]) -> None:
    plain = program(step("o:add", Ref(0), 1), output=[Ref(1)])
    ends = step("b:bool", Ref(len(steps)))
    with LocalWorker().connect() as caller:
        with pytest.raises(CallFailed, match=r"(ValueError: (more|a )|TypeError: mul)") as failed:
            caller.call(program(*steps, ends, output=[Ref(len(steps) + 1)]), ROWS)
        assert failed.value.failure == "operator failed"
        assert caller.call(plain, torch.ones(2)).outputs[0].tolist() == [2, 2]


def test_every_call_has_the_whole_allowance_when_others_spent_theirs() -> None:
    long = program(step("o:mul", [1], 3 * MILLION), step("b:len", Ref(1)), output=[Ref(2)])
    with LocalWorker().connect() as caller:
        for _ in range(3):
            assert caller.call(long, torch.ones(1)).outputs == [3 * MILLION]


COMPUTED: list[tuple[str, tuple[Any, ...], Any]] = [
    ("o:pow", (2, 1000), 2**1000),
    ("o:pow", (-1, 10**9), 1),
    ("o:pow", (2, -3), 0.125),
    ("o:pow", (2.0, 0.5), 2.0**0.5),
    ("b:pow", (3, 10**9, 7), pow(3, 10**9, 7)),
    ("o:lshift", (5, 100), 5 << 100),
    ("o:lshift", (0, 10**6), 0),
    ("o:mul", (1 << 500, 1 << 500), 1 << 1000),
    ("o:mul", ([1, 2], 3), [1, 2, 1, 2, 1, 2]),
    ("o:mul", (3, "ab"), "ababab"),
    ("o:add", ((1,), (2,)), (1, 2)),
    ("o:mod", (-7, 3), 2),
    ("o:floordiv", (7, -2), -4),
    ("o:eq", ([1, [2]], [1, [2]]), True),
    ("b:round", (1234, -2), 1200),
    ("b:round", (2.675, 2), round(2.675, 2)),
    ("b:sum", ([1, 2, 3], 4), 10),
    ("b:max", (1, 5, 3), 5),
    ("b:int", (1.7e308,), int(1.7e308)),
    ("M:prod", ([2, 3, 0.5],), 3.0),
    ("M:prod", ([1] * 1025,), 1),
    ("M:prod", ([0, *[3] * 1000],), 0),
    ("M:prod", ([0.5, *[2] * 1000],), 2.0**999),
    ("M:lcm", (4, 6, 10), 60),
    ("M:lcm", (2,) * 600, 2),
    ("b:sum", ([(1,), (2,)], ()), (1, 2)),
    ("o:getitem", ([1, 2, 3], slice(1, None)), [2, 3]),
    ("o:getitem", ("abc", -1), "c"),
    ("M:floor", (2.5,), 2),
]


@pytest.mark.parametrize(("name", "arguments", "expected"), COMPUTED)
def test_plain_values_are_computed_when_they_are_within_the_bounds(
    name: str, arguments: tuple[Any, ...], expected: Any
) -> None:
    found = TABLE.find(name)
    assert found is not None
    given = found(*arguments)
    assert (type(given), given) == (type(expected), expected)


def test_pieces_are_given_when_few_of_them_lie_along_a_long_dimension() -> None:
    rows = ROWS.expand(3, -1)
    for name, arguments in (
        ("m:unbind", (0,)),
        ("m:split", (1,)),
        ("t:torch.chunk", (3, 0)),
        ("m:split", ([2 * MILLION, 3 * MILLION], 1)),
        ("t:torch.chunk", (MILLION,)),
    ):
        found = TABLE.find(name)
        assert found is not None
        expected = getattr(torch.Tensor, name.rpartition(":")[2].rpartition(".")[2])(
            rows, *arguments
        )
        assert [each.shape for each in found(rows, *arguments)] == [e.shape for e in expected]


def test_pieces_are_given_when_arguments_are_named_in_any_order() -> None:
    x = torch.zeros(10, 4)
    for name, named, pieces in (
        ("t:torch.functional.split", {"split_size_or_sections": 2, "tensor": x}, 5),
        ("t:torch.functional.split", {"dim": 1, "split_size_or_sections": 2, "tensor": x}, 2),
        ("a:aten::split.Tensor", {"split_size": 2, "self": x}, 5),
        ("t:torch.unbind", {"dim": 1, "input": x}, 4),
        ("t:torch.chunk", {"dim": 1, "chunks": 2, "input": x}, 2),
        ("t:torch.tensor_split", {"indices": [1, 2], "input": x}, 3),
    ):
        found = TABLE.find(name)
        assert found is not None
        assert len(found(**named)) == pieces


def test_places_of_a_long_list_are_read_when_it_takes_most_of_the_allowance() -> None:
    steps = [step("o:mul", [7], 3 * MILLION), *(step("o:getitem", Ref(1), n) for n in range(9))]
    with LocalWorker().connect() as caller:
        assert caller.call(program(*steps, output=[Ref(10)]), torch.ones(1)).outputs == [7]


def test_tensors_meet_no_bounds_when_they_come_first() -> None:
    """A program calls Python's own function with them."""
    seen: list[Any] = []
    found = TABLE.find("o:sub")
    assert found is not None
    assert of_tensors(found) is operator.sub
    squared = BuiltProgram("d", program(step("o:mul", Ref(0), Ref(0)), output=[Ref(1)]), TABLE)
    seen += squared.run([torch.tensor(1 << 40)], ())
    seen += squared.run([1 << 40], ())
    assert seen == [torch.tensor(0), 1 << 80]  # tensors wrap, Python's numbers grow
    counts = [squared.counted_run([value]) and squared.counts for value in (torch.ones(2), 3)]
    assert [each.operators for each in counts if each] == [1, 0]


def test_call_fails_when_an_output_has_more_digits_than_a_message_takes() -> None:
    with LocalWorker().connect() as caller:
        for first in (1, -1):
            with pytest.raises(CallFailed, match="64 bits"):
                caller.call(program(step("o:lshift", first, 64), output=[Ref(1)]), torch.ones(1))
            widest = program(step("o:lshift", first, 63), output=[Ref(1)])
            assert caller.call(widest, torch.ones(1)).outputs == [first << 63]


def test_numpys_functions_take_tensors_of_any_size_when_a_list_is_beside_them() -> None:
    steps = [step("n:add", [1], Ref(0)), step("n:sum", Ref(1), axis=0)]
    with LocalWorker().connect() as caller:
        (found,) = caller.call(program(*steps, output=[Ref(2)]), torch.ones(MILLION)).outputs
    assert found == 2 * MILLION
