"""Replaces the functions that create tensors on a named device, nested ones among them."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch.jit import _builtins
from torch.utils import _device

from torch_shim.errors import UnsupportedCall
from torch_shim.patching import (
    CPU,
    CUDA,
    DeviceLike,
    names_cuda,
    redirect,
    replace,
    seen_by_modes,
    set_attribute,
    tracing_fakes,
)
from torch_shim.tensors import advertised_memory, write_epochs
from torch_shim.tensors.absent_bytes import bring
from torch_shim.tensors.dispatch import names
from torch_shim.tensors.foreign_classes import brings_operators, cpu_class
from torch_shim.tensors.handles import CudaTensor, NoTorchFunction, Tensor, become_cuda

# Their device is the named one or the default one, whatever numbers or sizes they are given.
_OF_NUMBERS = names(
    "arange bartlett_window blackman_window empty empty_permuted empty_strided eye full "
    "hamming_window hann_window kaiser_window linspace logspace ones range scalar_tensor "
    "tril_indices triu_indices zeros rand randint randn randperm _efficientzerotensor "
    "_empty_affine_quantized"
)
_LIKE_ARGUMENTS = names(
    "empty_like empty_quantized full_like normal ones_like rand_like randint_like randn_like "
    "zeros_like _empty_per_channel_affine_quantized"
)
# Their device is that of the values, which is where the indices have to be: how many there are.
_INDICES = {
    "sparse_coo_tensor": ("indices",),
    "sparse_csr_tensor": ("crow_indices", "col_indices"),
    "sparse_csc_tensor": ("ccol_indices", "row_indices"),
    "sparse_bsr_tensor": ("crow_indices", "col_indices"),
    "sparse_bsc_tensor": ("ccol_indices", "row_indices"),
    "sparse_compressed_tensor": ("compressed_indices", "plain_indices"),
}
_FROM_DATA = names("tensor as_tensor asarray")
_METHODS = names("new_empty new_empty_strided new_full new_ones new_tensor new_zeros")
_FREQUENCIES = names("fftfreq rfftfreq")

# Native function to its replacement.
_replacements: dict[Any, Callable[..., Any]] = {}


def install() -> None:
    constructors = _device._device_constructors()  # noqa: SLF001 - cached at its first call
    for name in _OF_NUMBERS:
        _replace(torch, name, _of_numbers)
    for name in _LIKE_ARGUMENTS:
        _replace(torch, name, _factory)
    for name in _INDICES:
        _replace(torch, name, _sparse)
    for name in _FROM_DATA:
        _replace(torch, name, _from_data)
    for name in _METHODS:
        _replace(Tensor, name, _factory)
    for name in _FREQUENCIES:
        _replace(torch.fft, name, _factory)
    redirect(Tensor, "__new__", _new)
    # Python passes the replacements to the default device's mode, C++ passes the native functions.
    constructors.update(_replacements[native] for native in constructors & _replacements.keys())
    set_attribute(_device.DeviceContext, "__torch_function__", _default_device_function)
    for name in ("nested_tensor", "as_nested_tensor"):
        redirect(torch.nested, name, _nested)
    for name in ("nested_tensor_from_jagged", "narrow"):
        redirect(torch.nested, name, _jagged)


def _replace(owner: object, name: str, function: Callable[..., Tensor]) -> None:
    native = getattr(owner, name, None)
    if native is None:
        return
    made = partial(function, native)
    seen = name != "range"  # torch's own goes to no mode
    replace(owner, name, lambda _: seen_by_modes(made) if seen else made)
    _replacements[native] = getattr(owner, name)
    scripts: Any = _builtins  # TorchScript's table of builtin functions
    scripted = scripts._find_builtin(native)  # noqa: SLF001 - no public way
    if scripted is not None:
        scripts._register_builtin(getattr(owner, name), scripted)  # noqa: SLF001 - see above


def _factory(native: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    if torch.compiler.is_dynamo_compiling():
        return native(*args, **kwargs)
    on_gpu = names_cuda(kwargs.get("device"))
    if not (on_gpu or kwargs.get("pin_memory")) or tracing_fakes():
        return native(*args, **kwargs)
    if on_gpu:
        return _make(native, args, kwargs)
    kwargs["pin_memory"] = False  # it needs a real GPU
    return write_epochs.pin(native(*args, **kwargs))


def _make(native: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    kwargs["device"] = CPU
    if kwargs.get("pin_memory"):
        raise RuntimeError("Only dense CPU tensors can be pinned")
    bring((*args, *kwargs.values()))
    try:
        with NoTorchFunction():
            result = native(*args, **kwargs)
    except (RuntimeError, MemoryError) as error:
        if "allocate memory" in str(error) or isinstance(error, MemoryError):
            raise advertised_memory.out_of_memory(advertised_memory.limit_bytes() + 1, 0) from error
        raise
    advertised_memory.reserve(result)
    return become_cuda(result)


def _of_numbers(native: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    named = kwargs.get("device") is not None or kwargs.get("out") is not None
    on_gpu = not named and _has_handle((*args, *kwargs.values()))
    if not on_gpu or torch.compiler.is_dynamo_compiling():
        return _factory(native, *args, **kwargs)
    bring((*args, *kwargs.values()))
    with NoTorchFunction():
        return native(*args, **kwargs)


def _has_handle(values: Iterable[Any]) -> bool:
    return any(
        isinstance(value, CudaTensor) or (isinstance(value, list | tuple) and _has_handle(value))
        for value in values
    )


def _sparse(native: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    if torch.compiler.is_dynamo_compiling():
        return native(*args, **kwargs)
    if kwargs.get("device") is None and not tracing_fakes():
        indices = _INDICES[native.__name__]
        parts = dict(zip((*indices, "values"), args, strict=False)) | kwargs
        on_gpu = isinstance(parts.get("values"), CudaTensor)
        for name in indices:
            index = parts.get(name)
            if isinstance(index, Tensor) and isinstance(index, CudaTensor) != on_gpu:
                raise RuntimeError(
                    f"device of {name} (={index.device}) must match device of values "
                    f"(={CUDA if on_gpu else CPU})"
                )
        if on_gpu:
            kwargs["device"] = CUDA
    return _factory(native, *args, **kwargs)


def _new(native: Callable[..., Tensor], cls: type, *args: Any, **kwargs: Any) -> Tensor:
    """Make `torch.Tensor(data)`, or a subclass of it, on the GPU if that is where the data is."""
    cls = cpu_class(cls)  # `type(tensor)(data)` is on the GPU if the data is
    made = native(cls, *args, **kwargs)
    on_gpu = bool(args) and isinstance(args[0], CudaTensor) and not tracing_fakes()
    return become_cuda(made) if on_gpu and not brings_operators(cls) else made


def _from_data(native: Callable[..., Tensor], data: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Call tensor, as_tensor or asarray: a tensor passed as data keeps its device."""
    if torch.compiler.is_dynamo_compiling():
        return native(data, *args, **kwargs)
    if not isinstance(data, Tensor):
        return _factory(native, data, *args, **kwargs)
    if tracing_fakes():
        return native(data, *args, **kwargs)
    device = kwargs.get("device")
    if not (isinstance(data, CudaTensor) or names_cuda(device)):
        return _factory(native, data, *args, **kwargs)
    if native.__name__ == "tensor":  # it copies
        on_gpu = device is None or names_cuda(device)
        bring((data,))
        with NoTorchFunction():
            made = native(data, *args, **{**kwargs, "device": CPU if on_gpu else device})
        return become_cuda(made) if on_gpu else made
    return _convert_tensor(data, *args, **kwargs)


