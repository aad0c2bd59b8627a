"""torch.autocast('cuda'): enabled for the CPU too, where the function's own arithmetic runs."""

from collections.abc import Callable
from typing import Any

import torch

from torch_shim.kernels.dtypes import is_float32, widened
from torch_shim.patching import replace, tracing_fakes
from torch_shim.tensors.dispatch import Handler, Operator, special
from torch_shim.tensors.handles import CudaTensor, run

_SAVED = "_gpufaas_saved"


def install() -> None:
    replace(torch.autocast, "__enter__", _enter)
    replace(torch.autocast, "__exit__", _exit)
    special.classifiers.append(_classify)


def _enter(native: Callable[..., Any]) -> Callable[..., Any]:
    def enter(self: Any) -> Any:
        result = native(self)
        if self.device == "cuda" and not _elsewhere():
            # A stack: one instance used as a decorator may be entered again by a recursion.
            saved = self.__dict__.setdefault(_SAVED, [])
            saved.append((torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
            torch.set_autocast_enabled("cpu", torch.is_autocast_enabled("cuda"))
            torch.set_autocast_dtype("cpu", torch.get_autocast_dtype("cuda"))
        return result

    return enter


def _exit(native: Callable[..., Any]) -> Callable[..., Any]:
    def leave(self: Any, *reason: Any) -> Any:
        saved = self.__dict__.get(_SAVED)
        if saved:
            enabled, dtype = saved.pop()
            torch.set_autocast_enabled("cpu", enabled)
            torch.set_autocast_dtype("cpu", dtype)
        return native(self, *reason)

    return leave


def in_float32(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run in float32 an operator that only CUDA's autocast, not the CPU's, runs in float32."""
    if torch.is_autocast_enabled("cuda"):
        args, kwargs = widened(args, kwargs, CudaTensor)
    return run(func, args, kwargs)


def _classify(operator: Operator) -> Handler | None:
    return in_float32 if is_float32(getattr(operator, "__name__", "")) else None


def _elsewhere() -> bool:
    return torch.compiler.is_dynamo_compiling() or tracing_fakes()
