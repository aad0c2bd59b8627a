"""torch.cuda.FloatTensor and similar types, torch.set_default_tensor_type, and Variable."""

from collections.abc import Callable
from typing import Any

import torch

from torch_shim.patching import replace, set_attribute
from torch_shim.tensors.handles import CudaTensor, Tensor, become_cuda

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


def install() -> None:
    """Install the types in torch.cuda."""
    for name, dtype in DTYPES.items():
        kind = CudaTensorType(name, (), {"dtype": dtype, "__module__": "torch.cuda"})
        set_attribute(torch.cuda, name, kind)
    replace(torch, "set_default_tensor_type", _set_default_tensor_type)
    set_attribute(type(torch.autograd.Variable), "__call__", _make_variable)


def _set_default_tensor_type(native: Callable[[Any], None]) -> Callable[[Any], None]:
    def set_default_tensor_type(t: Any) -> None:
        name = t if isinstance(t, str) else f"{t.__module__}.{t.__name__}"
        on_gpu = name.startswith("torch.cuda.")
        native(name.replace("torch.cuda.", "torch."))
        torch.set_default_device("cuda" if on_gpu else None)

    return set_default_tensor_type


def _make_variable(cls: type, *args: Any, **kwargs: Any) -> Any:
    """Return the tensor that `Variable(data)` is in C++, on the device of `data`."""
    data = args[0] if args else kwargs.get("data")
    made = type.__call__(cls, *args, **kwargs)
    return become_cuda(made) if isinstance(data, CudaTensor) else made
