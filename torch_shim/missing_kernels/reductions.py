"""Reductions and writes by index that CUDA has for dtypes that no CPU kernel takes."""

from typing import Any

import torch

from torch_shim.missing_kernels.choice import (
    Choice,
    Substitute,
    for_dtypes,
    into_out,
    is_in_place,
    substituting,
)

_INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
_FLOAT8 = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})


def _integer_histogram(
    input: torch.Tensor,  # noqa: A002 - PyTorch's parameter
    bins: int = 100,
    min: float = 0,  # noqa: A002 - see above
    max: float = 0,  # noqa: A002 - see above
) -> torch.Tensor:
    """Count in integer arithmetic, as CUDA's kernel does; the counts have the input's dtype."""
    if bins <= 0:
        raise RuntimeError("bins must be > 0")
    low: Any = int(min)
    high: Any = int(max)
    if low > high:
        raise RuntimeError("max must be larger than min")
    if low == high and input.numel():
        low, high = torch.aminmax(input.to(torch.int64))
    # No branch on a number of the tensor: this is traced over tensors without data too.
    alike = torch.as_tensor(low == high)
    low, high = low - alike.int(), high + alike.int()
    values = input.reshape(-1).to(torch.int64)
    within = (values >= low) & (values <= high)
    places = torch.div((values - low) * bins, high - low, rounding_mode="trunc")
    places = torch.where(within, places, 0).clamp_(0, bins - 1)
    counts = torch.zeros(bins, dtype=torch.int64).scatter_add_(0, places, within.to(torch.int64))
    return counts.to(input.dtype)


def _sum_of_numbers(
    input: torch.Tensor,  # noqa: A002 - PyTorch's parameter
    dim: Any = None,
    keepdim: bool = False,  # noqa: FBT001, FBT002 - see above
    *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    numbers = torch.where(input.isnan(), torch.zeros((), dtype=input.dtype), input)
    result = dtype or input.dtype
    wide = torch.complex64 if result is torch.complex32 else result
    return numbers.to(wide).sum(dim, keepdim).to(result)


def _mean_of_numbers(
    input: torch.Tensor,  # noqa: A002 - PyTorch's parameter
    dim: Any = None,
    keepdim: bool = False,  # noqa: FBT001, FBT002 - see above
    *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    count = input.detach().isnan().logical_not_().sum(dim, keepdim)
    result = dtype or input.dtype
    wide = torch.complex64 if result is torch.complex32 else result
    return (_sum_of_numbers(input.to(wide), dim, keepdim) / count).to(result)


def _plain_scatter(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Substitute | None:
    reduces = "reduce" in kwargs or any(isinstance(argument, str) for argument in args[4:])
    return None if reduces or not args or args[0].dtype not in _FLOAT8 else _scatter


def _scatter(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Write float8 numbers by index as the bytes that they are."""
    target = args[0]
    dtype = target.dtype

    def as_bytes(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.view(torch.uint8) if value.dtype is dtype else value
        return value

    args = tuple(map(as_bytes, args))
    kwargs = {name: as_bytes(value) for name, value in kwargs.items()}
    value = kwargs.get("value", args[3] if len(args) > 3 else None)  # noqa: PLR2004 - after self, dim, index
    if isinstance(value, (int, float)):
        byte = int(torch.tensor(value, dtype=dtype).view(torch.uint8))
        args, kwargs = args[:3], {**kwargs, "value": byte}
    result = func(*args, **kwargs)
    return target if is_in_place(func) else result.view(dtype)


def _absolute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Of a truth value, itself."""
    first: torch.Tensor = args[0] if args else kwargs["input"]
    if "out" in kwargs:
        out: torch.Tensor = into_out(kwargs["out"], first)
        return out
    return first if is_in_place(func) else first.clone()


def _as_integers(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute with truth values as the integers 0 and 1."""
    first, *rest = args or (kwargs["input"],)
    kwargs = {name: value for name, value in kwargs.items() if name != "input"}
    return func(first.to(torch.int64), *rest, **kwargs)


_COMPLEX = frozenset({torch.complex32, torch.complex64, torch.complex128})
_TRUTH = frozenset({torch.bool})

REDUCTIONS: dict[str, Choice] = {
    "histc": for_dtypes(_INTEGERS, _integer_histogram),
    "nansum": for_dtypes(_COMPLEX, _sum_of_numbers),
    "nanmean": for_dtypes(_COMPLEX, _mean_of_numbers),
    "scatter": _plain_scatter,
    "abs": substituting(_TRUTH, _absolute),
    "absolute": substituting(_TRUTH, _absolute),
    "__abs__": substituting(_TRUTH, _absolute),
    "softsign": substituting(_TRUTH, _as_integers),
    "trace": substituting(_TRUTH, _as_integers),
}
