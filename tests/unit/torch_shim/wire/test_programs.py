"""Programs on their way: packed and read again, and whatever else is refused."""

from dataclasses import replace

import pytest
from msgspec import msgpack

from tests.kit.outcomes import instead_of
from torch_shim.errors import BadFrame
from torch_shim.wire.programs import (
    Complex,
    Constant,
    DeviceName,
    Ellipse,
    Mapping,
    Named,
    PartName,
    Program,
    ProgramPart,
    ProgramStep,
    Ref,
    Slice,
    Tuple,
    digest_of,
    unpack,
)

PROGRAM = Program(
    inputs=2,
    constants=(Constant("int64", (2,), bytes(16)),),
    steps=(
        ProgramStep("t:torch.nn.functional.relu", [Ref(0)], {"inplace": True}),
        ProgramStep("o:getitem", [Ref(3), Tuple([Slice(None, 2, None), Ellipse(), 0])]),
        ProgramStep(
            "t:torch.zeros",
            [[1, Ref(2)]],
            {"dtype": Named("dtype", "float32"), "device": DeviceName("cuda")},
        ),
        ProgramStep("o:mul", [Ref(4), Complex(1.0, -2.0)]),
        ProgramStep("m:foo", [Mapping(["a", Ref(5), "b", None])]),
    ),
    output=Tuple([Ref(6), None, 3, 2.5, "text"]),
    random=True,
)


BRANCH = ProgramPart(1, (ProgramStep("m:sin", [Ref(0)]),), Tuple([Ref(1)]))
CALL = ProgramStep("h:cond", [Ref(0), PartName(0), PartName(0), Tuple([Ref(1)])])
WITH_PARTS = replace(PROGRAM, steps=(*PROGRAM.steps, CALL), parts=(BRANCH,))


@pytest.mark.parametrize("program", [PROGRAM, WITH_PARTS])
def test_program_is_the_same_when_it_was_packed_and_read_again(program: Program) -> None:
    assert unpack(program.pack()) == program
    assert digest_of(program.pack()) == digest_of(unpack(program.pack()).pack())


def test_program_is_refused_when_its_parts_are_too_many_or_too_long() -> None:
    branch = replace(BRANCH, steps=BRANCH.steps * 100_001)
    for parts in ((BRANCH,) * 1025, (branch, branch)):
        with pytest.raises(BadFrame, match="too many"):
            unpack(replace(WITH_PARTS, parts=parts).pack())


NONSENSE = (
    b"",
    b"\x00" * 40,
    msgpack.encode([0, [], False, [[], None]]),
    msgpack.encode([0, [], False, [[], None, [[0, []]]]]),
    msgpack.encode([0, [], False, [[], None, [[True, [], None]]]]),
    msgpack.encode([0, [], False, [[], None, 7]]),
    msgpack.encode([1, 0, [], [], None, False, []]),
    msgpack.encode([-1, [], False, [[], None, []]]),
    msgpack.encode([0, [], False, [[["m:add", [{99: []}], {}]], None, []]]),
    msgpack.encode([0, [], False, [[["m:add", [{0: [1, 2, 3]}], {}]], None, []]]),
    msgpack.encode([0, [], False, [[["m:add", 7, {}]], None, []]]),
    msgpack.encode([0, [], False, ["steps", None, []]]),
    msgpack.encode(msgpack.Ext(1, b"x")),
)


def test_program_is_refused_when_it_is_nonsense() -> None:
    wrong = [(data, taken) for data in NONSENSE if (taken := instead_of(BadFrame, unpack, data))]
    assert wrong == []


def test_program_is_refused_when_its_arguments_are_nested_too_deep() -> None:
    value: list[object] = []
    for _ in range(100):
        value = [value]
    with pytest.raises(BadFrame):
        unpack(msgpack.encode([0, [], False, [[["m:add", value, {}]], None, []]]))
