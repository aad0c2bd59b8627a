"""Programs: a graph as a list of named operator calls, in msgpack; torch is not needed here.

Values are numbered: the inputs first, then one for each step. An argument is None, a bool, a
number, a string, a list, or one of the tagged values below. The bodies of loops and the branches of
conditions are parts of the program, which its steps name.
"""

import hashlib
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgpack

from torch_shim.errors import BadFrame
from torch_shim.wire.bounded_msgpack import MessageBounds, unpack_bounded

MAX_STEPS = 200_000  # of a program and of its parts together
MAX_DEPTH = 32
MAX_PARTS = 1024
# A step is a list of three, with some arguments of which few are lists.
_BOUNDS = MessageBounds(32 * MAX_STEPS, MAX_STEPS)


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


@dataclass(frozen=True, slots=True)
class Constant:
    """A tensor that is part of the program."""

    dtype: str
    shape: tuple[int, ...]
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
        fields = [
            self.inputs,
            [[c.dtype, list(c.shape), c.data] for c in self.constants],
            _plain_steps(self.steps),
            _plain(self.output),
            self.random,
            [[p.inputs, _plain_steps(p.steps), _plain(p.output)] for p in self.parts],
        ]
        data: bytes = msgpack.packb(fields, use_bin_type=True)
        return data


def digest_of(packed: bytes) -> str:
    """Return the name by which a worker stores a built program."""
    return hashlib.sha256(packed).hexdigest()


def unpack(data: bytes | bytearray | memoryview) -> Program:
    """Read a program from the peer; raise BadFrame if it is invalid."""
    fields = unpack_bounded(data, _BOUNDS, text_keys=False)
    try:
        inputs, constants, steps, output, random, parts = fields
        _check_size(steps, parts)
        return Program(
            _count_of(inputs),
            tuple(_constant(*entry) for entry in constants),
            _steps(steps),
            _tagged(output),
            bool(random),
            tuple(ProgramPart(_count_of(n), _steps(body), _tagged(o)) for n, body, o in parts),
        )
    except (
        ValueError,
        TypeError,
        AttributeError,
        RecursionError,
    ) as error:
        raise BadFrame(f"program: {error}") from error


def _constant(dtype: Any, shape: Any, data: Any) -> Constant:
    if not isinstance(data, bytes):  # `bytes` of a number is as many zeros
        raise BadFrame("program: a constant without bytes")
    if any(type(size) is not int for size in shape):
        raise BadFrame("program: the shape of a constant")
    return Constant(str(dtype), tuple(shape), data)


def _check_size(steps: list[Any], parts: list[Any]) -> None:
    if len(parts) > MAX_PARTS or len(steps) + sum(len(body) for _, body, _ in parts) > MAX_STEPS:
        raise BadFrame("program with too many steps or parts")


def _count_of(inputs: Any) -> int:
    if type(inputs) is not int or inputs < 0:
        raise BadFrame(f"program: {inputs!r:.20} inputs")
    return inputs


def _steps(steps: list[Any]) -> tuple[ProgramStep, ...]:
    return tuple(
        ProgramStep(
            str(op), [_tagged(a) for a in args], {str(k): _tagged(v) for k, v in kw.items()}
        )
        for op, args, kw in steps
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
    if not isinstance(value, dict):
        return value
    ((number, items),) = value.items()
    if not isinstance(number, int) or not 0 <= number < len(_TAGS):
        raise BadFrame(f"program: unknown kind of value {number!r:.40}")
    return _TAGS[number](*(_tagged(item, depth + 1) for item in items))
