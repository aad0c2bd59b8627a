"""Tensor classes of programs and libraries: their handle classes, wrappers, own operators."""

import copy
import copyreg
import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Sequence
from types import new_class
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torch_shim.errors import UnsupportedCall
from torch_shim.kernels.dtypes import is_in_place
from torch_shim.patching import (
    CPU,
    CUDA,
    assigned,
    names_cuda,
    redirect,
    set_attribute,
    tracing_fakes,
)

# Where a handle class and its program's class name each other.
_PROGRAMS_CLASS, _HANDLE_CLASS = "_gpufaas_programs_class", "_gpufaas_handle_class"


def cpu_class(kind: type) -> type:
    """Return the CPU tensor class of a handle class; another class is returned as it is."""
    programs: type = kind.__dict__.get(_PROGRAMS_CLASS, kind)  # no matter what it is derived from
    return programs


def set_cpu_class(handle_class: type, kind: type) -> None:
    """Let a handle class of the shim's own stand for a class of torch's."""
    setattr(handle_class, _PROGRAMS_CLASS, kind)


def known_handle_class(kind: type) -> type | None:
    kept = kind.__dict__.get(_HANDLE_CLASS)
    return None if kept is None else kept.handle_class


def make_handle_class(base: type, kind: type, own: dict[str, Any]) -> type:
    """Make the handle class of a program's class, with a namespace of its own."""
    own = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, **own}
    parts = kind.__name__, (base, kind), {**own, _PROGRAMS_CLASS: kind}
    # The steps of PyTorch's metaclass; the program's may have others, for the program's classes.
    made: Any = type.__new__(_metaclass(type(kind)), *parts)
    type(torch.Tensor).__init__(made, *parts)
    # If several threads do this at once, each may use a class of its own: they are equal.
    type.__setattr__(kind, _HANDLE_CLASS, _Kept(made))
    return made  # type: ignore[no-any-return] # mypy knows no class that is made so


class _Kept:
    """Keeps a handle class in its program's class, with which it is collected."""

    def __init__(self, handle_class: type) -> None:
        self.handle_class = handle_class

    def __reduce__(self) -> Any:
        return type(None), ()  # the copy of a class that is pickled by value has none yet


class _HandleType(type(torch.nn.Parameter)):  # type: ignore[misc] # PyTorch has a metaclass for it
    """Makes a handle class equal to its program's class, as in tables by class."""

    def __new__(
        cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **options: Any
    ) -> Any:
        """Derive from the program's class, which `class Derived(type(tensor))` means."""
        programs = tuple(map(cpu_class, bases))
        return new_class(name, programs, options, lambda made: made.update(namespace))

    def __setattr__(cls, name: str, value: Any) -> None:
        setattr(cpu_class(cls), name, value)

    def __eq__(cls, other: object) -> bool:
        return isinstance(other, type) and cpu_class(cls) is cpu_class(other)

    def __hash__(cls) -> int:
        return hash(cpu_class(cls))

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cpu_class(cls))

    def __subclasscheck__(cls, other: type) -> bool:
        # C++ asks a class before those that it is derived from. No class of CPU tensors may be
        # asked before one of handles: its results would be CPU tensors. A program's metaclass may
        # ask all subclasses in turn, and would come back here without end.
        return type.__subclasscheck__(cpu_class(cls), other) and hasattr(other, _PROGRAMS_CLASS)


@functools.cache
def _metaclass(programs: type) -> Any:
    made: Any = _HandleType
    if not issubclass(_HandleType, programs):
        made = type("_HandleType", (_HandleType, programs), {})
    # Pickled as the program's class, which `copy.copy` returns as it is.
    copyreg.pickle(made, lambda kind: (copy.copy, (cpu_class(kind),)))
    return made


# Classes that hold tensors and bring their own operators (`__torch_dispatch__`).
#
# Where such a tensor holds handles, its operators run with handles in force, so that what they
# make are handles too. A class that says what it holds (`__tensor_flatten__`) is moved by moving
# that.

_ADAPTED = "_gpufaas_adapted"
_ON_GPU = "_gpufaas_on_gpu"


class Running(threading.local):
    """Whether this thread is in an operator of such a class; C++ made plain tensors for it."""

    inside = False


running = Running()


def install() -> None:
    """Watch for classes whose tensors are made on the GPU."""
    _redirect_static("_make_wrapper_subclass", _make)
    _redirect_static("_dtensor__new__", _refuse_handles)  # how a DTensor is made


def _redirect_static(name: str, function: Callable[..., Any]) -> None:
    redirect(torch.Tensor, name, function)
    if hasattr(torch.Tensor, name):
        set_attribute(torch.Tensor, name, staticmethod(getattr(torch.Tensor, name)))


def brings_operators(kind: type) -> bool:
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
        with torch._C._EnableTorchFunction(), assigned(running, inside=True):  # noqa: SLF001 - no public way
            return native(cls, func, types, args, kwargs)

    return dispatch


def _answering(name: str, answer: Any) -> Callable[[Any], Any]:
    native: Any = inspect.getattr_static(torch.Tensor, name)

    def read(self: Any) -> Any:
        return answer if self.__dict__.get(_ON_GPU) else native.__get__(self)

    return read


def _make(native: Callable[..., Any], cls: Any, *args: Any, **kwargs: Any) -> Any:
    device = kwargs.get("device")
    if device is None or tracing_fakes() or not names_cuda(device):
        return native(cls, *args, **kwargs)
    adapt(cls)
    # C++ asks the driver about a tensor on CUDA, and ends the process if there is none.
    made = native(cls, *args, **{**kwargs, "device": CPU})
    made.__dict__[_ON_GPU] = True
    return made


def _refuse_handles(
    native: Callable[..., Any], cls: Any, local_tensor: Any, *args: Any, **kwargs: Any
) -> Any:
    # Its operators run in C++, which would lose the device.
    if local_tensor.is_cuda and not tracing_fakes():
        raise UnsupportedCall("a DTensor of a CUDA tensor", "there is one GPU: use plain tensors")
    return native(cls, local_tensor, *args, **kwargs)


# Leaves an operator to another library's tensor class, as torch would beside a CUDA tensor.
#
# A CUDA tensor of torch's is no subclass, so a class with `__torch_function__` decides alone. It
# is given the types without the handles' own, which it does not know.

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
    method: Any = getattr(kind, "__torch_function__", None)
    own = getattr(method, "__func__", method)
    of_torch: Any = torch.Tensor.__torch_function__
    return own is not None and own not in {of_torch.__func__, _DISABLED}


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
