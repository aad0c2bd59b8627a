"""Parameters and modules: a parameter's class changes in place when its data moves."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import parameter

from torch_shim.foreign_tensors.handle_types import cpu_class
from torch_shim.foreign_tensors.wrappers import brings_operators
from torch_shim.patching import replace, set_attribute
from torch_shim.redirected_device import names_cuda, tracing_fakes
from torch_shim.tensors import write_epochs
from torch_shim.tensors.handles import (
    CudaParameter,
    CudaTensor,
    NoTorchFunction,
    Parameter,
    Tensor,
    become_cpu,
    become_cuda,
    cuda_class,
)

alias_of = Tensor._make_subclass  # noqa: SLF001 - its only location; of a class, it is no view
_native_data = Tensor.__dict__.get("data") or torch._C.TensorBase.__dict__["data"]  # noqa: SLF001 - its only location


def install() -> None:
    """Make `.data =` and Parameter follow the device; disable flat RNN weights, unused here."""
    set_attribute(Tensor, "data", property(_native_data.__get__, _set_data))
    replace(torch._C._autograd, "_get_data_attr", _data_function)  # noqa: SLF001 - traced `.data`
    replace(Parameter, "__new__", _new_parameter)
    set_attribute(Tensor, "_make_subclass", staticmethod(_make_subclass))
    lazy = parameter.UninitializedTensorMixin  # type: ignore[attr-defined] # missing in the stubs
    replace(lazy, "materialize", _materialize)
    for kind in (torch.nn.UninitializedParameter, torch.nn.UninitializedBuffer):
        replace(kind, "__new__", _new_uninitialized)
    replace(torch.nn.RNNBase, "flatten_parameters", _nothing)
    replace(torch.utils, "swap_tensors", _swap)


def _set_data(self: Tensor, value: Tensor) -> None:
    with NoTorchFunction():
        _native_data.__set__(self, value)
    if tracing_fakes():
        return
    if isinstance(value, CudaTensor):
        become_cuda(self)
    else:
        become_cpu(self)
    write_epochs.note_write(self)


def _data_function(native: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def get_data(tensor: Tensor) -> Tensor:
        data = native(tensor)
        return become_cuda(data) if isinstance(tensor, CudaTensor) else data

    return get_data


def _new_parameter(native: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def new(cls: type, data: Any = None, requires_grad: bool = True) -> Tensor:  # noqa: FBT001, FBT002 - PyTorch's signature
        if not isinstance(data, CudaTensor) and cls is not CudaParameter:
            return native(cls, data, requires_grad)
        if brings_operators(cls) or type(data) not in _ORDINARY:
            return native(cls, data, requires_grad)
        with NoTorchFunction():
            return alias_of(cuda_class(cpu_class(cls)), data, requires_grad)

    return new


def _make_subclass(cls: type, data: Tensor, requires_grad: bool = False, **kwargs: Any) -> Any:  # noqa: FBT001, FBT002 - Dynamo compares the signature with its own
    """Make a parameter class of the user's, say, of a tensor, which keeps its device."""
    made: Any = alias_of(cls, data, requires_grad, **kwargs)
    on_gpu = isinstance(data, CudaTensor) and not (tracing_fakes() or brings_operators(cls))
    return become_cuda(made) if on_gpu else made


def _materialize(native: Callable[..., None]) -> Callable[..., None]:
    def materialize(self: Any, shape: Any, device: Any = None, dtype: Any = None) -> None:
        on_gpu = isinstance(self, CudaTensor) if device is None else names_cuda(device)
        native(self, shape, device, dtype)
        if on_gpu:  # the native function has set the plain class, whatever the device
            become_cuda(self)

    return materialize


def _new_uninitialized(native: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def new(cls: type, *args: Any, **kwargs: Any) -> Tensor:
        made = native(cls, *args, **kwargs)
        return become_cuda(made) if names_cuda(kwargs.get("device")) else made

    return new


_ORDINARY = frozenset({Tensor, Parameter, CudaTensor, CudaParameter})


def _nothing(native: Callable[..., None]) -> Callable[..., None]:
    del native  # it arranges memory for cuDNN

    def flatten_parameters(self: torch.nn.RNNBase) -> None:
        """Do nothing: the worker arranges its own copy."""

    return flatten_parameters


def _swap(native: Callable[[Tensor, Tensor], None]) -> Callable[[Tensor, Tensor], None]:
    def swap_tensors(t1: Tensor, t2: Tensor) -> None:
        """Swap two tensors, including parameters that a graph's guards reference weakly."""
        referred = weakref.getweakrefs(t1) or weakref.getweakrefs(t2)
        if not referred or not isinstance(t1, CudaTensor) | isinstance(t2, CudaTensor):
            native(t1, t2)
            return
        if not (t1.is_leaf and t2.is_leaf):
            raise RuntimeError("cannot swap handles that have a history while graphs refer to them")
        first, second = (_contents(t1), _contents(t2))
        _fill(t1, second)
        _fill(t2, first)

    return swap_tensors


def _contents(tensor: Tensor) -> tuple[Any, ...]:
    with torch.no_grad():
        data = tensor.detach()
    return type(tensor), data, tensor.requires_grad, tensor.grad, dict(vars(tensor))


def _fill(tensor: Tensor, contents: tuple[Any, ...]) -> None:
    kind, data, wants_gradient, gradient, attributes = contents
    tensor.grad = None
    tensor.requires_grad_(False)
    tensor.data = data
    object.__setattr__(tensor, "__class__", kind)
    tensor.requires_grad_(wants_gradient)
    tensor.grad = gradient
    vars(tensor).clear()
    vars(tensor).update(attributes)
