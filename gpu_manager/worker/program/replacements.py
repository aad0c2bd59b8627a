"""Operators that mean something else in a worker than what torch itself does by that name."""

from collections.abc import Callable
from typing import Any

import torch

from gpu_manager.worker.program.checks.argument_checks import short_name
from torch_shim.missing_kernels import substitution

Operator = Callable[..., Any]

_PREDISPATCH = "t:torch._functorch.predispatch."
_FUNCTORCH = "t:torch._C._functorch."

_OF_TORCH = "tma"  # how names of functions, methods and registered operators begin
_POWER = "o:pow"  # Python's, which autocast knows of

# The product of mixture-of-experts layers; the last are transformers' own for other dtypes.
_GROUPED_PRODUCTS = (
    "t:torch.nn.functional.grouped_mm",
    "t:torch._grouped_mm",
    "a:aten::_grouped_mm",
    "a:aten::_grouped_mm.default",
    "a:transformers::grouped_mm_fallback",
    "a:transformers::grouped_mm_fallback.default",
)
# A view whose schema says nothing of that: it would have a version of its own.
_VIEWS_UNSAID = ("a:aten::_unsafe_view", "a:aten::_unsafe_view.default")


class Replacements:
    """The table of replaced operators for a worker whose GPU is `device`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def table(self) -> dict[str, Operator]:
        """Every replaced operator by its name in programs."""
        table: dict[str, Operator] = {
            "m:cuda": self._to_cuda,
            "m:requires_grad_": _same,
            "g:data": torch.Tensor.detach,  # shares the version counter, unlike `.data`
            "t:torch._C._set_grad_enabled": _nothing,
            "t:torch.autograd.grad_mode._enter_inference_mode": _nothing,
            "t:torch.autograd.grad_mode._exit_inference_mode": _nothing,
            "t:torch.amp.autocast_mode._enter_autocast": self._enter_autocast,
            "t:torch.amp.autocast_mode._exit_autocast": _exit_autocast,
        }
        table.update(_vmap_helpers())
        table.update(dict.fromkeys(_GROUPED_PRODUCTS, _grouped_product))
        table.update(dict.fromkeys(_VIEWS_UNSAID, torch.Tensor.view))
        return table

    def on_emulated_gpu(self, name: str, operator: Operator) -> Operator:
        """Return the operator; on an emulated GPU with what stands in for a kernel of CUDA's."""
        short = short_name(name)
        is_torchs = name[0] in _OF_TORCH or name == _POWER
        if self._device.type != "cpu" or not is_torchs or not substitution.has_substitute(short):
            return operator
        return substitution.with_substitute(operator, short)

    def _to_cuda(
        self,
        tensor: torch.Tensor,
        _device: object = None,
        _non_blocking: object = None,
        *,
        memory_format: torch.memory_format = torch.preserve_format,
    ) -> torch.Tensor:
        return tensor.to(self._device, memory_format=memory_format)

    def _enter_autocast(
        self,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: object = None,
        _cache_enabled: object = None,
    ) -> torch.autocast | None:
        """The mode that `_exit_autocast` leaves. That of the CPU concerns no tensor of a GPU.

        It keeps no casts: see `leave_modes`.
        """
        kind = str(device_type).partition(":")[0]
        if kind != "cuda" and self._device.type != "cuda":
            return None
        if kind == "cuda":
            kind, dtype = self._device.type, dtype or torch.get_autocast_dtype("cuda")
        mode = torch.autocast(kind, dtype, enabled is not False, cache_enabled=False)
        mode.__enter__()  # type: ignore[no-untyped-call] # torch gives it no types
        return mode


def _exit_autocast(mode: object) -> None:
    if isinstance(mode, torch.autocast):
        mode.__exit__(None, None, None)


def _same(tensor: torch.Tensor, *_: object) -> torch.Tensor:
    return tensor


def _nothing(*_: object) -> None:
    return None


def _add_batch_dim(tensor: torch.Tensor, dimension: int, level: int) -> torch.Tensor:
    dimension = tensor.ndim + dimension if dimension < 0 else dimension
    functorch = torch._C._functorch  # noqa: SLF001 - what torch.vmap itself calls
    added: torch.Tensor = functorch._add_batch_dim(tensor, dimension, level)  # noqa: SLF001 - as above
    return added


def _vmap_helpers() -> dict[str, Operator]:
    """What Dynamo leaves of `torch.vmap`: the calls that its body was wrapped in."""
    functorch = torch._C._functorch  # noqa: SLF001 - what torch.vmap itself calls
    table: dict[str, Operator] = {
        f"{_PREDISPATCH}lazy_load_decompositions": _nothing,
        "t:torch._functorch.vmap.lazy_load_decompositions": _nothing,
    }
    for space in (_PREDISPATCH, _FUNCTORCH):
        table[f"{space}_add_batch_dim"] = _add_batch_dim
        for name in ("_remove_batch_dim", "_vmap_increment_nesting", "_vmap_decrement_nesting"):
            table[f"{space}{name}"] = getattr(functorch, name)
    return table


def _grouped_product(
    first: torch.Tensor,
    second: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The products of the groups that `offs` ends; rows or columns of no group are zero.

    CUDA's kernel believes the offsets: it gets them ascending and within the tensor, without a
    word from the GPU. The products of other dtypes are computed one by one.
    """
    if bias is not None:
        raise RuntimeError("bias is not supported yet")  # as torch says
    if offs is None:
        product = first @ second
        return product if out_dtype is None else product.to(out_dtype)
    by_rows = (first.dim(), second.dim()) == (_MATRIX, _MATRICES)
    if by_rows and first.device.type == "cuda" and first.dtype is torch.bfloat16:
        ends = offs.clamp(0, len(first)).cummax(0).values.to(offs.dtype)
        made: torch.Tensor = torch._grouped_mm(first, second, ends, None, out_dtype)  # noqa: SLF001 - older torch has no public one
        rows = torch.arange(len(first), device=first.device)
        return made.masked_fill_((rows >= ends[-1]).unsqueeze(1), 0)
    return _products_one_by_one(first, second, offs.tolist(), out_dtype or first.dtype)


_MATRIX, _MATRICES = 2, 3


def _products_one_by_one(
    first: torch.Tensor, second: torch.Tensor, ends: list[int], dtype: torch.dtype
) -> torch.Tensor:
    ends = [max(0, end) for end in ends]
    groups = list(zip([0, *ends[:-1]], ends, strict=True))
    if (first.dim(), second.dim()) == (_MATRIX, _MATRICES):  # a matrix for each group of rows
        made = first.new_zeros(len(first), second.shape[2], dtype=dtype)
        for number, (start, end) in enumerate(groups):
            made[start:end] = first[start:end] @ second[number]
    elif (first.dim(), second.dim()) == (_MATRICES, _MATRIX):  # one for each group of columns
        made = first.new_zeros(first.shape[1], second.shape[1], dtype=dtype)
        for number, (start, end) in enumerate(groups):
            made[:, start:end] = first[number] @ second[:, start:end]
    else:  # the groups are parts of the sums
        made = first.new_zeros(len(groups), len(first), second.shape[1], dtype=dtype)
        for number, (start, end) in enumerate(groups):
            made[number] = first[:, start:end] @ second[start:end]
    return made
