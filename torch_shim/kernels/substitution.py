"""Runs an operator; where CUDA has a kernel and the CPU lacks it, runs the substitute."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from torch_shim.errors import UnsupportedCall
from torch_shim.kernels import dtypes
from torch_shim.kernels.dtypes import (
    Choice,
    Substitute,
    always,
    into_out,
    is_float32,
    refusing,
    widened,
)

Operator = Callable[..., Any]


def has_substitute(name: str) -> bool:
    """Whether the CPU computes any dtype or form of this operator otherwise than CUDA."""
    stem = _stem(name)
    return is_float32(name) or stem in _BY_NAME or stem in dtypes.WIDENED


def with_substitute(operator: Operator, name: str) -> Operator:
    """Return the operator as CUDA computes it: with its substitute where the CPU lacks a kernel."""
    is_widened = is_float32(name)

    def call(*args: Any, **kwargs: Any) -> Any:
        if is_widened and torch.is_autocast_enabled("cpu"):  # CUDA's, of a GPU that is none
            args, kwargs = widened(args, kwargs)
        try:
            return operator(*args, **kwargs)
        except RuntimeError:
            substitute = find(name, args, kwargs)
            if substitute is None:
                raise
        return substitute(operator, args, kwargs)

    # Not the operator's own name: torch.fx writes a function of torch as that name.
    call.__name__ = call.__qualname__ = f"{_stem(name).strip('_')}_with_substitute"
    return call


def arguments_of_node(
    node: fx.Node, args: Any, kwargs: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments as CUDA's autocast, if that is on, gives them to a node's operator."""
    if torch.is_autocast_enabled("cpu") and is_float32(operator_of(node)[1]):
        return widened(tuple(args), kwargs)
    return args, kwargs


def of_node(node: fx.Node, args: Any, kwargs: Any) -> Callable[[], Any] | None:
    """Return what traces a node's operator where the CPU cannot even trace it."""
    operator, name = operator_of(node)
    substitute = None if operator is None else find(name, tuple(args), kwargs)
    if substitute is None:
        return None
    return functools.partial(substitute, operator, tuple(args), kwargs)


def operator_of(node: fx.Node) -> tuple[Any, str]:
    """Return the operator that a node calls, and its name; None for other nodes."""
    if node.op == "call_method":
        return getattr(torch.Tensor, str(node.target), None), str(node.target)
    if node.op == "call_function":
        return node.target, name_of(node.target)
    return None, ""


