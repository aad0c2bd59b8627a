"""Handles in files, pickles and other processes: `cuda:0` as in PyTorch, and no shim classes."""

import copy
from collections.abc import Callable
from multiprocessing.reduction import DupFd, ForkingPickler
from typing import Any

import torch
from torch.multiprocessing import reductions

from torch_shim.patching import CPU, CUDA, names_cuda, redirect, set_attribute
from torch_shim.tensors import write_epochs
from torch_shim.tensors.absent_bytes import bring
from torch_shim.tensors.foreign_classes import cpu_class
from torch_shim.tensors.handles import (
    CudaParameter,
    CudaTensor,
    NoTorchFunction,
    Parameter,
    Tensor,
    become_cuda,
)

_Storage = torch.UntypedStorage
# Runs before PyTorch's own functions (10 for the CPU, 20 for CUDA).
_PRIORITY = 5


def install() -> None:
    """Make storages report their device, and handles pickle as PyTorch's tensors do."""
    native_device = _Storage.device
    set_attribute(_Storage, "device", property(lambda self: _device(self, native_device)))
    redirect(_Storage, "__new__", _new_storage)
    for name in ("copy_", "fill_", "resize_", "__setitem__"):
        redirect(_Storage, name, _write)
    torch.serialization.register_package(_PRIORITY, _tag, _restore)  # type: ignore[arg-type] # it passes storages
    redirect(Tensor, "set_", _set)
    set_attribute(CudaTensor, "__reduce_ex__", _reduce_ex)
    set_attribute(CudaTensor, "__deepcopy__", _deepcopy)
    set_attribute(CudaTensor, "_typed_storage", _typed_storage)
    for kind in (CudaTensor, CudaParameter):
        ForkingPickler.register(kind, _reduce)


def _device(storage: torch.UntypedStorage, native: Any) -> torch.device:
    if write_epochs.storage_mark(storage) is not None:
        return CUDA
    return native.__get__(storage)  # type: ignore[no-any-return] # a descriptor of C


def _new_storage(native: Callable[..., Any], cls: type, *args: Any, **kwargs: Any) -> Any:
    if not names_cuda(kwargs.get("device")):
        return native(cls, *args, **kwargs)
    made = native(cls, *args, **{**kwargs, "device": CPU})
    write_epochs.mark_storage(made)
    return made


def _write(
    native: Callable[..., Any], self: torch.UntypedStorage, *args: Any, **kwargs: Any
) -> Any:
    try:
        return native(self, *args, **kwargs)
    finally:
        write_epochs.note_storage_write(self)


def _tag(storage: Any) -> None:
    """Return None: PyTorch's own taggers read the device, which marked storages report."""


def _restore(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage | None:
    """Mark a storage whose location is the GPU; return None for any other location."""
    if not location.startswith("cuda") or not names_cuda(location):
        return None
    write_epochs.mark_storage(storage)
    return storage


def _set(
    native: Callable[..., Tensor], self: Tensor, source: Any = None, *args: Any, **kwargs: Any
) -> Tensor:
    if source is None:
        return native(self, *args, **kwargs)
    if isinstance(source, Tensor | _Storage) and self.is_cpu and source.is_cuda:
        raise RuntimeError(
            f'Attempted to set the storage of a tensor on device "{self.device}" to a storage '
            f'on different device "{source.device}".'
        )
    return native(self, source, *args, **kwargs)


def _typed_storage(self: CudaTensor) -> Any:
    typed: Any = torch.storage.TypedStorage
    return typed(wrap_storage=self.untyped_storage(), dtype=self.dtype, _internal=True)


def _reduce_ex(self: Any, protocol: Any) -> Any:
    bring((self,))
    utilities: Any = torch._utils  # noqa: SLF001 - as torch.Tensor does
    state = utilities._get_obj_state(self)  # noqa: SLF001 - see above
    if isinstance(self, CudaParameter):
        return _reduce_parameter(self, protocol)
    func, args = self._reduce_ex_internal(protocol)
    kind = cpu_class(type(self))
    if not state and kind is Tensor:
        return func, args
    return torch._tensor._rebuild_from_type_v2, (func, kind, args, state)  # noqa: SLF001 - as torch.Tensor does


_reduce_parameter: Any = torch.nn.Parameter.__reduce_ex__


def _deepcopy(self: CudaTensor, memo: dict[int, Any]) -> Any:
    """Copy as torch.Tensor does: tensors that share storage share it in the copy too."""
    if id(self) in memo:
        return memo[id(self)]
    if not self.is_leaf:
        raise RuntimeError(
            "Only Tensors created explicitly by the user (graph leaves) support the deepcopy "
            "protocol at the moment."
        )
    made = _copied(self, memo)
    memo[id(self)] = made
    if self.grad is not None:
        made.grad = copy.deepcopy(self.grad, memo)
    made.__dict__.update(copy.deepcopy(self.__dict__, memo))
    return made


def _copied(self: CudaTensor, memo: dict[int, Any]) -> Tensor:
    bring((self,))
    if self.layout is not torch.strided or isinstance(self, CudaParameter):
        with NoTorchFunction():
            made = self.detach().clone(memory_format=torch.preserve_format)
    else:
        storage = copy.deepcopy(self.untyped_storage(), memo)
        with NoTorchFunction():
            made = become_cuda(torch.empty(0, dtype=self.dtype))
            made.set_(storage, self.storage_offset(), self.size(), self.stride())
            made = made.conj() if self.is_conj() else made
            made = torch._neg_view(made) if self.is_neg() else made  # noqa: SLF001 - no public way
    if isinstance(self, CudaParameter):
        return type(self)(made, self.requires_grad)
    made.requires_grad_(self.requires_grad)
    object.__setattr__(made, "__class__", type(self))  # a program's own class, perhaps
    return made


# Passes handles to other processes by torch.multiprocessing; memory is shared, as with CUDA.

_rebuild_storage: Any = reductions.rebuild_storage_fd


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


def _rebuild(descriptor: Any, size: int, dtype: torch.dtype, *rest: Any) -> Tensor:
    offset, shape, strides, is_parameter, requires_grad = rest
    storage = _rebuild_storage(torch.UntypedStorage, descriptor, size)
    with NoTorchFunction():
        tensor = torch.empty(0, dtype=dtype).set_(storage, offset, shape, strides)
    become_cuda(tensor)
    write_epochs.marked(tensor).untracked = True
    if is_parameter:
        return Parameter(tensor, requires_grad)
    return tensor.requires_grad_(requires_grad)
