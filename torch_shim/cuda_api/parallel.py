"""torch.nn.DataParallel on the single GPU, and tensor exchange with other libraries by dlpack."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.parallel import _functions, comm

from torch_shim.cuda_api import streams_and_events
from torch_shim.errors import UnsupportedCall
from torch_shim.patching import replace
from torch_shim.redirected_device import CUDA
from torch_shim.tensors.handles import CudaTensor, Tensor

_REMEDY = "there is one GPU: leave it out"


def install() -> None:
    """Replace the functions that move data between GPUs, and those that export tensors."""
    replace(_functions, "_get_stream", _stream)
    replace(comm, "scatter", _scatter)
    for name in ("broadcast", "broadcast_coalesced", "reduce_add", "gather"):
        replace(comm, name, _refuse)
    for owner in (torch, torch.utils.dlpack):
        replace(owner, "from_dlpack", _from_dlpack)
        replace(owner, "to_dlpack", _to_dlpack)


def _stream(native: Callable[..., Any]) -> Callable[..., Any]:
    del native  # it calls the driver

    def get_stream(device: torch.device) -> streams_and_events.Stream | None:
        return None if device.type == "cpu" else streams_and_events.default_stream()

    return get_stream


def _scatter(native: Callable[..., Any]) -> Callable[..., Any]:
    del native  # it copies with CUDA

    def scatter(tensor: Tensor, devices: Sequence[Any] | None = None, *_: Any, **__: Any) -> Any:
        if devices is None or len(devices) != 1:
            raise UnsupportedCall("torch.nn.parallel.comm.scatter to several GPUs", _REMEDY)
        return (tensor.to(CUDA),)

    return scatter


def _refuse(native: Callable[..., Any]) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise UnsupportedCall(f"torch.nn.parallel.comm.{native.__name__}", _REMEDY)

    return refuse


def _from_dlpack(native: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def from_dlpack(source: Any, *args: Any, **kwargs: Any) -> Tensor:
        if isinstance(source, CudaTensor):
            return source.detach()
        return native(source, *args, **kwargs)

    return from_dlpack


def _to_dlpack(native: Callable[..., Any]) -> Callable[..., Any]:
    def to_dlpack(tensor: Tensor) -> Any:
        if isinstance(tensor, CudaTensor):
            raise UnsupportedCall("to_dlpack of a CUDA tensor", "export tensor.cpu() instead")
        return native(tensor)

    return to_dlpack
