"""Programs: a graph as a list of named operator calls, in msgpack; torch is not needed here.

Values are numbered: the inputs first, then one for each step. An argument is None, a bool, a
number, a string, a list, or one of the tagged values below.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgpack

from torch_shim.errors import BadFrame
from torch_shim.wire.bounded_msgpack import MessageBounds, unpack_bounded

PROGRAM_VERSION = 1
MAX_STEPS = 200_000
MAX_DEPTH = 32
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


_TAGS: tuple[type, ...] = (Ref, Named, DeviceName, Tuple, Slice, Complex, Ellipse, Mapping)
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
    `b:max` a builtin, `M:floor` of the module math, `g:shape` an attribute of its one argument.
    """

    operator: str
    arguments: list[Any] = field(default_factory=list)
    named: dict[str, Any] = field(default_factory=dict)


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

    def pack(self) -> bytes:
        """Return the serialized program; equal programs give equal bytes."""
        data: bytes = msgpack.packb(
            [
                PROGRAM_VERSION,
                self.inputs,
                [[c.dtype, list(c.shape), c.data] for c in self.constants],
                [[s.operator, _plain(s.arguments), _plain(s.named)] for s in self.steps],
                _plain(self.output),
                self.random,
            ],
            use_bin_type=True,
        )
        return data

    @property
    def first_step(self) -> int:
        """The number of the first step's value: inputs come first, then constants."""
        return self.inputs + len(self.constants)


def digest_of(packed: bytes) -> str:
    """Return the name by which a worker stores a built program."""
    return hashlib.sha256(packed).hexdigest()


def unpack(data: bytes | bytearray | memoryview) -> Program:
    """Read a program from the peer; raise BadFrame if it is invalid."""
    try:
        version, inputs, constants, steps, output, random = unpack_bounded(
            data, _BOUNDS, text_keys=False
        )
        if version != PROGRAM_VERSION:
            raise BadFrame(f"program of version {version!r}, supported is {PROGRAM_VERSION}")
        if len(steps) > MAX_STEPS or not isinstance(inputs, int) or inputs < 0:
            raise BadFrame("program with too many steps or an invalid number of inputs")
        return Program(
            inputs,
            tuple(Constant(str(d), tuple(map(int, s)), bytes(b)) for d, s, b in constants),
            tuple(
                ProgramStep(
                    str(op), [_tagged(a) for a in args], {str(k): _tagged(v) for k, v in kw.items()}
                )
                for op, args, kw in steps
            ),
            _tagged(output),
            bool(random),
        )
    except (
        ValueError,
        TypeError,
        AttributeError,
        RecursionError,
    ) as error:
        raise BadFrame(f"program: {error}") from error


def map_value(value: Any, change: Callable[[Any], Any]) -> Any:
    """Apply `change` to every leaf of a nested argument value; tags that hold values are kept."""
    if isinstance(value, list):
        return [map_value(item, change) for item in value]
    if isinstance(value, (Tuple, Mapping)):
        return type(value)([map_value(item, change) for item in value.items])
    if isinstance(value, Slice):
        return Slice(*(map_value(item, change) for item in value))
    return change(value)


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
        raise BadFrame(f"program: unknown kind of value {number!r}")
    return _TAGS[number](*(_tagged(item, depth + 1) for item in items))
