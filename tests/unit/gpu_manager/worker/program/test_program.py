"""Programs become functions that compute what torch does, and hold nothing longer than it does."""

import weakref
from typing import Any

import pytest
import torch

from gpu_manager.call_errors import CallRefused
from gpu_manager.worker.program.allowed_operators import OperatorTable
from gpu_manager.worker.program.build import BuiltProgram
from tests.kit.worlds.caller import program, raw, step
from torch_shim.wire.programs import (
    Complex,
    Constant,
    DeviceName,
    Ellipse,
    Mapping,
    Named,
    Program,
    ProgramStep,
    Ref,
    Slice,
    Tuple,
    unpack,
)

TABLE = OperatorTable(torch.device("cpu"))


@pytest.fixture(autouse=True)
def _no_grad() -> Any:
    with torch.no_grad():
        yield


def build(what: Program) -> BuiltProgram:
    return BuiltProgram("digest", unpack(what.pack()), TABLE)


def run(what: Program, *inputs: Any) -> tuple[Any, ...]:
    built = build(what)
    return built.run(list(inputs), built.constants)


def test_program_gives_every_leaf_when_its_output_is_nested() -> None:
    x = torch.arange(4.0)
    nested = Tuple([Ref(0), [Ref(1), None], Mapping(["a", Ref(2), "b", 3])])
    what = Program(1, (), (step("m:add", Ref(0), 1), step("o:mul", Ref(1), 2)), nested)
    found = run(what, x)
    assert torch.equal(found[1], x + 1)
    assert found[2] is None
    assert torch.equal(found[3], (x + 1) * 2)
    assert found[4] == 3


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        (Tuple([Ellipse(), Slice(None, None, 2)]), (..., slice(None, None, 2))),
        (Tuple([Slice(Ref(1), 3, None), 0]), (slice(1, 3), 0)),
        ([0, 2], [0, 2]),
        (Tuple([None, Ref(1)]), (None, 1)),
    ],
)
def test_program_indexes_like_python_when_the_index_is_composed(index: Any, expected: Any) -> None:
    x = torch.arange(12.0).view(4, 3)
    what = program(step("o:getitem", Ref(0), index), inputs=2, output=[Ref(2)])
    (found,) = run(what, x, 1)
    assert torch.equal(found, x[expected])


def test_program_keeps_zero_and_minus_zero_apart_when_both_are_literals() -> None:
    what = program(
        step("t:torch.full", [1], 0.0),
        step("t:torch.full", [1], -0.0),
        step("t:torch.full", [1], 1),
        step("t:torch.full", [1], True),
        step("t:torch.full", [1], 1.0),
        inputs=0,
        output=[Ref(n) for n in range(5)],
    )
    found = run(what)
    assert torch.signbit(found[0]).item() is False
    assert torch.signbit(found[1]).item() is True
    assert [tensor.dtype for tensor in found[2:]] == [torch.int64, torch.bool, torch.float32]


def test_program_names_dtypes_layouts_and_devices_when_arguments_do() -> None:
    named = {
        "dtype": Named("dtype", "float64"),
        "device": DeviceName("cuda"),
        "memory_format": Named("memory_format", "channels_last"),
    }
    what = program(step("t:torch.ones_like", Ref(0), **named), output=[Ref(1)])
    (found,) = run(what, torch.ones(1, 2, 3, 3))
    assert found.dtype is torch.float64
    assert found.device.type == "cpu"
    assert found.is_contiguous(memory_format=torch.channels_last)


def test_program_takes_a_device_by_text_when_torch_was_told_so() -> None:
    what = program(
        step("m:to", Ref(0), "cuda:0"), step("t:torch.zeros", [2], device="cuda"), output=[Ref(2)]
    )
    assert run(what, torch.ones(2))[0].device.type == "cpu"


def test_program_adds_complex_constants_when_it_has_some() -> None:
    tensor = torch.tensor([1 + 2j, 3])
    constant = Constant("complex64", (2,), raw(tensor))
    what = program(step("o:add", Ref(1), Complex(0.0, 1.0)), constants=(constant,), output=[Ref(2)])
    assert torch.equal(run(what, torch.ones(1))[0], tensor + 1j)


@pytest.mark.parametrize(
    "steps",
    [
        [step("o:iadd", [1], [2])],
        [step("b:max", [], default=[1]), step("o:iadd", Ref(0), [2])],
        [step("o:getitem", Tuple([[1]]), 0), step("o:iadd", Ref(0), [2])],
        [step("o:getitem", Tuple([Tuple([[1]])]), 0), step("o:getitem", Ref(0), 0),
         step("o:iadd", Ref(1), [2])],
    ],
    ids=["itself", "by name", "in a tuple", "in a tuple in one"],
)  # fmt: skip
def test_program_passes_lists_that_operators_may_change_when_called_twice(
    steps: list[ProgramStep],
) -> None:
    length = step("b:len", Ref(len(steps) - 1))
    built = build(program(*steps, length, inputs=0, output=[Ref(len(steps))]))
    assert [built.run([], [])[0] for _ in range(3)] == [2, 2, 2]


def test_program_frees_a_value_when_its_last_user_has_run() -> None:
    alive: list[weakref.ref[torch.Tensor]] = []
    seen: list[int] = []

    def watch(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(sum(ref() is not None for ref in alive))
        result = tensor + 1
        alive.append(weakref.ref(result))
        return result

    class Watched(OperatorTable):
        def find(self, name: str) -> Any:
            return watch if name == "m:add" else super().find(name)

    what = program(*(step("m:add", Ref(n)) for n in range(6)), output=[Ref(6)])
    table = Watched(torch.device("cpu"))
    BuiltProgram("d", what, table).run([torch.ones(1)], [])
    assert max(seen) == 1


@pytest.mark.parametrize(
    "what",
    [
        program(step("m:add", Ref(2), 1), output=[Ref(1)]),
        program(step("m:add", Ref(-1), 1), output=[Ref(1)]),
        program(step("m:add", Ref(1), 1), output=[Ref(1)]),
        program(output=[Ref(1)]),
        program(step("m:add", Ref(True), 1), output=[Ref(1)]),
        program(step("m:to", Ref(0), Named("dtype", "nothing")), output=[Ref(1)]),
        program(step("m:to", Ref(0), Named("module", "os")), output=[Ref(1)]),
        program(step("m:add", Ref(0), b"bytes"), output=[Ref(1)]),
        program(step("m:add", Ref(0), Mapping(["a"])), output=[Ref(1)]),
        program(inputs=1 << 30, output=[]),
        program(constants=(Constant("float32", (1 << 40, 1 << 40), b"1234"),), output=[]),
        program(constants=(Constant("float32", (-1, -1), b"1234"),), output=[]),
        program(constants=(Constant("object", (1,), b"1234"),), output=[]),
    ],
)
def test_program_is_refused_when_it_refers_to_what_cannot_be(what: Program) -> None:
    with pytest.raises((CallRefused, RuntimeError)):
        BuiltProgram("d", what, TABLE)


def test_program_runs_no_text_of_the_client_when_names_look_like_source() -> None:
    what = program(
        step("m:add", Ref(0), **{"other=1) or __import__('os')._exit(1": 1}), output=[Ref(1)]
    )
    with pytest.raises(TypeError):
        run(what, torch.ones(1))


def test_program_runs_every_step_when_there_are_thousands() -> None:
    what = program(*(step("m:add", Ref(n), 1) for n in range(3000)), output=[Ref(3000)])
    assert run(what, torch.zeros(1))[0].item() == 3000
