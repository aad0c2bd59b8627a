"""Leaves an operator to another library's tensor class, as torch would beside a CUDA tensor.

A CUDA tensor of torch's is no subclass, so a class with `__torch_function__` decides alone. It is
given the types without the handles' own, which it does not know.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from torch_shim.foreign_tensors.wrappers import brings_operators
from torch_shim.missing_kernels.choice import is_in_place

_DISABLED = torch._C._disabled_torch_function_impl  # noqa: SLF001 - torch's word for "none"
_set_eval_frame = torch._C._dynamo.eval_frame.set_eval_frame  # noqa: SLF001 - needs no Dynamo
_Decide = Callable[..., Any]
_WRITING_OPTIONS = frozenset({"out", "inplace", "max_norm"})
_WRITES_HIDDEN = frozenset({"__setitem__", "__set__", "batch_norm", "instance_norm"})


def deciding(types: Iterable[type], handle: type) -> list[type]:
    """Return the classes that decide about an operator themselves."""
    return [kind for kind in types if not issubclass(kind, handle) and decides(kind)]


def decides(kind: type) -> bool:
    """Whether a tensor class has a `__torch_function__` of its own."""
    found: Any = getattr(kind, "__torch_function__", None)
    own = getattr(found, "__func__", found)
    of_torch: Any = torch.Tensor.__torch_function__
    return own is not None and own not in {
        of_torch.__func__,
        _DISABLED,
    }


def takes_part(kind: type) -> bool:
    """Whether torch asks a class about operators: parameters and their like stand aside."""
    return getattr(kind, "__torch_function__", _DISABLED) is not _DISABLED


def is_asked(kind: type) -> bool:
    """Whether a class decides when its own tensors are on the GPU.

    Torch's classes know methods by what these were before the shim replaced them.
    """
    of_torch = kind.__module__.partition(".")[0] == "torch"
    return not of_torch and decides(kind) and not brings_operators(kind)


def delegate(
    kinds: Sequence[type],
    types: Sequence[type],
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Return what the first class that wants to makes of the operator; else NotImplemented."""
    # Dynamo must not trace this between two graphs: its guards do not tell operators apart.
    traces = _set_eval_frame(None)
    try:
        for kind in kinds:
            decide: _Decide = getattr(kind, "__torch_function__")  # noqa: B009 - no tensor to mypy
            result = decide(func, tuple(types), args, kwargs)
            if result is not NotImplemented:
                return result
        return NotImplemented
    finally:
        _set_eval_frame(traces)


def may_write(func: Any, kwargs: dict[str, Any]) -> bool:
    """Whether the class may have written to a handle below the operators that count writes."""
    name = getattr(func, "__name__", "")
    return is_in_place(func) or not _WRITING_OPTIONS.isdisjoint(kwargs) or name in _WRITES_HIDDEN
