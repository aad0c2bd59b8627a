"""Activation checkpointing: the backward pass repeats a region exactly as the forward pass ran it.

Torch compares what both passes save. A graph saves other tensors than the same operators on
handles, and which of the two runs changes with every trace and with the first backward pass.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import checkpoint as checkpoints

from torch_shim.capture.root_modules import Roots
from torch_shim.patching import replace
from torch_shim.redirected_device import CPU
from torch_shim.tensors.handles import CudaTensor


def install(roots: Roots) -> None:
    """Run what records gradients in checkpointed regions without graphs."""

    def make(native: Callable[..., Any]) -> Callable[..., Any]:
        def checkpoint(function: Any = None, *args: Any, **kwargs: Any) -> Any:
            if function is not None and torch.is_grad_enabled():
                function = _without_graphs(function, roots)
            return native(function, *args, **kwargs)

        return checkpoint

    # From torch 2.15 on all ways of calling the second meet in the first.
    name = "_checkpoint_impl" if hasattr(checkpoints, "_checkpoint_impl") else "checkpoint"
    replace(checkpoints, name, make)
    checks: dict[str, Any] = checkpoints._allowed_determinism_checks_to_fns  # noqa: SLF001 - its only location
    checks["default"] = _without_class(checks["default"])


def _without_graphs(function: Callable[..., Any], roots: Roots) -> Callable[..., Any]:
    @functools.wraps(function, updated=())
    def run(*args: Any, **kwargs: Any) -> Any:
        with roots.repeated():
            return function(*args, **kwargs)

    return run


def _without_class(native: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Describe a tensor without telling handles apart: of C++ come plain ones, in either pass."""

    def extract(tensor: torch.Tensor) -> dict[str, Any]:
        found = native(tensor)
        return found | {"device": CPU} if isinstance(tensor, CudaTensor) else found

    return extract
