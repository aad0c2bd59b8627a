"""Operators that CUDA's autocast runs in float32, and the CPU's in the dtype of their arguments."""

from typing import Any

import torch

_NARROW = frozenset({torch.float16, torch.bfloat16})

# CUDA's list, and the functions of torch that consist of them.
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
        return value.float() if isinstance(value, kind) and value.dtype in _NARROW else value

    return tuple(map(wide, args)), {name: wide(value) for name, value in kwargs.items()}
