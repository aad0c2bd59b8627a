"""Moves between CPU and GPU: tensors by to, cuda, cpu, type, pin_memory; parameters in place.

A move copies the data, so that CPU and GPU tensors never share storage, as with a real GPU.
"""

import os
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import parameter
from torch.utils import _pytree

from torch_shim.patching import (
    CPU,
    CUDA,
    names_cuda,
    redirect,
    replace,
    seen_by_modes,
    set_attribute,
    tracing_fakes,
)
from torch_shim.tensors import advertised_memory, write_epochs
from torch_shim.tensors.absent_bytes import absent_of, bring
from torch_shim.tensors.foreign_classes import brings_operators, cpu_class, is_asked, moved
from torch_shim.tensors.handles import (
    PLAIN,
    CudaParameter,
    CudaTensor,
    NoTorchFunction,
    Parameter,
    Tensor,
    become_cpu,
    become_cuda,
    cuda_class,
    like_handles,
    wrap,
)
from torch_shim.wire.shared_memory import (
    LEAST_BLOCK_BYTES,
    LentPages,
    is_lazy,
    map_privately,
    shared_blocks,
    tensor_over,
)

_OWN = frozenset({Tensor, Parameter, CudaTensor, CudaParameter})
_functions_are_on = torch._C._is_torch_function_enabled  # noqa: SLF001 - no public question


def install() -> None:
    moves: dict[str, Callable[..., Any]] = {
        "to": _to,
        "cuda": _cuda,
        "cpu": _cpu,
        "type": _type,
        "type_as": _type_as,
        "pin_memory": _pin_memory,
        "is_pinned": _is_pinned,
    }
    for name, move in moves.items():
        replace(Tensor, name, _asking_first(name, move))
    redirect(Tensor, "as_subclass", _as_subclass)  # torch shows it to no mode
    _install_types()
    _install_modules()
    _install_scripting()


