"""Programs on their way: packed and read again, and whatever else is refused."""

import msgpack
import pytest

from torch_shim.errors import BadFrame
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


def test_program_is_the_same_when_it_was_packed_and_read_again() -> None:
    assert unpack(PROGRAM.pack()) == PROGRAM
    assert digest_of(PROGRAM.pack()) == digest_of(unpack(PROGRAM.pack()).pack())


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00" * 40,
        msgpack.packb([2, 0, [], [], None, False]),
        msgpack.packb([1, -1, [], [], None, False]),
        msgpack.packb([1, 0, [], [["m:add", [{99: []}], {}]], None, False]),
        msgpack.packb([1, 0, [], [["m:add", [{0: [1, 2, 3]}], {}]], None, False]),
        msgpack.packb([1, 0, [], [["m:add", 7, {}]], None, False]),
        msgpack.packb([1, 0, [], "steps", None, False]),
        msgpack.packb(msgpack.ExtType(1, b"x")),
    ],
)
def test_program_is_refused_when_it_is_nonsense(data: bytes) -> None:
    with pytest.raises(BadFrame):
        unpack(data)


def test_program_is_refused_when_its_arguments_are_nested_too_deep() -> None:
    value: list[object] = []
    for _ in range(100):
        value = [value]
    with pytest.raises(BadFrame):
        unpack(msgpack.packb([1, 0, [], [["m:add", value, {}]], None, False]))
