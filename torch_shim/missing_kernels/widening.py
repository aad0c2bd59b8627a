"""Operators that CUDA computes in narrow dtypes and the CPU only in wide ones.

They are computed in the wide dtype, and the results are rounded to the dtype that CUDA returns.
"""

from typing import Any

import torch
from torch.utils import _pytree as pytree

from torch_shim.missing_kernels.choice import Substitute, into_out, is_in_place

_WIDE = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.complex32: torch.complex64,
}
_HALF = frozenset({torch.float16})
_HALVES = frozenset({torch.float16, torch.bfloat16})
_COMPLEX_HALF = frozenset({torch.complex32})
_NARROW = _HALVES | _COMPLEX_HALF


def _rows(dtypes: frozenset[torch.dtype], names: str) -> dict[str, frozenset[torch.dtype]]:
    return dict.fromkeys(names.split(), dtypes)


_FOURIER = _rows(
    _NARROW,
    "fft fft2 fftn ifft ifft2 ifftn hfft hfft2 hfftn irfft irfft2 irfftn rfft rfft2 rfftn ihfft "
    "ihfft2 ihfftn stft istft",
)
# Operator to the dtypes that it is widened for; made from torch's own tables of operators.
TABLE: dict[str, frozenset[torch.dtype]] = {
    **_rows(
        _COMPLEX_HALF,
        "acos acosh angle arccos arccosh arcsin arcsinh arctan arctanh asin asinh atan atanh "
        "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution cos "
        "cosh diag div divide exp lerp log logaddexp pow prod rsqrt sigmoid expit sin sinh sqrt "
        "sum tan tanh true_divide __div__ __itruediv__ __idiv__ __ipow__ __pow__ __rpow__ "
        "__rtruediv__ __rdiv__ __truediv__ truediv",
    ),
    **_rows(
        _HALVES,
        "_upsample_bilinear2d_aa _upsample_bicubic2d_aa avg_pool3d interpolate multi_margin_loss "
        "multilabel_margin_loss sampled_addmm",
    ),
    **_rows(
        _HALF,
        "rrelu rrelu_with_noise polygamma round batched_nms deform_conv2d nms ps_roi_align "
        "ps_roi_pool roi_align roi_pool",
    ),
    **_rows(_NARROW, "trace"),
    **_FOURIER,
}


def of(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Substitute | None:
    """Return what computes an operator in wide dtypes, if the table has it for these arguments."""
    dtypes = TABLE.get(name, frozenset())
    leaves = pytree.tree_leaves((args, kwargs))
    if not any(_dtype_of(leaf) in dtypes for leaf in leaves):
        return None
    # CUDA's Fourier transforms of bfloat16 return what those of float32 return.
    kept = name in _FOURIER and not any(
        _dtype_of(leaf) in {torch.float16, torch.complex32} for leaf in leaves
    )
    narrow = {} if kept else _narrow_dtypes(leaves)

    def compute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _widened(func, args, kwargs, narrow)

    return compute


def _dtype_of(leaf: Any) -> torch.dtype | None:
    if isinstance(leaf, torch.Tensor):
        return leaf.dtype
    return leaf if isinstance(leaf, torch.dtype) else None


def _narrow_dtypes(leaves: list[Any]) -> dict[torch.dtype, torch.dtype]:
    """Return what the wide results become: nothing else if an argument is that wide itself."""
    dtypes = {leaf.dtype for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()}
    dtypes |= {leaf for leaf in leaves if isinstance(leaf, torch.dtype)}
    dtypes = dtypes or {leaf.dtype for leaf in leaves if isinstance(leaf, torch.Tensor)}
    if dtypes & {torch.float32, torch.complex64} or dtypes >= _HALVES:
        return {}
    real = torch.bfloat16 if torch.bfloat16 in dtypes else torch.float16
    return {torch.float32: real, torch.complex64: torch.complex32}


def _widened(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    narrow: dict[torch.dtype, torch.dtype],
) -> Any:
    out = kwargs.get("out")
    wide_args, wide_kwargs = pytree.tree_map(
        _wide, (args, {name: value for name, value in kwargs.items() if name != "out"})
    )
    result = pytree.tree_map(
        lambda leaf: (
            leaf.to(narrow.get(leaf.dtype, leaf.dtype)) if isinstance(leaf, torch.Tensor) else leaf
        ),
        func(*wide_args, **wide_kwargs),
    )
    if out is not None:
        return into_out(out, result)
    if kwargs.get("inplace") or is_in_place(func):
        return args[0].copy_(result)
    return result


def _wide(leaf: Any) -> Any:
    """Return a wide copy of a narrow tensor, the wide one of a narrow dtype, or the value."""
    if isinstance(leaf, torch.dtype):
        return _WIDE.get(leaf, leaf)
    if isinstance(leaf, torch.Tensor) and leaf.dtype in _WIDE:
        return leaf.to(_WIDE[leaf.dtype])
    return leaf