def _asking_first(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Let modes and a class with `__torch_function__` decide first, as about methods of C."""

    def asking(native: Callable[..., Any]) -> Callable[..., Any]:
        move = partial(function, native)

        def call(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            kind: Any = type(self)
            if kind in _OWN or tracing_fakes():
                return move(self, *args, **kwargs)
            kind = cpu_class(kind)
            if not (is_asked(kind) and _functions_are_on()):
                return move(self, *args, **kwargs)
            decide: Any = kind.__torch_function__
            return decide(getattr(Tensor, name), (kind,), (self, *args), kwargs)

        return seen_by_modes(call)

    return asking


def _to(native: Callable[..., Tensor], self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    device, keywords = _parse(args, kwargs)
    if _stays_fake(self):
        if device is not None:  # with an index: without it torch calls the driver
            keywords["device"] = CUDA if names_cuda(device) else device
        return native(self, **keywords)
    wrapper = not isinstance(self, CudaTensor) and brings_operators(type(self))
    from_gpu = isinstance(self, CudaTensor) or (wrapper and self.is_cuda)
    to_gpu = from_gpu if device is None else names_cuda(device)
    if wrapper and (from_gpu or to_gpu) and device is not None:
        return moved(self, device, keywords)
    if not from_gpu and not to_gpu:
        return native(self, *args, **kwargs)
    if device is not None:
        keywords["device"] = CPU if to_gpu else device
    return _move(native, self, keywords, to_gpu=to_gpu)


def _stays_fake(tensor: Tensor) -> bool:
    """Whether the result has no data, as in a trace or in an exported program's notes."""
    return tracing_fakes() or isinstance(tensor, FakeTensor)


def _move(
    native: Callable[..., Tensor], self: Tensor, keywords: dict[str, Any], *, to_gpu: bool
) -> Tensor:
    if to_gpu != isinstance(self, CudaTensor):
        keywords["copy"] = True
    if to_gpu:
        advertised_memory.reserve(self)
    lacked = absent_of(self)
    bring((self,))
    with NoTorchFunction():
        if lacked is not None and lacked.lent is not None:
            note_origin(self, lacked.lent, 0)
        result = (copied_to_gpu if to_gpu else copied_to_cpu)(self, keywords)
        if result is None:
            result = native(self, **keywords)
    if result is self:
        return result
    kind = cpu_class(type(self))
    if kind not in PLAIN and not issubclass(kind, Parameter) and not is_asked(kind):
        # torch.Tensor's own methods do the same for a subclass.
        result = result.as_subclass(kind)  # type: ignore[type-var,assignment] # a tensor's class
    return become_cuda(result) if to_gpu else result


def _parse(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the device and the other arguments of a call of `to`.

    It has three forms: to(dtype, ...), to(device, dtype, ...), to(other, ...).
    """
    keywords = dict(kwargs)
    device = keywords.pop("device", None)
    other = keywords.pop("other", None)
    rest = list(args)
    if rest and isinstance(rest[0], Tensor):
        other = rest.pop(0)
    elif rest and not isinstance(rest[0], torch.dtype):
        device = rest.pop(0)
        if rest:
            _name(keywords, "dtype", rest.pop(0))
    elif rest:
        _name(keywords, "dtype", rest.pop(0))
    if other is not None:
        device = other.device
        _name(keywords, "dtype", other.dtype)
    for name, value in zip(("non_blocking", "copy"), rest, strict=False):
        _name(keywords, name, value)
    return device, keywords


def _name(keywords: dict[str, Any], name: str, value: Any) -> None:
    if value is not None:
        keywords[name] = value


def _cuda(
    native: Callable[..., Tensor],
    self: Tensor,
    device: Any = None,
    non_blocking: bool = False,  # noqa: FBT001, FBT002 - PyTorch's signature
    **kwargs: Any,
) -> Tensor:
    if _stays_fake(self):
        return native(self, CUDA, non_blocking, **kwargs)
    names_cuda(device)  # raises for a GPU that does not exist
    return self.to(CUDA, non_blocking=non_blocking, **kwargs)


def _cpu(native: Callable[..., Tensor], self: Tensor, **kwargs: Any) -> Tensor:
    if _stays_fake(self):
        return native(self, **kwargs)
    on_gpu = isinstance(self, CudaTensor) or (brings_operators(type(self)) and self.is_cuda)
    return self.to(CPU, **kwargs) if on_gpu else native(self, **kwargs)


def _type(
    native: Callable[..., Any],
    self: Tensor,
    dtype: Any = None,
    non_blocking: bool = False,  # noqa: FBT001, FBT002 - PyTorch's signature
    **kwargs: Any,
) -> Any:
    name = dtype if isinstance(dtype, str) else getattr(dtype, "__tensor_name__", None)
    if name is None and dtype is not None and not isinstance(dtype, torch.dtype):
        name = f"{dtype.__module__}.{dtype.__name__}"  # a type such as torch.FloatTensor
    on_gpu = isinstance(self, CudaTensor)
    if tracing_fakes() or not (on_gpu or (name or "").startswith("torch.cuda.")):
        return native(self, dtype, non_blocking, **kwargs)
    if dtype is None:
        with NoTorchFunction():
            return native(self).replace("torch.", "torch.cuda.", 1)
    if name is None:
        return self.to(dtype, non_blocking=non_blocking)
    device = CUDA if name.startswith("torch.cuda.") else CPU
    return self.to(device, DTYPES[name.rpartition(".")[2]], non_blocking=non_blocking)


def _type_as(native: Callable[..., Tensor], self: Tensor, other: Tensor) -> Tensor:
    if tracing_fakes() or not isinstance(self, CudaTensor) ^ isinstance(other, CudaTensor):
        return native(self, other)
    return self.to(other)


def _as_subclass(native: Callable[..., Tensor], self: Tensor, cls: type[Tensor]) -> Tensor:
    result = native(self, cpu_class(cls))
    if not isinstance(self, CudaTensor) or tracing_fakes():
        return result
    return become_cuda(result) if type(result) in PLAIN else like_handles(result)


# The native functions of these two need a real GPU.


def _pin_memory(_native: object, self: Tensor, device: Any = None) -> Tensor:  # noqa: ARG001 - PyTorch's signature
    if isinstance(self, CudaTensor):
        kind = self.type()
        raise RuntimeError(f"cannot pin '{kind}' only dense CPU tensors can be pinned")
    if self.is_pinned():
        return self
    return write_epochs.pin(self.clone())


def _is_pinned(_native: object, self: Tensor, device: Any = None) -> bool:  # noqa: ARG001 - PyTorch's signature
    if isinstance(self, CudaTensor) or self.layout is not torch.strided:
        return False
    return write_epochs.is_pinned(self)


# torch.cuda.FloatTensor and similar types, torch.set_default_tensor_type, and Variable.

DTYPES = {
    "FloatTensor": torch.float32,
    "DoubleTensor": torch.float64,
    "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16,
    "ByteTensor": torch.uint8,
    "CharTensor": torch.int8,
    "ShortTensor": torch.int16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
    "BoolTensor": torch.bool,
}


class CudaTensorType(type):
    """The type of torch.cuda.FloatTensor: recognises and creates GPU tensors of one dtype."""

    dtype: torch.dtype

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, CudaTensor) and instance.dtype is cls.dtype

    def __call__(cls, *args: Any, **kwargs: Any) -> Tensor:
        """Create a tensor as the CPU's type of the same name does, and move it to the GPU."""
        native = getattr(torch, cls.__name__)
        return native(*args, **kwargs).cuda()  # type: ignore[no-any-return] # it makes tensors


def _install_types() -> None:
    for name, dtype in DTYPES.items():
        kind = CudaTensorType(name, (), {"dtype": dtype, "__module__": "torch.cuda"})
        set_attribute(torch.cuda, name, kind)
    redirect(torch, "set_default_tensor_type", _set_default_tensor_type)
    set_attribute(type(torch.autograd.Variable), "__call__", _make_variable)


def _set_default_tensor_type(native: Callable[[Any], None], t: Any) -> None:
    name = t if isinstance(t, str) else f"{t.__module__}.{t.__name__}"
    on_gpu = name.startswith("torch.cuda.")
    native(name.replace("torch.cuda.", "torch."))
    torch.set_default_device("cuda" if on_gpu else None)


def _make_variable(cls: type, *args: Any, **kwargs: Any) -> Any:
    """Return the tensor that `Variable(data)` is in C++, on the device of `data`."""
    data = args[0] if args else kwargs.get("data")
    made = type.__call__(cls, *args, **kwargs)
    return become_cuda(made) if isinstance(data, CudaTensor) else made


# Parameters and modules: a parameter's class changes in place when its data moves.

alias_of = Tensor._make_subclass  # noqa: SLF001 - its only location; of a class, it is no view
_native_data = Tensor.__dict__.get("data") or torch._C.TensorBase.__dict__["data"]  # noqa: SLF001 - its only location


def _install_modules() -> None:
    """Make `.data =` and Parameter follow the device; disable flat RNN weights, unused here."""
    set_attribute(Tensor, "data", property(_native_data.__get__, _set_data))
    redirect(torch._C._autograd, "_get_data_attr", _get_data)  # noqa: SLF001 - traced `.data`
    redirect(Parameter, "__new__", _new_parameter)
    set_attribute(Tensor, "_make_subclass", staticmethod(_make_subclass))
    lazy = parameter.UninitializedTensorMixin  # type: ignore[attr-defined] # missing in the stubs
    redirect(lazy, "materialize", _materialize)
    for kind in (torch.nn.UninitializedParameter, torch.nn.UninitializedBuffer):
        redirect(kind, "__new__", _new_uninitialized)
    redirect(torch.nn.RNNBase, "flatten_parameters", _flatten_nothing)
    redirect(torch.utils, "swap_tensors", _swap)


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


def _get_data(native: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    data = native(tensor)
    return become_cuda(data) if isinstance(tensor, CudaTensor) else data


def _new_parameter(
    native: Callable[..., Tensor],
    cls: type,
    data: Any = None,
    requires_grad: bool = True,  # noqa: FBT001, FBT002 - PyTorch's signature
) -> Tensor:
    on_gpu = isinstance(data, CudaTensor) or cls is CudaParameter
    if not on_gpu or brings_operators(cls) or type(data) not in _OWN:
        return native(cls, data, requires_grad)
    with NoTorchFunction():
        return alias_of(cuda_class(cpu_class(cls)), data, requires_grad)


def _make_subclass(cls: type, data: Tensor, requires_grad: bool = False, **kwargs: Any) -> Any:  # noqa: FBT001, FBT002 - Dynamo compares the signature with its own
    """Make a parameter class of the user's, say, of a tensor, which keeps its device."""
    made: Any = alias_of(cls, data, requires_grad, **kwargs)
    on_gpu = isinstance(data, CudaTensor) and not (tracing_fakes() or brings_operators(cls))
    return become_cuda(made) if on_gpu else made


def _materialize(
    native: Callable[..., None], self: Any, shape: Any, device: Any = None, dtype: Any = None
) -> None:
    on_gpu = isinstance(self, CudaTensor) if device is None else names_cuda(device)
    native(self, shape, device, dtype)
    if on_gpu:  # the native function has set the plain class, whatever the device
        become_cuda(self)


def _new_uninitialized(
    native: Callable[..., Tensor], cls: type, *args: Any, **kwargs: Any
) -> Tensor:
    made = native(cls, *args, **kwargs)
    return become_cuda(made) if names_cuda(kwargs.get("device")) else made


def _flatten_nothing(_native: object, self: torch.nn.RNNBase) -> None:
    """Arrange no memory for cuDNN: the worker arranges its own copy."""


def _swap(native: Callable[[Tensor, Tensor], None], t1: Tensor, t2: Tensor) -> None:
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


# TorchScript: results of scripted functions and modules on the GPU become handles.

# C++'s views of a scripted module; torch has them in torch._C only, without annotations.
_TENSORS: tuple[Any, ...] = (torch._C.ParameterDict, torch._C.BufferDict)  # noqa: SLF001 - see above
_MODULES: Any = torch._C.ModuleDict  # noqa: SLF001 - see above
_METHOD: Any = torch._C.ScriptMethod  # noqa: SLF001 - see above


def _install_scripting() -> None:
    redirect(torch._C.ScriptFunction, "__call__", _call_scripted)  # noqa: SLF001 - its only location
    redirect(_METHOD, "__call__", _call_scripted)
    redirect(torch.jit, "load", _load)


def _call_scripted(native: Callable[..., Any], self: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Call a scripted function, or the method of a scripted module, which owns it."""
    result = native(self, *args, **kwargs)
    leaves = _pytree.tree_leaves((args, kwargs))
    on_gpu = any(isinstance(leaf, CudaTensor) for leaf in leaves)
    if on_gpu or (isinstance(self, _METHOD) and _is_on_gpu(self.owner)):
        return wrap(result, {id(leaf) for leaf in leaves if type(leaf) in PLAIN})
    return result


def _is_on_gpu(module: Any) -> bool:
    for kind in _TENSORS:
        first = next(iter(kind(module).items()), None)
        if first is not None:
            return isinstance(first[1], CudaTensor)
    return any(_is_on_gpu(child) for _, child in _MODULES(module).items())


def _load(
    native: Callable[..., Any], f: Any, map_location: Any = None, *args: Any, **kwargs: Any
) -> Any:
    if map_location is None or not names_cuda(map_location):
        return native(f, map_location, *args, **kwargs)
    return native(f, "cpu", *args, **kwargs).cuda()


# Copies of large tensors, for `.cuda()` and `.cpu()`, in memory that is shared with a worker.


def copied_to_gpu(tensor: torch.Tensor, keywords: dict[str, Any]) -> torch.Tensor | None:
    """Return a copy of a large CPU tensor in memory that workers map.

    None for a tensor that torch itself has to copy. `keywords` are those of `to`.
    """
    dtype = keywords.get("dtype") or tensor.dtype
    size_bytes = tensor.numel() * dtype.itemsize
    if size_bytes < LEAST_BLOCK_BYTES or type(tensor) is not torch.Tensor:
        return None
    if _needs_torch(tensor, keywords) or tensor.device.type != "cpu":
        return None
    storage = shared_blocks.storage(size_bytes)
    if storage is None:
        return None
    with torch.no_grad():
        return tensor_over(storage, dtype, 0, tensor.size(), tensor.stride()).copy_(tensor)


def copied_to_cpu(tensor: torch.Tensor, keywords: dict[str, Any]) -> torch.Tensor | None:
    """Return a CPU tensor over the pages in which a large result of a worker came.

    None for a tensor that torch itself has to copy. `keywords` are those of `to`.
    """
    if type(tensor) is not CudaTensor or not keywords.get("copy"):
        return None
    if keywords.get("dtype") not in (None, tensor.dtype) or _needs_torch(tensor, keywords):
        return None
    return mapped_copy(tensor)


def _needs_torch(tensor: torch.Tensor, keywords: dict[str, Any]) -> bool:
    return (
        tensor.layout is not torch.strided
        or "memory_format" in keywords
        or (tensor.requires_grad and torch.is_grad_enabled())
        or not tensor.is_contiguous()
    )


# Copies of results that lie in a worker's file: both map the file, and writes take own pages.
#
# So `.cpu()` of a large result that nobody has written to copies nothing.

LEAST_MAPPED_BYTES = 1 << 20
_ORIGIN = "_gpufaas_origin"


class _Origin(NamedTuple):
    """Where a storage's content lies, as long as the storage was not written to."""

    lent: LentPages
    start: int  # in the file
    content: tuple[int, int]


def note_origin(tensor: torch.Tensor, lent: LentPages, start: int) -> None:
    """Record that a marked tensor's storage was just mapped from a file."""
    storage = write_epochs.storage_of(tensor)
    storage.__dict__[_ORIGIN] = _Origin(lent, start, write_epochs.content_of(tensor))


def mapped_copy(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a CPU tensor with the same values over other pages; None if they are to be copied."""
    storage = write_epochs.storage_of(tensor)
    origin: _Origin | None = storage.__dict__.get(_ORIGIN)
    size = tensor.numel() * tensor.element_size()
    if origin is None or size < LEAST_MAPPED_BYTES or 2 * size < storage.nbytes():
        return None
    if origin.content != write_epochs.content_of(tensor) or not tensor.is_contiguous():
        return None
    if is_lazy(tensor):
        return None
    descriptor = os.dup(origin.lent.descriptor)
    memory = map_privately(descriptor, origin.start + storage.nbytes(), origin.lent)
    whole = torch.frombuffer(
        memory, dtype=torch.uint8, offset=origin.start, count=storage.nbytes()
    ).untyped_storage()
    offset = int(tensor.storage_offset())
    return tensor_over(whole, tensor.dtype, offset, tensor.size(), tensor.stride())
