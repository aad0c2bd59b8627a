"""Operators that CUDA computes in other dtypes than the CPU: in float32, whole or narrow ones."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torch_shim.errors import UnsupportedCall

_NARROW_FLOATS = frozenset({torch.float16, torch.bfloat16})

# What CUDA's autocast runs in float32, and the CPU's in the dtype of their arguments: CUDA's list,
# and the functions of torch that consist of them.
_LISTED = (
    "__pow__ __rpow__ acos arccos arcsin asin cdist cosh cosine_embedding_loss cosine_similarity "
    "cross_entropy cumprod cumsum dist erfinv exp expm1 frobenius_norm gaussian_nll_loss "
    "group_norm gumbel_softmax hinge_embedding_loss huber_loss "
    "interpolate kl_div l1_loss layer_norm log log10 log1p log2 log_softmax logsumexp "
    "margin_ranking_loss matrix_norm mse_loss multi_margin_loss multilabel_margin_loss "
    "native_layer_norm nll_loss nll_loss2d nll_loss_nd norm normalize nuclear_norm "
    "pairwise_distance pdist poisson_nll_loss pow prod reciprocal renorm rsqrt sinh "
    "smooth_l1_loss soft_margin_loss softmax softmin softplus sum tan triplet_margin_loss upsample "
    "upsample_bilinear upsample_nearest vector_norm binary_cross_entropy_with_logits"
)
_IN_LATER_TORCH = "rms_norm"
_FLOAT32 = frozenset(_LISTED.split()) | (
    {_IN_LATER_TORCH}
    if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{_IN_LATER_TORCH}", "AutocastCUDA")  # noqa: SLF001 - torch has no public way to ask
    else frozenset()
)


def is_float32(name: str) -> bool:
    """Whether CUDA's autocast runs the operator of this name in float32."""
    return name.removeprefix("special_").removeprefix("linalg_") in _FLOAT32


def widened(
    args: tuple[Any, ...], kwargs: dict[str, Any], kind: type[torch.Tensor] = torch.Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with narrow tensors of this class in float32.

    Where the call says of which dtype its result is, CUDA's autocast leaves it as it is.
    """
    if kwargs.get("out") is not None or kwargs.get("dtype") is not None:
        return args, kwargs

    def wide(value: Any) -> Any:
        return value.float() if isinstance(value, kind) and value.dtype in _NARROW_FLOATS else value

    return tuple(map(wide, args)), {name: wide(value) for name, value in kwargs.items()}


# Reductions and writes by index that CUDA has for dtypes that no CPU kernel takes.

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


# A substitute gets the operator and its arguments, and returns the result.
Substitute = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
# A choice gets the arguments of a call that the CPU refused; None if there is no substitute.
Choice = Callable[[tuple[Any, ...], dict[str, Any]], Substitute | None]


def always(function: Callable[..., Any]) -> Choice:
    substitute = _calling(function)
    return lambda _args, _kwargs: substitute


def for_dtypes(dtypes: frozenset[torch.dtype], function: Callable[..., Any]) -> Choice:
    """Compute with this function if the first argument has one of these dtypes."""
    return substituting(dtypes, _calling(function))


def substituting(dtypes: frozenset[torch.dtype], substitute: Substitute) -> Choice:
    """Use this substitute if the first argument has one of these dtypes."""

    def choose(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Substitute | None:
        first = args[0] if args else kwargs.get("input", kwargs.get("self"))
        return substitute if isinstance(first, torch.Tensor) and first.dtype in dtypes else None

    return choose


def refusing(name: str, remedy: str) -> Choice:
    """Raise UnsupportedCall, which names the operator and the remedy."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise UnsupportedCall(f"torch.ops.aten.{name}", remedy)

    return always(refuse)


def into_out(out: torch.Tensor | None, result: Any) -> Any:
    return result if out is None else out.resize_(result.shape).copy_(result)


def is_in_place(operator: Any) -> bool:
    """Whether the operator's name says that it writes to its first argument."""
    name: str = getattr(operator, "__name__", "").partition(".")[0]
    if name.startswith("__"):
        return name.startswith("__i")
    return name.endswith("_")


def _calling(function: Callable[..., Any]) -> Substitute:
    def compute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        del func
        named = {name: value for name, value in kwargs.items() if name != "out"}
        return into_out(kwargs.get("out"), function(*args, **named))

    return compute


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


# Operators that CUDA computes in narrow dtypes and the CPU only in wide ones.
#
# They are computed in the wide dtype, and the results are rounded to the dtype that CUDA returns.

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
WIDENED: dict[str, frozenset[torch.dtype]] = {
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


def wide_substitute(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Substitute | None:
    """Return what computes an operator in wide dtypes, if the table has it for these arguments."""
    dtypes = WIDENED.get(name, frozenset())
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
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], narrow: dict[torch.dtype, torch.dtype]
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
