"""NumPy in programs: PyTorch's own functions of these names, which compute with tensors.

Dynamo puts them into graphs in the place of NumPy's. Here are those that compute number by number,
conversions of one number, and a few sums: each is made of operators that were reviewed.
"""

import functools
import inspect
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._numpy as numpy
from torch._numpy import _ufuncs
from torch._numpy._ndarray import ndarray

from gpu_manager.worker.program.reviewed_operators import is_reviewed

_CONVERSIONS = (
    *("bool_", "float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8"),
    *("complex64", "complex128"),
)
# Functions number by number that have another name in PyTorch; the others are reviewed by name.
_OTHERWISE_NAMED = ("degrees", "fabs", "mod", "power", "radians", "rint")
_FUNCTIONS = (
    *("abs", "all", "amax", "amin", "any", "arange", "array", "asarray", "clip", "concatenate"),
    *("cumsum", "full", "linspace", "max", "mean", "min", "ones", "prod", "reshape", "round"),
    *("stack", "std", "sum", "transpose", "var", "where", "zeros"),
)
_OPERATORS = (
    *("add", "and_", "eq", "floordiv", "ge", "gt", "invert", "le", "lt", "matmul", "mod", "mul"),
    *("ne", "neg", "or_", "pos", "pow", "sub", "truediv", "xor"),
)


def table() -> Iterator[tuple[str, Callable[..., Any]]]:
    """The functions by their names in programs."""
    listed = (*_ufuncs._unary, *_ufuncs._binary)  # noqa: SLF001 - torch's own lists
    ufuncs = (name for name in listed if hasattr(numpy, name) and is_reviewed(name))
    for name in (*ufuncs, *_OTHERWISE_NAMED, *_CONVERSIONS, *_FUNCTIONS):
        found = getattr(numpy, name)
        yield f"n:{name}", functools.partial(_run, found, _place_of_out(found))
    for name in _OPERATORS:
        yield f"n:operator.{name}", functools.partial(_operate, getattr(operator, name))


def _run(function: Callable[..., Any], place: int, *arguments: Any, **named: Any) -> Any:
    """`place` is where the function takes an output that is given."""
    if "out" in named or (place < len(arguments) and arguments[place] is not None):
        raise ValueError("an output that is given")
    return _as_tensor(function(*arguments, **named))


def _place_of_out(function: Callable[..., Any]) -> int:
    parameters = [*inspect.signature(function).parameters]
    return parameters.index("out") if "out" in parameters else len(parameters)


def _operate(function: Callable[..., Any], *arguments: Any) -> Any:
    return _as_tensor(function(*map(_as_array, arguments)))


def _as_array(value: Any) -> Any:
    return ndarray(value) if isinstance(value, torch.Tensor) else value


def _as_tensor(value: Any) -> Any:
    if isinstance(value, ndarray):
        return value.tensor
    if isinstance(value, (tuple, list)):
        return type(value)(map(_as_tensor, value))
    return value
