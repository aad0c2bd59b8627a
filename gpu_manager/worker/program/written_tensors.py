"""Which steps may write to a tensor that they are given, and how its version tells of it.

Inputs and weights that were written to are found by the versions that torch raises for autograd. It
raises none where only a schema tells of the writing (the noise of `rrelu`), where not even that
does (the statistics of a batch normalisation), and for what an operator wrote to before it failed.
"""

import functools
import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import increment_version

from gpu_manager.worker.program.argument_checks import short_name
from gpu_manager.worker.program.usage import Run
from torch_shim.wire.programs import ProgramStep

Operator = Callable[..., Any]

PROGRAM = "<program>"  # where tracebacks say that the code of programs is from
WRITING = "writing_lines"  # in the globals of such code: by line, the names of what it may write to

# What has a function write to an argument, unless it is left out, None or False.
_SWITCHES = frozenset({"inplace", "out", "max_norm", "training"})
_STATISTICS = frozenset({"running_mean", "running_var"})
_IN_PLACE = frozenset(
    """setitem iadd iand iconcat idiv ifloordiv ilshift imatmul imod imul ior ipow irshift isub
    itruediv ixor""".split()  # noqa: SIM905 - reads better
)
_functorch = torch._C._functorch  # noqa: SLF001 - torch has no public way to ask


class _Parameter(NamedTuple):
    """One of an operator's form: without a position it has to be named."""

    position: int | None
    name: str
    is_written: bool = False  # as the schema says

    def value(self, arguments: Sequence[Any], named: Mapping[str, Any]) -> Any:
        if self.position is not None and self.position < len(arguments):
            return arguments[self.position]
        return named.get(self.name)

    def is_given(self, arguments: Sequence[Any], named: Mapping[str, Any]) -> bool:
        value = self.value(arguments, named)
        return value is not None and value is not False


class _Form(NamedTuple):
    """One of the ways in which an operator can be called."""

    parameters: tuple[_Parameter, ...]

    @property
    def training(self) -> _Parameter | None:
        """What says whether the form writes to statistics or noise."""
        return next((each for each in self.parameters if each.name == "training"), None)

    @property
    def switches(self) -> list[_Parameter]:
        """Where one of these is given, the form may write."""
        names = _SWITCHES if self.training else _SWITCHES | _STATISTICS
        return [each for each in self.parameters if each.is_written or each.name in names]

    @property
    def silent(self) -> list[_Parameter]:
        """What the form writes to without raising the version; what is in place or out has one."""
        unsaid = _STATISTICS if self.training else frozenset[str]()
        written = (each for each in self.parameters if each.is_written or each.name in unsaid)
        return [each for each in written if each.position and each.name != "self"]


def may_write(step: ProgramStep) -> bool:
    short = short_name(step.operator)
    if "out" in step.named or short.strip("_") in _IN_PLACE:
        return True
    if step.operator[0] in "tma" and short.endswith("_") and not short.endswith("__"):
        return True
    return any(
        switch.is_given(step.arguments, step.named)
        for form in _forms(step.operator)
        for switch in form.switches
    )


def noting_writes(name: str, operator: Operator) -> Operator:
    """The operator, raising the versions of what it writes to where torch does not."""
    forms = [(form.silent, form.training) for form in _forms(name) if form.silent]
    if not forms:
        return operator

    @functools.wraps(operator, updated=())
    def call(*arguments: Any, **named: Any) -> Any:
        try:
            return operator(*arguments, **named)
        finally:
            for silent, training in forms:
                if training is None or training.is_given(arguments, named):
                    for parameter in silent:
                        _raise_versions(parameter.value(arguments, named))

    return call


def noting_failed_writes(run: Run) -> Run:
    """The program, raising the versions of what a step that failed may have written to before."""

    def call(inputs: Sequence[Any], constants: Sequence[Any]) -> tuple[Any, ...]:
        try:
            return run(inputs, constants)
        except BaseException as error:
            for frame, line in traceback.walk_tb(error.__traceback__):
                if frame.f_code.co_filename == PROGRAM:
                    for name in frame.f_globals[WRITING].get(line, ()):
                        _raise_versions(frame.f_locals.get(name))
            raise

    return call


@functools.lru_cache(1 << 13)
def _forms(name: str) -> tuple[_Form, ...]:
    """Those of an operator that programs may name: by its signature, or else by its schemas."""
    kind, _, path = name.partition(":")
    if kind not in "tma":
        return ()
    if kind == "t":
        try:
            parameters = inspect.signature(operator_at(path)).parameters
        except (TypeError, ValueError):  # it is written in C++
            pass
        else:
            return (_Form(tuple(_Parameter(place, each) for place, each in enumerate(parameters))),)
    qualified, _, overload = (
        path.partition(".") if kind == "a" else (f"aten::{short_name(name)}", "", "")
    )
    return tuple(_form_of(schema) for schema in _schemas(qualified, overload))


def operator_at(path: str) -> Any:
    """What torch has at `torch.nn.functional.relu`, None if nothing."""
    value: Any = torch
    for part in path.split(".")[1:]:
        value = getattr(value, part, None)
    return value


def _schemas(qualified: str, overload: str) -> Iterator[Any]:
    wanted = "" if overload == "default" else overload
    for schema in torch._C._jit_get_schemas_for_operator(qualified):  # noqa: SLF001 - torch has no public way to ask
        if not overload or schema.overload_name == wanted:
            yield schema


def _form_of(schema: Any) -> _Form:
    parameters = []
    for place, each in enumerate(schema.arguments):
        written = each.alias_info is not None and each.alias_info.is_write
        parameters.append(_Parameter(None if each.kwarg_only else place, each.name, written))
    return _Form(tuple(parameters))


def _raise_versions(value: Any) -> None:
    """Those of the tensors in it; vmap's have the memory of the tensor in them."""
    if isinstance(value, (list, tuple)):
        for each in value:
            _raise_versions(each)
    elif isinstance(value, torch.Tensor):
        while _functorch.is_functorch_wrapped_tensor(value):
            value = _functorch.get_unwrapped(value)
        increment_version(value)
