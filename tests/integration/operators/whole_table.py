"""Compares every operator and dtype that torch's own tables give to CUDA and not to the CPU.

A program of its own: torch's tables change settings of the process that imports them.
"""

import functools
import itertools
import random
import sys
import types
import unittest
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torch_shim.kernels.substitution import with_substitute

_SAMPLES = 40  # of each operator and dtype
_WIDE = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.complex32: torch.complex128,
    torch.bool: torch.int64,
}
# These are kernels of CUDA's by name; a program gets them by calling the public function.
_CUDA_BY_NAME = frozenset(
    {"torch.ops.aten._flash_attention_forward", "torch.ops.aten._efficient_attention_forward"}
)
_BY_BYTES = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})
_OTHER_VENDORS = frozenset({torch.float8_e4m3fnuz, torch.float8_e5m2fnuz})


@functools.cache
def _operators() -> list[Any]:
    # torch's own samples want a package that only its own tests need.
    stand_in = types.ModuleType("expecttest")
    stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined] # that is the point
    sys.modules.setdefault("expecttest", stand_in)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import (  # noqa: PLC0415 - behind that
            op_db,
        )
    return list(op_db)


def _missing() -> Iterator[tuple[Any, torch.dtype]]:
    for operator in _operators():
        for dtype in sorted(set(operator.dtypesIfCUDA) - set(operator.dtypes), key=str):
            if operator.name not in _CUDA_BY_NAME and dtype not in _OTHER_VENDORS:
                yield operator, dtype


def main() -> None:
    """Print what is wrong, a line for each operator and dtype, and how many samples agreed."""
    warnings.simplefilter("ignore")  # torch warns about complex halves and CSR tensors
    torch.manual_seed(0)
    random.seed(0)  # torch's tables draw by both
    failures = set()
    agreed = 0
    for operator, dtype in _missing():
        for sample in itertools.islice(_samples(operator, dtype), _SAMPLES):
            problem = _compared(operator, sample, dtype)
            agreed += not problem
            if problem:
                failures.add(f"{operator.name} {dtype}: {problem}")
    sys.stdout.write("\n".join([*sorted(failures), f"{agreed} agreed"]))


def _samples(operator: Any, dtype: torch.dtype) -> Iterator[Any]:
    """Yield torch's samples; integers modulo zero, which older tables have, are chance on CUDA."""
    for sample in operator.sample_inputs("cpu", dtype):
        divides = operator.name == "__rmod__" and not dtype.is_floating_point
        if not divides or torch.as_tensor(sample.input).all():
            yield sample


def _compared(operator: Any, sample: Any, dtype: torch.dtype) -> str:
    name = operator.name.rpartition(".")[2]
    arguments = (sample.input, *sample.args)
    torch.manual_seed(1)
    try:
        found = with_substitute(operator.op, name)(*arguments, **sample.kwargs)
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    wanted = _expected(operator, name, arguments, sample.kwargs, dtype)
    for one, other in zip(pytree.tree_leaves(found), pytree.tree_leaves(wanted), strict=True):
        if not isinstance(one, torch.Tensor):
            continue
        if one.dtype is not other.dtype:
            return f"{one.dtype} where CUDA gives {other.dtype}"
        if one.shape != other.shape or not _close(one, other):
            return "other numbers"
    return ""


def _expected(operator: Any, name: str, args: Any, kwargs: Any, dtype: torch.dtype) -> Any:
    """Compute in a dtype that the CPU has, and round to the dtype that torch infers for CUDA."""
    if dtype in _BY_BYTES or name in {"histc", "nansum", "nanmean"}:
        return _REFERENCES[name](*args, **kwargs)
    if name == "abs":
        return args[0]
    torch.manual_seed(1)
    wide = operator.op(*pytree.tree_map(_wide, args), **pytree.tree_map(_wide, kwargs))
    if name == "sampled_addmm":
        return pytree.tree_map(lambda leaf: leaf.to(dtype), wide)
    inferred = operator.op(*_on_meta(args), **_on_meta(kwargs))
    return pytree.tree_map(lambda leaf, like: leaf.to(like.dtype), wide, inferred)


def _wide(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.detach().to(_WIDE.get(leaf.dtype, leaf.dtype))
    return _WIDE.get(leaf, leaf) if isinstance(leaf, torch.dtype) else leaf


def _on_meta(values: Any) -> Any:
    return pytree.tree_map(
        lambda leaf: leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf, values
    )


def _close(one: torch.Tensor, other: torch.Tensor) -> bool:
    one, other = (_dense(tensor.detach()) for tensor in (one, other))
    if not one.is_floating_point() and not one.is_complex():
        return torch.equal(one, other)
    wide = torch.complex128 if one.is_complex() else torch.float64
    tolerance = 2e-2 if one.dtype is torch.bfloat16 else 2e-3
    finite = other.to(wide).isfinite()
    if not torch.equal(finite, one.isfinite()):
        return False
    one, other = one.to(wide)[finite], other.to(wide)[finite]
    largest = float(other.abs().max()) if len(other) else 0.0
    return torch.allclose(one, other, rtol=tolerance, atol=tolerance * max(largest, 1.0))


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype in _BY_BYTES:
        return tensor.view(torch.uint8)
    return tensor.float().to_dense() if tensor.layout is not torch.strided else tensor


def _histogram(
    values: torch.Tensor,
    bins: int = 100,
    min: float = 0,  # noqa: A002 - PyTorch's parameter
    max: float = 0,  # noqa: A002 - see above
) -> torch.Tensor:
    numbers = values.reshape(-1).tolist()
    low, high = int(min), int(max)
    if low == high and numbers:
        ordered = sorted(numbers)
        low, high = ordered[0], ordered[-1]
    if low == high:
        low, high = low - 1, high + 1
    counts = [0] * bins
    for number in numbers:
        if low <= number <= high:
            place = (number - low) * bins // (high - low)
            counts[place if place < bins else bins - 1] += 1
    return torch.tensor(counts).to(values.dtype)


def _sum_of_numbers(values: torch.Tensor, dim: Any = None, keepdim: Any = None) -> torch.Tensor:
    wide = values.detach().to(torch.complex128)
    return wide.masked_fill(wide.isnan(), 0).sum(dim, bool(keepdim)).to(values.dtype)


def _mean_of_numbers(values: torch.Tensor, dim: Any = None, keepdim: Any = None) -> torch.Tensor:
    wide = values.detach().to(torch.complex128)
    total = wide.masked_fill(wide.isnan(), 0).sum(dim, bool(keepdim))
    return (total / (~wide.isnan()).sum(dim, bool(keepdim))).to(values.dtype)


def _scattered(
    target: torch.Tensor, dim: int, index: torch.Tensor, source: Any = None, *, value: Any = None
) -> torch.Tensor:
    wide = target.float()
    given = source if value is None else value
    given = given.float() if isinstance(given, torch.Tensor) else given
    return wide.scatter(dim, index, given).to(target.dtype)


_REFERENCES: dict[str, Callable[..., torch.Tensor]] = {
    "histc": _histogram,
    "nansum": _sum_of_numbers,
    "nanmean": _mean_of_numbers,
    "scatter": _scattered,
}


if __name__ == "__main__":
    main()
