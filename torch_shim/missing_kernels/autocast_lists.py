"""Operators that CUDA's autocast runs in float32, and the CPU's in the dtype of their arguments."""

from typing import Any

import torch

_NARROW = frozenset({torch.float16, torch.bfloat16})

# CUDA's list, and the functions of torch.nn.functional that consist of them.
_LISTED = (
    "__pow__ __rpow__ acos asin cdist cosh cosine_embedding_loss cosine_similarity cross_entropy "
    "cumprod cumsum dist erfinv exp expm1 group_norm hinge_embedding_loss huber_loss "
    "interpolate kl_div l1_loss layer_norm log log10 log1p log2 log_softmax logsumexp "
    "margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss native_layer_norm "
    "nll_loss norm normalize pdist poisson_nll_loss pow prod reciprocal renorm rsqrt sinh "
    "smooth_l1_loss soft_margin_loss softmax softmin softplus sum tan triplet_margin_loss upsample "
    "binary_cross_entropy_with_logits"
)
FLOAT32 = frozenset(_LISTED.split())


def widened(
    args: tuple[Any, ...], kwargs: dict[str, Any], kind: type[torch.Tensor] = torch.Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with narrow tensors of this class in float32."""

    def wide(value: Any) -> Any:
        return value.float() if isinstance(value, kind) and value.dtype in _NARROW else value

    return tuple(map(wide, args)), {name: wide(value) for name, value in kwargs.items()}
