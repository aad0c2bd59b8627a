"""torch.autocast('cuda'): on for the CPU too, where the function's own arithmetic runs."""

from collections.abc import Callable
from typing import Any

import torch

from torch_shim.devices import tracing_fakes
from torch_shim.patching import replace

_SAVED = "_gpufaas_saved"


def install() -> None:
    """Has entering and leaving autocast('cuda') switch the CPU's autocast with it."""
    replace(torch.autocast, "__enter__", _enter)
    replace(torch.autocast, "__exit__", _exit)


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


def _elsewhere() -> bool:
    return torch.compiler.is_dynamo_compiling() or tracing_fakes()
