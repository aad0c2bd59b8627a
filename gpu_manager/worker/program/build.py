"""From a program that a client sent to a Python function that runs it.

The function's source is made of numbers alone: operators, constants, names and every literal are
found in a table of values, so that no text of a client ever becomes source.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gpu_manager.call_errors import CallRefused
from gpu_manager.worker.program.allowed_operators import Operator, OperatorTable
from gpu_manager.worker.program.argument_checks import short_name
from gpu_manager.worker.program.plain_values import of_tensors
from gpu_manager.worker.program.tensor_specs import DTYPES
from gpu_manager.worker.program.usage import OperatorCounts, Run, counting
from gpu_manager.worker.program.written_tensors import (
    PROGRAM,
    WRITING,
    may_write,
    noting_failed_writes,
)
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
)
from torch_shim.wire.protocol import FailureKind

_LAYOUTS = {"strided": torch.strided}
_MEMORY_FORMATS = {
    "contiguous_format": torch.contiguous_format,
    "channels_last": torch.channels_last,
    "channels_last_3d": torch.channels_last_3d,
    "preserve_format": torch.preserve_format,
}
_NAMED: dict[str, Any] = {
    "dtype": DTYPES,
    "layout": _LAYOUTS,
    "memory_format": _MEMORY_FORMATS,
}
_MAX_INPUTS = 1 << 20
_MAX_SIZE = 1 << 48
_DEVICES = ("cpu", "cuda")  # where tensors of a program may be
_HIGHER_ORDER = "h:"  # the operators that call parts
_MOST_NESTED = 16  # parts in parts
_OF_MODES = ("autocast", "functorch", "vmap", "func.", "enabled", "mode")
_AUTOCAST = "t:torch.amp.autocast_mode._enter_autocast"  # tells the devices apart itself


class BuiltProgram:
    """A program ready to run: `run(inputs, constants)` gives its output's leaves in order."""

    def __init__(self, digest: str, program: Program, table: OperatorTable) -> None:
        self.digest = digest
        self.inputs = program.inputs
        self.random = program.random
        self.operators = frozenset(step.operator for step in program.steps)
        self.has_parts = bool(program.parts)
        # Whether it can enter autocast, a transform of functions, or another of torch's modes.
        self.enters_modes = self.has_parts or any(map(_may_enter, self.operators))
        self.source = program
        self._table = table
        self._device = table.device
        self.constants = self.fresh_constants()
        parts = _Parts(program.parts, table)
        writer = _Writer(program, len(program.constants), table, parts)
        self._run: Run = writer.function()
        self.run: Run = noting_failed_writes(self._run)
        self._operator_names = writer.operator_names
        # Whether it reads large inputs where the function has them; a GPU has a copy in any case.
        self.reads_only = may_borrow(program) and not writer.writing_lines
        self.borrows = table.device.type == "cpu" and self.reads_only
        self.counts: OperatorCounts | None = None  # of a run, once one was counted

    def counted_run(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """A run whose operators are counted; those in parts are not."""
        counts = OperatorCounts()
        names = {} if self.has_parts else self._operator_names
        run = noting_failed_writes(counting(self._run, names, counts))
        found = run(inputs, self.constants)
        self.counts = counts
        return found

    def fresh_constants(self) -> list[torch.Tensor]:
        """The program's own tensors, as they were sent."""
        return [_constant(constant, self._device) for constant in self.source.constants]

    def some_steps(self, steps: ProgramPart) -> Run:
        """A function of some of its steps: `run(inputs, ())` gives the output's leaves in order."""
        return noting_failed_writes(
            _Writer(steps, 0, self._table, _Parts((), self._table)).function()
        )


def _may_enter(operator: str) -> bool:
    return any(word in operator for word in _OF_MODES)


class _Parts:
    """The parts of one program as functions, each of which may call those before it."""

    def __init__(self, parts: Sequence[ProgramPart], table: OperatorTable) -> None:
        self._functions: list[Callable[..., Any]] = []
        self._depths: list[int] = []
        self._named: set[int] = set()
        for part in parts:
            self._named = set()
            run = _Writer(part, 0, table, self).function(flat=False)
            depth = 1 + max((self._depths[number] for number in self._named), default=0)
            if depth > _MOST_NESTED:
                raise CallRefused(FailureKind.PROGRAM, f"parts are nested {depth} deep")
            self._functions.append(_called_with_arguments(run))
            self._depths.append(depth)

    def named(self, name: PartName) -> Callable[..., Any]:
        number = name.number
        if type(number) is not int or not 0 <= number < len(self._functions):
            raise CallRefused(FailureKind.PROGRAM, f"part {number!r:.40} is not there yet")
        self._named.add(number)
        return self._functions[number]


def _called_with_arguments(run: Run) -> Callable[..., Any]:
    return lambda *inputs: run(inputs, ())


class _Writer:
    """Writes the source of a program or of one of its parts, and the table of its values."""

    def __init__(
        self, program: Program | ProgramPart, constants: int, table: OperatorTable, parts: _Parts
    ) -> None:
        if program.inputs > _MAX_INPUTS:
            raise CallRefused(FailureKind.PROGRAM, f"{program.inputs} inputs")
        self._program = program
        self._constants = constants
        self._table = table
        self._parts = parts
        self._device = table.device
        self.operator_names: dict[str, str] = {}  # in the table: operators, as programs name them
        self.writing_lines: dict[int, list[str]] = {}  # what each may write to
        self._values: dict[str, Any] = {}
        self._names: dict[Any, str] = {}
        self._defined = program.inputs + constants
        self._maps_devices = True
        self._takes_parts = False

    def function(self, *, flat: bool = True) -> Run:
        """The compiled function, which returns its output's leaves, or else the output itself."""
        program = self._program
        first = self._defined
        spent = self._spent_by_step()
        lines = ["def run(inputs, constants):"]
        for names, count, start in (
            ("inputs", program.inputs, 0),
            ("constants", self._constants, program.inputs),
        ):
            if count:
                lines.append(f" {''.join(f'v{start + n},' for n in range(count))} = {names}")
        for number, step in enumerate(program.steps):
            lines.append(f" v{first + number} = {self._call(step)}")
            if may_write(step):
                used = references([step.arguments, list(step.named.values())])
                self.writing_lines[len(lines)] = [f"v{number}" for number in used]
            self._defined += 1
            lines += [f" v{value} = None" for value in sorted(spent[number])]
        lines.append(f" return {self._output(flat=flat)}")
        code = compile("\n".join(lines), PROGRAM, "exec", dont_inherit=True, optimize=2)
        # The builtins stay: torch itself imports modules through those of its caller.
        space = {**self._values, WRITING: self.writing_lines}
        exec(code, space)
        run: Run = space["run"]
        return run

    def _output(self, *, flat: bool) -> str:
        self._takes_parts = False
        if flat:
            return f"({''.join(f'{leaf},' for leaf in self._leaves(self._program.output))})"
        return self._expression(self._program.output)

    def _spent_by_step(self) -> list[list[int]]:
        """The values that are needed no more after each step; those of the output never end."""
        first, steps = self._defined, self._program.steps
        last = {first + number: number for number in range(len(steps))}  # used by itself alone
        for number, step in enumerate(steps):
            for used in references([step.arguments, list(step.named.values())]):
                if used >= first:
                    last[used] = number
        spent: list[list[int]] = [[] for _ in steps]
        for value in last.keys() - references(self._program.output):
            spent[last[value]].append(value)
        return spent

    def _call(self, step: ProgramStep) -> str:
        found = self._table.find(step.operator)
        if found is None:
            raise CallRefused(
                FailureKind.PROGRAM, f"operator {step.operator!r:.120} is not allowed"
            )
        self._maps_devices = step.operator != _AUTOCAST
        self._takes_parts = step.operator.startswith(_HIGHER_ORDER)
        arguments = [self._expression(argument) for argument in step.arguments]
        if step.named and not any(map(_is_made_anew, step.named.values())):
            named = {name: self._literal(value) for name, value in step.named.items()}
            found = functools.partial(found, **named)
        elif step.named:
            pairs = (
                f"{self._value(name)}: {self._expression(value)}"
                for name, value in step.named.items()
            )
            arguments.append(f"**{{{', '.join(pairs)}}}")
        called = self._name_of(found, step)
        plain = of_tensors(found)
        if plain is not None and step.arguments and isinstance(step.arguments[0], Ref):
            # Bounds cost nothing where there is a tensor.
            is_tensor = f"{arguments[0]}.__class__ is {self._value(torch.Tensor)}"
            called = f"({self._name_of(plain, step)} if {is_tensor} else {called})"
        return f"{called}({', '.join(arguments)})"

    def _name_of(self, operator: Operator, step: ProgramStep) -> str:
        name = self._value(operator)
        self.operator_names[name] = step.operator
        return name

    def _expression(self, value: Any) -> str:
        """Source for an argument: references by number, everything else from the table."""
        if isinstance(value, Ref):
            if type(value.number) is not int or not 0 <= value.number < self._defined:
                raise CallRefused(
                    FailureKind.PROGRAM, f"value {value.number!r:.40} is not there yet"
                )
            return f"v{value.number}"
        if not _is_made_anew(value):
            return self._value(self._literal(value))
        if isinstance(value, (list, Tuple)):
            items = value if isinstance(value, list) else value.items
            inside = "".join(f"{self._expression(item)}," for item in items)
            return f"[{inside}]" if isinstance(value, list) else f"({inside})"
        if isinstance(value, Slice):
            return f"slice({', '.join(self._expression(part) for part in value)})"
        if isinstance(value, Mapping):
            pairs = (f"{self._expression(k)}: {self._expression(v)}" for k, v in _pairs(value))
            return f"{{{', '.join(pairs)}}}"
        raise CallRefused(FailureKind.PROGRAM, f"argument {value!r:.60}")

    def _value(self, value: Any) -> str:
        """The name in the table of a value that never changes."""
        name = f"k{len(self._values)}"
        if value is None or isinstance(value, (bool, int, str)) or callable(value):
            name = self._names.setdefault((type(value), value), name)
        self._values[name] = value  # 0.0 and -0.0, (1,) and (True,) are equal: never shared
        return name

    def _literal(self, value: Any) -> Any:
        if value is None or isinstance(value, (bool, int, float)):
            return value
        if isinstance(value, str):
            return self._device_of(value) if self._maps_devices else value
        if isinstance(value, list):
            return [self._literal(item) for item in value]
        if isinstance(value, Tuple):
            return tuple(self._literal(item) for item in value.items)
        if isinstance(value, Slice):
            return slice(*(self._literal(part) for part in value))
        if isinstance(value, Mapping):
            return {self._literal(key): self._literal(item) for key, item in _pairs(value)}
        return self._constant(value)

    def _constant(self, value: Any) -> Any:
        if isinstance(value, Complex):
            return complex(float(value.real), float(value.imaginary))
        if isinstance(value, Ellipse):
            return ...
        if isinstance(value, PartName) and self._takes_parts:
            return self._parts.named(value)
        if isinstance(value, DeviceName):
            if str(value.kind).partition(":")[0] not in _DEVICES:
                raise CallRefused(FailureKind.PROGRAM, f"device {value.kind!r:.40}")
            return torch.device(self._device_of(str(value.kind)))
        if isinstance(value, Named):
            found = _NAMED.get(str(value.kind), {}).get(str(value.name))
            if found is not None:
                return found
        raise CallRefused(FailureKind.PROGRAM, f"argument {value!r:.60}")

    def _device_of(self, name: str) -> str:
        """A text that names the function's GPU names the worker's here."""
        kind = name.partition(":")[0]
        if kind not in _DEVICES and _is_device(name):
            raise CallRefused(FailureKind.PROGRAM, f"device {name!r:.40}")
        return str(self._device) if kind == "cuda" else name

    def _leaves(self, output: Any) -> list[str]:
        if isinstance(output, list):
            return [leaf for item in output for leaf in self._leaves(item)]
        if isinstance(output, Tuple):
            return self._leaves(list(output.items))
        if isinstance(output, Mapping):
            return self._leaves([item for _, item in _pairs(output)])
        return [self._expression(output)]


def _is_made_anew(value: Any) -> bool:
    """Whether each run makes the argument: a list that one run writes to is no other run's."""
    if isinstance(value, (Tuple, Slice)):
        return any(map(_is_made_anew, value.items if isinstance(value, Tuple) else value))
    return isinstance(value, (Ref, list, Mapping))


def references(value: Any) -> list[int]:
    if isinstance(value, Ref):
        return [value.number]
    if isinstance(value, (Tuple, Mapping)):
        value = value.items
    if isinstance(value, (list, Slice)):
        return [number for item in value for number in references(item)]
    return []


def _is_device(name: str) -> bool:
    """Whether torch takes the text for a device: tensors of such a one have no memory here."""
    try:
        torch.device(name)
    except RuntimeError:
        return False
    return True


def _pairs(mapping: Mapping) -> list[tuple[Any, Any]]:
    items = mapping.items
    if len(items) % 2:
        raise CallRefused(FailureKind.PROGRAM, "a mapping of odd length")
    return list(zip(items[::2], items[1::2], strict=True))


def _constant(constant: Constant, device: torch.device) -> torch.Tensor:
    dtype = DTYPES.get(constant.dtype, torch.uint8)
    count = math.prod(constant.shape)
    known = constant.dtype in DTYPES and all(0 <= size < _MAX_SIZE for size in constant.shape)
    if not known or count * dtype.itemsize != len(constant.data):
        raise CallRefused(
            FailureKind.PROGRAM, f"constant {constant.dtype:.20} of {constant.shape!r:.60}"
        )
    if not count:
        return torch.empty(constant.shape, dtype=dtype, device=device)
    flat = torch.frombuffer(bytearray(constant.data), dtype=dtype)
    return flat.view(constant.shape).to(device)


# Which programs may read a function's memory itself, instead of a copy of their large inputs.
#
# The function can write to such memory while a program reads it. The numbers are then garbage, as
# they would be on a GPU; but an operator that reads a value twice, to check it and then to go
# where it says, would leave its memory. So a program borrows its inputs only if all of its
# operators read elements as numbers: where they read and write depends on shapes alone. And none
# of them writes to an input, since a call may have to be repeated.


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Not here: what indexes, sorts, counts before it fills (nonzero, masked_select, unique), samples,
# or divides integers (the processor traps a division by zero behind the check for it).
_BORROWING = _words(
    """
    abs add addcdiv addcmul addmm alias amax amin atan avg_pool1d avg_pool2d baddbmm batch_norm bmm
    broadcast_to cat ceil chunk clamp clamp_max clamp_min clone concat conj contiguous conv1d conv2d
    conv3d conv_transpose1d conv_transpose2d convolution cos cosh detach diff div divide dropout
    elu eq erf exp expand expand_as expm1 fft_fft fft_ifft fft_rfft flatten flip float floor ge
    gelu group_norm gt half hardsigmoid hardswish hardtanh instance_norm interpolate isfinite isinf
    isnan layer_norm le leaky_relu lerp linear log log10 log1p log2 log_softmax logsumexp lt matmul
    max_pool1d max_pool2d maximum mean minimum mish mm movedim mse_loss mul multiply mv
    narrow ne neg norm normalize pad permute pow prod reciprocal relu relu6 reshape rms_norm round
    rsqrt rsub select selu sigmoid sign silu sin sinh size slice softmax softplus split sqrt square
    squeeze stack std sub subtract sum swapaxes t tan tanh transpose tril triu true_divide truediv
    trunc unbind unflatten unsqueeze upsample var view view_as where zeros_like ones_like
    __add__ __mul__ __neg__ __radd__ __rmul__ __rsub__ __sub__ __truediv__ __matmul__ pos
    T mT shape dtype device ndim adaptive_avg_pool1d adaptive_avg_pool2d
    """
)


def may_borrow(program: Program) -> bool:
    """Whether the program's inputs may lie in memory that the function writes to meanwhile.

    As far as the operators' names say: none of its steps may write to what it is given.
    """
    return not program.parts and all(_reads_numbers(step.operator) for step in program.steps)


def _reads_numbers(name: str) -> bool:
    """Whether an operator is one of these: none of another library is."""
    return short_name(name) in _BORROWING and ("::" not in name or name.startswith("a:aten::"))
