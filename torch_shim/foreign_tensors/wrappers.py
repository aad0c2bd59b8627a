"""Classes that hold tensors and bring their own operators (`__torch_dispatch__`).

Where such a tensor holds handles, its operators run with handles in force, so that what they make
are handles too. A class that says what it holds (`__tensor_flatten__`) is moved by moving that.
"""

import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torch_shim.errors import UnsupportedCall
from torch_shim.patching import set_attribute
from torch_shim.redirected_device import CPU, CUDA, names_cuda, tracing_fakes

_ADAPTED = "_gpufaas_adapted"
_ON_GPU = "_gpufaas_on_gpu"


class Running(threading.local):
    """How many operators of such classes this thread is in; C++ made plain tensors for them."""

    depth = 0


running = Running()


def install() -> None:
    """Watch for classes whose tensors are made on the GPU."""
    name = "_make_wrapper_subclass"
    native = getattr(torch.Tensor, name)
    replacement = functools.update_wrapper(_make(native), native)
    set_attribute(torch.Tensor, name, staticmethod(replacement))
    distributed: Any = getattr(torch.Tensor, "_dtensor__new__", None)  # how a DTensor is made
    if distributed is not None:
        made = functools.update_wrapper(_refuse_handles(distributed), distributed)
        set_attribute(torch.Tensor, "_dtensor__new__", staticmethod(made))


def brings_operators(kind: type) -> bool:
    """Whether a tensor class brings its own operators."""
    return kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__  # type: ignore[attr-defined] # a tensor class


def moved(tensor: Any, device: Any, options: dict[str, Any]) -> torch.Tensor:
    """Return a wrapper over what the tensor holds, moved to the device."""
    kind = type(tensor)
    if tensor.is_nested or not is_traceable_wrapper_subclass(tensor):
        raise UnsupportedCall(
            f"moving a {kind.__qualname__} to the GPU",
            "it brings its own operators; convert it to a plain torch.Tensor first",
        )
    adapt(kind)
    held, context = tensor.__tensor_flatten__()
    options = {name: value for name, value in options.items() if name != "dtype"}
    parts = {name: getattr(tensor, name).to(device, **options) for name in held}
    made: torch.Tensor = kind.__tensor_unflatten__(parts, context, tensor.size(), tensor.stride())
    return made


def adapt(kind: Any) -> None:
    """Run the operators of a class with handles in force, and let its tensors say their device."""
    if _ADAPTED in kind.__dict__:
        return
    set_attribute(kind, _ADAPTED, True)
    native = getattr(kind.__torch_dispatch__, "__func__", None)  # that of a base class, too
    if native is not None:
        set_attribute(kind, "__torch_dispatch__", classmethod(_with_handles(native)))
    for name, answer in {"device": CUDA, "is_cuda": True, "is_cpu": False}.items():
        if inspect.getattr_static(kind, name) is inspect.getattr_static(torch.Tensor, name):
            set_attribute(kind, name, property(_answering(name, answer)))


def _with_handles(native: Callable[..., Any]) -> Callable[..., Any]:
    def dispatch(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if tracing_fakes():
            return native(cls, func, types, args, kwargs)
        with torch._C._EnableTorchFunction():  # noqa: SLF001 - no public way
            running.depth += 1
            try:
                return native(cls, func, types, args, kwargs)
            finally:
                running.depth -= 1

    return dispatch


def _answering(name: str, answer: Any) -> Callable[[Any], Any]:
    native: Any = inspect.getattr_static(torch.Tensor, name)

    def read(self: Any) -> Any:
        return answer if self.__dict__.get(_ON_GPU) else native.__get__(self)

    return read


def _make(native: Callable[..., Any]) -> Callable[..., Any]:
    def make_wrapper_subclass(cls: Any, *args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is None or tracing_fakes() or not names_cuda(device):
            return native(cls, *args, **kwargs)
        adapt(cls)
        # C++ asks the driver about a tensor on CUDA, and ends the process if there is none.
        made = native(cls, *args, **{**kwargs, "device": CPU})
        made.__dict__[_ON_GPU] = True
        return made

    return make_wrapper_subclass


def _refuse_handles(native: Callable[..., Any]) -> Callable[..., Any]:
    def make_distributed(cls: Any, local_tensor: Any, *args: Any, **kwargs: Any) -> Any:
        # Its operators run in C++, which would lose the device.
        if local_tensor.is_cuda and not tracing_fakes():
            raise UnsupportedCall(
                "a DTensor of a CUDA tensor", "there is one GPU: use plain tensors"
            )
        return native(cls, local_tensor, *args, **kwargs)

    return make_distributed