def find(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Substitute | None:
    stem = _stem(name)
    choose = _BY_NAME.get(stem)
    substitute = None if choose is None else choose(args, kwargs)
    return substitute or dtypes.wide_substitute(stem, args, kwargs)


def name_of(operator: object) -> str:
    """Return the name of an operator, that of its packet for an overload."""
    if isinstance(operator, torch._ops.OpOverload):  # noqa: SLF001 - the type's only location
        operator = operator.overloadpacket
    name: str = getattr(operator, "__name__", "")
    return name


def _stem(name: str) -> str:
    """Return the name without the prefix of its namespace and the underscore of `in place`."""
    for prefix in ("fft_", "special_", "sparse_"):
        name = name.removeprefix(prefix)
    return name if name.endswith("__") else name.rstrip("_")


_NARROW = frozenset({torch.float16, torch.bfloat16})
_REMEDY = "call the public function of torch that computes the same"
# Tensors before `out_dtype` in the registered operators; torch's functions take it by name.
_PRODUCTS = {"mm": 2, "bmm": 2, "addmm": 3, "baddbmm": 3}


def _product(tensors: int) -> Choice:
    def choose(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Substitute | None:
        given = len(args) > tensors and isinstance(args[tensors], torch.dtype)
        return compute if given or "out_dtype" in kwargs else None

    def compute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        del func
        named = dict(kwargs)
        dtype = named.pop("out_dtype", None) or args[tensors]
        factors = args[:tensors]
        dtypes = {factor.dtype for factor in factors[-2:]}
        if dtypes != {dtype} and not (dtype is torch.float32 and dtypes <= _NARROW):
            raise RuntimeError(
                "out_dtype must be the same as input dtype or fp32 for fp16/bf16 inputs"
            )
        out = named.pop("out", None)
        product = getattr(torch, _PRODUCT_OF[tensors][factors[-1].dim()])
        wide = [factor.to(dtype) for factor in factors]
        result: torch.Tensor = product(*wide, *args[tensors + 1 :], **named)
        return into_out(out, result)

    return choose


# By the number of tensors and the dimensions of the factors.
_PRODUCT_OF = {2: {2: "mm", 3: "bmm"}, 3: {2: "addmm", 3: "baddbmm"}}


# Of `torch.nn.functional.ScalingType`: a scale for all of a factor, or one for each of its rows.
_PLAIN_SCALES = ((0, 0), (1, 1))
_SCALES_OF_BLOCKS = "torch.nn.functional.scaled_mm with scales of blocks"


def _scaled_product(  # noqa: PLR0913, PLR0917 - PyTorch's signature
    first: torch.Tensor,
    second: torch.Tensor,
    scale_a: Sequence[torch.Tensor],
    recipe_a: Sequence[int],
    swizzle_a: Sequence[int],
    scale_b: Sequence[torch.Tensor],
    recipe_b: Sequence[int],
    swizzle_b: Sequence[int],
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *_: object,
    **__: object,
) -> torch.Tensor:
    """Scale what the CPU's own kernel, which knows one scale for all of a factor, computes."""
    del swizzle_a, swizzle_b  # an order of the scales of blocks
    if (*recipe_a, *recipe_b) not in _PLAIN_SCALES:
        raise UnsupportedCall(_SCALES_OF_BLOCKS, "scale whole tensors or rows")
    one = torch.ones((), device=first.device)
    product = torch._scaled_mm(first, second, one, one, out_dtype=torch.float32)  # noqa: SLF001 - what the public function itself calls
    product = product * scale_a[0].reshape(-1, 1) * scale_b[0].reshape(1, -1)
    return (product if bias is None else product + bias).to(out_dtype or first.dtype)


def _convolved(
    source: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> torch.Tensor:
    none = [0] * len(stride)
    return torch.convolution(source, weight, bias, stride, padding, dilation, False, none, groups)


def _convolution_add_relu(
    source: torch.Tensor,
    weight: torch.Tensor,
    z: torch.Tensor,
    alpha: float | None,
    bias: torch.Tensor | None,
    *shape: Any,
) -> torch.Tensor:
    sum_ = _convolved(source, weight, bias, *shape).add_(z, alpha=1 if alpha is None else alpha)
    return sum_.relu_()


def _depthwise(
    source: torch.Tensor,
    weight: torch.Tensor,
    kernel_size: Sequence[int],
    bias: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> torch.Tensor:
    del kernel_size
    return _convolved(source, weight, bias, stride, padding, dilation, source.shape[1])


def _fused_dropout(
    source: torch.Tensor, kept: float, generator: torch.Generator | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    mask = torch.empty_like(source).bernoulli_(kept, generator=generator)
    return source * mask / kept, mask.to(torch.uint8)


_REFUSED = """
_convert_weight_to_int4pack _cslt_compress _cslt_sparse_mm _cslt_sparse_mm_search
_cudnn_attention_backward _cudnn_attention_forward _cudnn_attention_forward_no_dropout_inplace
_cudnn_ctc_loss _cudnn_init_dropout_state _cudnn_rnn _cudnn_rnn_backward _cudnn_rnn_flatten_weight
_efficient_attention_backward _efficient_attention_forward _fill_mem_eff_dropout_mask
_flash_attention_backward _flash_attention_forward _flash_attention_forward_no_dropout_inplace
_fused_rms_norm_backward _mixed_dtypes_linear _scaled_addmm _scaled_grouped_mm
_scaled_grouped_mm_v2 _scaled_dot_product_cudnn_attention
_scaled_dot_product_cudnn_attention_backward
_scaled_dot_product_efficient_attention_backward _scaled_dot_product_flash_attention_backward
_sparse_semi_structured_addmm _sparse_semi_structured_apply _sparse_semi_structured_apply_dense
_sparse_semi_structured_linear _sparse_semi_structured_mm _sparse_semi_structured_tile
_thnn_fused_gru_cell _thnn_fused_gru_cell_backward _thnn_fused_lstm_cell
_thnn_fused_lstm_cell_backward_impl _to_sparse_semi_structured _triton_multi_head_attention
_triton_scaled_dot_attention _use_cudnn_ctc_loss _weight_int4pack_mm batch_norm_backward_elemt
batch_norm_backward_reduce batch_norm_elemt batch_norm_gather_stats
batch_norm_gather_stats_with_counts batch_norm_stats cudnn_affine_grid_generator_backward
cudnn_batch_norm_backward cudnn_grid_sampler_backward
"""

Tensor = torch.Tensor


def _public(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Substitute | None:
    """Serve a program that left torch only kernels which the CPU has not."""
    if torch._C._get_math_sdp_enabled():  # noqa: SLF001 - the public function has no types
        return None
    return always(_attention)(args, kwargs)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,  # noqa: FBT001, FBT002 - PyTorch's signature
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    result: tuple[Tensor, Tensor] = torch._scaled_dot_product_attention_math(  # noqa: SLF001 - the one that no switch turns off
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    return result[0]


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,  # noqa: FBT001, FBT002 - PyTorch's signature
    return_debug_mask: bool = False,  # noqa: FBT001, FBT002 - see above
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    _refuse("_scaled_dot_product_flash_attention", dropout_p, return_debug_mask)
    output, logsumexp = _with_logsumexp(query, key, value, None, is_causal, scale)
    return output, logsumexp, None, None, query.shape[2], key.shape[2], *_no_state(), output[:0]


def _efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,  # noqa: FBT001 - PyTorch's signature
    dropout_p: float = 0.0,
    is_causal: bool = False,  # noqa: FBT001, FBT002 - see above
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    _refuse("_scaled_dot_product_efficient_attention", dropout_p, returns_mask=False)
    output, logsumexp = _with_logsumexp(query, key, value, attn_bias, is_causal, scale)
    return output, logsumexp if compute_log_sumexp else logsumexp[..., :0], *_no_state()


def _with_logsumexp(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    is_causal: bool,  # noqa: FBT001 - an argument of every caller
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = query.float() @ key.float().transpose(-2, -1) * factor
    if bias is not None:
        scores = scores + bias
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    output = scores.softmax(-1) @ value.float()
    return output.to(query.dtype), scores.logsumexp(-1)


def _no_state() -> tuple[Tensor, Tensor]:
    return torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int64)


def _refuse(name: str, dropout: float, returns_mask: bool) -> None:  # noqa: FBT001 - an argument of every caller
    if dropout or returns_mask:
        raise UnsupportedCall(
            f"torch.ops.aten.{name} with dropout",
            "call torch.nn.functional.scaled_dot_product_attention",
        )


SUBSTITUTES: dict[str, Choice] = {
    **{name: _product(tensors) for name, tensors in _PRODUCTS.items()},
    **{name: refusing(name, _REMEDY) for name in _REFUSED.split()},
    "_scaled_mm_v2": always(_scaled_product),
    "cudnn_convolution": always(
        lambda source, weight, padding, stride, dilation, groups, *_: _convolved(
            source, weight, None, stride, padding, dilation, groups
        )
    ),
    "cudnn_convolution_transpose": always(
        lambda source, weight, padding, output_padding, stride, dilation, groups, *_: (
            torch.convolution(
                source, weight, None, stride, padding, dilation, True, output_padding, groups
            )
        )
    ),
    "cudnn_convolution_relu": always(
        lambda source, weight, bias, *shape: _convolved(source, weight, bias, *shape).relu_()
    ),
    "cudnn_convolution_add_relu": always(_convolution_add_relu),
    **dict.fromkeys(("_conv_depthwise2d", "conv_depthwise3d"), always(_depthwise)),
    "cudnn_batch_norm": always(
        lambda *args: (*torch.native_batch_norm(*args), torch.empty(0, dtype=torch.uint8))
    ),
    "cudnn_affine_grid_generator": always(
        lambda theta, *size: torch.affine_grid_generator(theta, size, True)
    ),
    "cudnn_grid_sampler": always(lambda source, grid: torch.grid_sampler(source, grid, 0, 0, True)),
    "_fused_dropout": always(_fused_dropout),
    "_masked_scale": always(lambda source, mask, scale: source * mask * scale),
    "scaled_dot_product_attention": _public,
    "_scaled_dot_product_flash_attention": always(_flash),
    "_scaled_dot_product_efficient_attention": always(_efficient),
}


_BY_NAME: dict[str, Choice] = {**dtypes.REDUCTIONS, **SUBSTITUTES}
