"""Attention by the names of CUDA's kernels; the CPU computes all of them in the same way."""

from typing import Any

import torch

from torch_shim.errors import UnsupportedCall
from torch_shim.missing_kernels.choice import Choice, Substitute, always

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
    """Return what stands for the random state of a kernel without dropout."""
    return torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int64)


def _refuse(name: str, dropout: float, returns_mask: bool) -> None:  # noqa: FBT001 - an argument of every caller
    if dropout or returns_mask:
        raise UnsupportedCall(
            f"torch.ops.aten.{name} with dropout",
            "call torch.nn.functional.scaled_dot_product_attention",
        )


SUBSTITUTES: dict[str, Choice] = {
    "scaled_dot_product_attention": _public,
    "_scaled_dot_product_flash_attention": always(_flash),
    "_scaled_dot_product_efficient_attention": always(_efficient),
}
