"""Programs: a graph as a list of named operator calls, in msgpack; torch is not needed here.

Values are numbered: the inputs first, then one for each step. An argument is None, a bool, a
number, a string, a list, or one of the tagged values below. The bodies of loops and the branches of
conditions are parts of the program, which its steps name.
"""

import hashlib
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

from msgspec import Meta, Raw, Struct, msgpack

from torch_shim.errors import BadFrame
from torch_shim.wire.protocol import Buffer, decoded, encode

MAX_STEPS = 200_000  # of a program and of its parts together
MAX_DEPTH = 32
MAX_PARTS = 1024
_MOST_CODE_BYTES = 16 << 20  # of a program without its constants
_MOST_CONSTANTS = 1 << 16
_Count = Annotated[int, Meta(ge=0)]


class Ref(NamedTuple):
    """The value with this number."""

    number: int


class Named(NamedTuple):
    """A torch constant: kind is `dtype`, `layout` or `memory_format`; name as in `float32`."""

    kind: str
    name: str


class DeviceName(NamedTuple):
    """A device as the function names it: `cuda` means the worker's GPU."""

    kind: str


class Tuple(NamedTuple):
    """A tuple; lists need no tag."""

    items: list[Any]


class Slice(NamedTuple):
    """`start:stop:step`."""

    start: Any
    stop: Any
    step: Any


class Complex(NamedTuple):
    """A complex number."""

    real: float
    imaginary: float


class Ellipse(NamedTuple):
    """`...` in an index."""


class Mapping(NamedTuple):
    """A dict with string keys, as alternating keys and values."""

    items: list[Any]


class PartName(NamedTuple):
    """The program's part with this number, as a function of its inputs."""

    number: int


_TAGS: tuple[type, ...] = (
    Ref, Named, DeviceName, Tuple, Slice, Complex, Ellipse, Mapping, PartName,
)  # fmt: skip
_NUMBER = {tag: number for number, tag in enumerate(_TAGS)}


class Constant(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A tensor that is part of the program."""

    dtype: str
    shape: Annotated[tuple[int, ...], Meta(max_length=64)]
    data: bytes


@dataclass(frozen=True, slots=True)
class ProgramStep:
    """One operator call. Operators are named by a letter and a name:

    `m:relu_` a method of Tensor, `t:torch.nn.functional.relu` a function under torch,
    `a:aten::add.Tensor` a registered operator overload, `o:add` of the module operator,
    `b:max` a builtin, `M:floor` of the module math, `g:shape` an attribute of its one argument,
    `n:sqrt` a function of NumPy, `h:cond` a higher-order operator, which takes names of parts.
    """

    operator: str
    arguments: list[Any] = field(default_factory=list)
    named: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ProgramPart:
    """A function that steps call: a loop's body, a branch. It names only parts before itself."""

    inputs: int
    steps: tuple[ProgramStep, ...]
    output: Any


@dataclass(frozen=True, slots=True)
class Program:
    """The computation of one graph call, without the weights.

    `output` is a nested argument value (usually a Tuple). `random` is set if some step draws random
    numbers: calls then carry the generator's state.
    """

    inputs: int
    constants: tuple[Constant, ...]
    steps: tuple[ProgramStep, ...]
    output: Any
    random: bool = False
    parts: tuple[ProgramPart, ...] = ()

    def pack(self) -> bytes:
        """Return the serialized program; equal programs give equal bytes."""
        code = [
            _plain_steps(self.steps),
            _plain(self.output),
            [[p.inputs, _plain_steps(p.steps), _plain(p.output)] for p in self.parts],
        ]
        return encode([self.inputs, self.constants, self.random, code])


def renumbered(value: Any, numbers: dict[int, int]) -> Any:
    """Return an argument or output with each value that it names by its new number."""
    if isinstance(value, Ref):
        return Ref(numbers[value.number])
    if isinstance(value, list):
        return [renumbered(item, numbers) for item in value]
    if isinstance(value, (Tuple, Mapping)):
        return type(value)([renumbered(item, numbers) for item in value.items])
    if isinstance(value, Slice):
        return Slice(*(renumbered(part, numbers) for part in value))
    return value


def renumbered_step(step: ProgramStep, numbers: dict[int, int]) -> ProgramStep:
    arguments = [renumbered(argument, numbers) for argument in step.arguments]
    named = {name: renumbered(value, numbers) for name, value in step.named.items()}
    return ProgramStep(step.operator, arguments, named)


_PackedStep = tuple[str, list[Any], dict[str, Any]]
_Code = tuple[list[_PackedStep], Any, list[tuple[_Count, list[_PackedStep], Any]]]
_Constants = Annotated[list[Constant], Meta(max_length=_MOST_CONSTANTS)]
_PROGRAM = msgpack.Decoder(tuple[_Count, _Constants, bool, Raw])
_CODE = msgpack.Decoder(_Code)


def digest_of(packed: bytes) -> str:
    """Return the name by which a worker stores a built program."""
    return hashlib.sha256(packed).hexdigest()


def unpack(data: Buffer) -> Program:
    """Read a program from the peer; raise BadFrame if it is invalid."""
    inputs, constants, random, packed = decoded(_PROGRAM, data, "program")
    if len(packed) > _MOST_CODE_BYTES:
        raise BadFrame(f"program of {len(packed)} bytes without its constants")
    steps, output, parts = decoded(_CODE, packed, "program")
    if len(parts) > MAX_PARTS or len(steps) + sum(len(body) for _, body, _ in parts) > MAX_STEPS:
        raise BadFrame("program with too many steps or parts")
    try:
        return Program(
            inputs,
            tuple(constants),
            _steps(steps),
            _tagged(output),
            random,
            tuple(ProgramPart(count, _steps(body), _tagged(value)) for count, body, value in parts),
        )
    except (ValueError, TypeError) as error:
        raise BadFrame(f"program: {error}") from error


def _steps(steps: list[_PackedStep]) -> tuple[ProgramStep, ...]:
    return tuple(
        ProgramStep(op, [_tagged(a) for a in args], {key: _tagged(v) for key, v in named.items()})
        for op, args, named in steps
    )


def _plain_steps(steps: tuple[ProgramStep, ...]) -> list[Any]:
    return [[s.operator, _plain(s.arguments), _plain(s.named)] for s in steps]


def _plain(value: Any) -> Any:
    """Replace tagged values by msgpack maps of one entry; plain arguments contain no maps."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    number = _NUMBER.get(type(value))
    if number is None:
        return value
    return {number: [_plain(item) for item in value]}


def _tagged(value: Any, depth: int = 0) -> Any:
    if depth > MAX_DEPTH:
        raise BadFrame("program: arguments nested too deep")
    if isinstance(value, list):
        return [_tagged(item, depth + 1) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if not isinstance(value, dict):
        raise BadFrame(f"program: a {type(value).__name__} as an argument")
    ((number, items),) = value.items()
    if not isinstance(number, int) or not 0 <= number < len(_TAGS) or not isinstance(items, list):
        raise BadFrame(f"program: unknown kind of value {number!r:.40}")
    return _TAGS[number](*(_tagged(item, depth + 1) for item in items))
