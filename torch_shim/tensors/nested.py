"""Nested tensors: the strided layout works on handles, the jagged one is refused."""

from collections.abc import Callable
from typing import Any

import torch

from torch_shim.errors import UnsupportedCall
from torch_shim.patching import replace
from torch_shim.redirected_device import CPU, names_cuda
from torch_shim.tensors.handles import CudaTensor, NoTorchFunction, become_cuda

_REMEDY = "use the layout torch.strided, or a padded tensor and its mask"


def install() -> None:
    """Replace the functions that make nested tensors."""
    for name in ("nested_tensor", "as_nested_tensor"):
        replace(torch.nested, name, _maker)
    for name in ("nested_tensor_from_jagged", "narrow"):
        replace(torch.nested, name, _jagged)


def _maker(native: Callable[..., Any]) -> Callable[..., Any]:
    def make(ts: Any, *args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        given = ts if isinstance(ts, list | tuple) else [ts]
        held = any(isinstance(value, CudaTensor) for value in given)
        if not (held if device is None else names_cuda(device)):
            return native(ts, *args, **kwargs)
        if kwargs.get("layout") is torch.jagged:
            raise _refused()
        with NoTorchFunction():
            made = native(ts, *args, **{**kwargs, "device": CPU})
        return become_cuda(made)

    return make


def _jagged(native: Callable[..., Any]) -> Callable[..., Any]:
    def make(values: Any, *args: Any, **kwargs: Any) -> Any:
        strided = native.__name__ == "narrow" and kwargs.get("layout") is not torch.jagged
        if isinstance(values, CudaTensor) and not strided:
            raise _refused()
        return native(values, *args, **kwargs)

    return make


def _refused() -> UnsupportedCall:
    return UnsupportedCall("a nested tensor of the layout torch.jagged on the GPU", _REMEDY)