def _convert_tensor(
    data: Tensor,
    dtype: torch.dtype | None = None,
    device: DeviceLike = None,
    *,
    copy: bool | None = None,
    requires_grad: bool = False,
) -> Tensor:
    wanted = data.to(
        device=data.device if device is None else device,
        dtype=data.dtype if dtype is None else dtype,
        copy=bool(copy),
    )
    return wanted.requires_grad_() if requires_grad else wanted


def _default_device_function(
    self: Any,
    func: Callable[..., Any],
    types: object,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> Any:
    del types
    kwargs = kwargs or {}
    if func in _device._device_constructors() and kwargs.get("device") is None:  # noqa: SLF001 - as in torch
        kwargs["device"] = self.device
        if not torch.compiler.is_dynamo_compiling():
            func = _replacements.get(func, func)
    return func(*args, **kwargs)


# Nested tensors: the strided layout works on handles, the jagged one is refused.

_REMEDY = "use the layout torch.strided, or a padded tensor and its mask"


def _nested(native: Callable[..., Any], ts: Any, *args: Any, **kwargs: Any) -> Any:
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


def _jagged(native: Callable[..., Any], values: Any, *args: Any, **kwargs: Any) -> Any:
    strided = native.__name__ == "narrow" and kwargs.get("layout") is not torch.jagged
    if isinstance(values, CudaTensor) and not strided:
        raise _refused()
    return native(values, *args, **kwargs)


def _refused() -> UnsupportedCall:
    return UnsupportedCall("a nested tensor of the layout torch.jagged on the GPU", _REMEDY)
