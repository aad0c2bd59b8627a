"""Replaces the functions that create tensors on a named device."""

from collections.abc import Callable
from typing import Any

import torch
from torch.jit import _builtins
from torch.utils import _device

from torch_shim.patching import replace, set_attribute
from torch_shim.redirected_device import CPU, DeviceLike, names_cuda, tracing_fakes
from torch_shim.tensors import advertised_memory, write_epochs
from torch_shim.tensors.absent_bytes import bring
from torch_shim.tensors.dispatch import names
from torch_shim.tensors.handles import CudaTensor, NoTorchFunction, Tensor, become_cuda

_PLAIN = names(
    "arange bartlett_window blackman_window empty empty_like empty_permuted empty_quantized "
    "empty_strided eye full full_like hamming_window hann_window kaiser_window linspace logspace "
    "ones ones_like range scalar_tensor sparse_bsc_tensor sparse_bsr_tensor "
    "sparse_compressed_tensor sparse_coo_tensor sparse_csc_tensor sparse_csr_tensor tril_indices "
    "triu_indices zeros zeros_like "
    "normal rand rand_like randint randint_like randn randn_like randperm"
)
_FROM_DATA = names("tensor as_tensor asarray")
_METHODS = names("new_empty new_empty_strided new_full new_ones new_tensor new_zeros")
_FREQUENCIES = names("fftfreq rfftfreq")

# Native function to its replacement.
_replacements: dict[Any, Callable[..., Any]] = {}


def install() -> None:
    """Replace the factories, and the mode that applies the default device."""
    constructors = _device._device_constructors()  # noqa: SLF001 - cached at its first call
    for name in _PLAIN:
        _replace(torch, name, _factory)
    for name in _FROM_DATA:
        _replace(torch, name, _converter)
    for name in _METHODS:
        _replace(Tensor, name, _factory)
    for name in _FREQUENCIES:
        _replace(torch.fft, name, _factory)
    # Python passes the replacements to the default device's mode, C++ passes the native functions.
    constructors.update(_replacements[native] for native in constructors & _replacements.keys())
    set_attribute(_device.DeviceContext, "__torch_function__", _default_device_function)


def _replace(owner: object, name: str, make: Callable[[Any], Callable[..., Any]]) -> None:
    native = getattr(owner, name, None)
    if native is None:
        return
    replace(owner, name, make)
    _replacements[native] = getattr(owner, name)
    scripts: Any = _builtins  # TorchScript's table of builtin functions
    scripted = scripts._find_builtin(native)  # noqa: SLF001 - no public way
    if scripted is not None:
        scripts._register_builtin(getattr(owner, name), scripted)  # noqa: SLF001 - see above


def _factory(native: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def factory(*args: Any, **kwargs: Any) -> Tensor:
        if torch.compiler.is_dynamo_compiling():
            return native(*args, **kwargs)
        on_gpu = names_cuda(kwargs.get("device"))
        if not (on_gpu or kwargs.get("pin_memory")) or tracing_fakes():
            return native(*args, **kwargs)
        if on_gpu:
            return _make(native, args, kwargs)
        kwargs["pin_memory"] = False  # it needs a real GPU
        return write_epochs.pin(native(*args, **kwargs))

    return factory


def _make(native: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    kwargs["device"] = CPU
    if kwargs.get("pin_memory"):
        raise RuntimeError("Only dense CPU tensors can be pinned")
    try:
        with NoTorchFunction():
            result = native(*args, **kwargs)
    except (RuntimeError, MemoryError) as error:
        if "allocate memory" in str(error) or isinstance(error, MemoryError):
            raise advertised_memory.out_of_memory(advertised_memory.limit_bytes() + 1, 0) from error
        raise
    advertised_memory.reserve(result)
    return become_cuda(result)


def _converter(native: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Replace tensor, as_tensor or asarray: a tensor passed as data keeps its device."""
    copies = native.__name__ == "tensor"
    make = _factory(native)

    def convert(data: Any, *args: Any, **kwargs: Any) -> Tensor:
        if torch.compiler.is_dynamo_compiling():
            return native(data, *args, **kwargs)
        if not isinstance(data, Tensor):
            return make(data, *args, **kwargs)
        if tracing_fakes():
            return native(data, *args, **kwargs)
        device = kwargs.get("device")
        if not (isinstance(data, CudaTensor) or names_cuda(device)):
            return make(data, *args, **kwargs)
        if copies:
            bring((data,))
            with NoTorchFunction():
                made = native(data, *args, **{**kwargs, "device": CPU})
            return become_cuda(made) if device is None or names_cuda(device) else made
        return _convert_tensor(data, *args, **kwargs)

    return convert


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
    """Apply the device of `with torch.device(...)` or the default device to a function call."""
    del types
    kwargs = kwargs or {}
    if func in _device._device_constructors() and kwargs.get("device") is None:  # noqa: SLF001 - as in torch
        kwargs["device"] = self.device
        if not torch.compiler.is_dynamo_compiling():
            func = _replacements.get(func, func)
    return func(*args, **kwargs)
