"""Runs an operator; where CUDA has a kernel and the CPU lacks it, runs the substitute."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from torch_shim.kernels import cuda_only, dtypes
from torch_shim.kernels.choice import Choice, Substitute
from torch_shim.kernels.dtypes import is_float32, widened

Operator = Callable[..., Any]


def has_substitute(name: str) -> bool:
    """Whether the CPU computes any dtype or form of this operator otherwise than CUDA."""
    stem = _stem(name)
    return is_float32(name) or stem in _BY_NAME or stem in dtypes.WIDENED


def with_substitute(operator: Operator, name: str) -> Operator:
    """Return the operator as CUDA computes it: with its substitute where the CPU lacks a kernel."""
    is_widened = is_float32(name)

    def call(*args: Any, **kwargs: Any) -> Any:
        if is_widened and torch.is_autocast_enabled("cpu"):  # CUDA's, of a GPU that is none
            args, kwargs = widened(args, kwargs)
        try:
            return operator(*args, **kwargs)
        except RuntimeError:
            substitute = find(name, args, kwargs)
            if substitute is None:
                raise
        return substitute(operator, args, kwargs)

    # Not the operator's own name: torch.fx writes a function of torch as that name.
    call.__name__ = call.__qualname__ = f"{_stem(name).strip('_')}_with_substitute"
    return call


def arguments_of_node(
    node: fx.Node, args: Any, kwargs: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments as CUDA's autocast, if that is on, gives them to a node's operator."""
    if torch.is_autocast_enabled("cpu") and is_float32(operator_of(node)[1]):
        return widened(tuple(args), kwargs)
    return args, kwargs


def of_node(node: fx.Node, args: Any, kwargs: Any) -> Callable[[], Any] | None:
    """Return what traces a node's operator where the CPU cannot even trace it."""
    operator, name = operator_of(node)
    substitute = None if operator is None else find(name, tuple(args), kwargs)
    if substitute is None:
        return None
    return functools.partial(substitute, operator, tuple(args), kwargs)


def operator_of(node: fx.Node) -> tuple[Any, str]:
    """Return the operator that a node calls, and its name; None for other nodes."""
    if node.op == "call_method":
        return getattr(torch.Tensor, str(node.target), None), str(node.target)
    if node.op == "call_function":
        return node.target, name_of(node.target)
    return None, ""


def find(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Substitute | None:
    stem = _stem(name)
    choose = _BY_NAME.get(stem)
    substitute = None if choose is None else choose(args, kwargs)
    return substitute or dtypes.wide_substitute(stem, args, kwargs)


def name_of(operator: object) -> str:
    """Return the name of an operator, that of its packet for an overload."""
    if isinstance(operator, torch._ops.OpOverload):  # noqa: SLF001 - the type's only location
        operator = operator.overloadpacket
    name: str = getattr(operator, "__name__", "")
    return name


def _stem(name: str) -> str:
    """Return the name without the prefix of its namespace and the underscore of `in place`."""
    for prefix in ("fft_", "special_", "sparse_"):
        name = name.removeprefix(prefix)
    return name if name.endswith("__") else name.rstrip("_")


_BY_NAME: dict[str, Choice] = {**dtypes.REDUCTIONS, **cuda_only.SUBSTITUTES}
