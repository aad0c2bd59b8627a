"""Passes handles to other processes by torch.multiprocessing; memory is shared, as with CUDA."""

from multiprocessing.reduction import DupFd, ForkingPickler
from typing import Any

import torch
from torch.multiprocessing import reductions

from torch_shim.tensors import write_epochs
from torch_shim.tensors.absent_bytes import bring
from torch_shim.tensors.handles import (
    CudaParameter,
    CudaTensor,
    NoTorchFunction,
    Parameter,
    Tensor,
    become_cuda,
)

_rebuild_storage: Any = reductions.rebuild_storage_fd


def install() -> None:
    """Register the two handle classes with the pickler of multiprocessing."""
    for kind in (CudaTensor, CudaParameter):
        ForkingPickler.register(kind, _reduce)


def _reduce(tensor: CudaTensor) -> Any:
    if tensor.requires_grad and not tensor.is_leaf:
        raise RuntimeError(
            "Cowardly refusing to serialize non-leaf tensor which requires_grad, since autograd "
            "does not support crossing process boundaries."
        )
    bring((tensor,))
    # From now on the other process may write, which this process cannot detect.
    write_epochs.marked(tensor).untracked = True
    storage = write_epochs.storage_of(tensor)
    descriptor, size = storage._share_fd_cpu_()
    layout = (tensor.dtype, tensor.storage_offset(), tuple(tensor.size()), tensor.stride())
    flags = (isinstance(tensor, CudaParameter), tensor.requires_grad)
    return _rebuild, (DupFd(descriptor), size, *layout, *flags)


def _rebuild(
    descriptor: Any,
    size: int,
    dtype: torch.dtype,
    *rest: Any,
) -> Tensor:
    offset, shape, strides, is_parameter, requires_grad = rest
    storage = _rebuild_storage(torch.UntypedStorage, descriptor, size)
    with NoTorchFunction():
        tensor = torch.empty(0, dtype=dtype).set_(storage, offset, shape, strides)
    become_cuda(tensor)
    write_epochs.marked(tensor).untracked = True
    if is_parameter:
        return Parameter(tensor, requires_grad)
    return tensor.requires_grad_(requires_grad)
