"""The layers of `nn.TransformerEncoder` over padded sequences, as PyTorch runs them in evaluation.

PyTorch leaves the padding out where it stands behind the sequences: it computes with a nested
tensor, whose padding is zero when it becomes dense again. Which way it takes depends on the values
of the mask, so no graph holds that, and tracing takes another way with other numbers. This one
operator, `torch.ops.gpufaas.padded_encoder`, decides when it runs.
"""

from collections.abc import Sequence
from typing import Any

import torch

# Of each layer, in the order of `torch._transformer_encoder_layer_fwd`.
ATTENTION_WEIGHTS, OTHER_WEIGHTS = 4, 8
LAYER_WEIGHTS = ATTENTION_WEIGHTS + OTHER_WEIGHTS
# Of `_transformer_encoder_layer_fwd`: the mask says for each key whether it is padding.
_KEY_PADDING = 1


@torch.library.custom_op("gpufaas::padded_encoder", mutates_args=())
def padded_encoder(
    source: torch.Tensor,
    padding: torch.Tensor,
    mask_check: bool,  # noqa: FBT001 - a schema's parameters are positional
    heads: int,
    use_gelu: bool,  # noqa: FBT001 - see above
    epsilon: float,
    weights: Sequence[torch.Tensor],
) -> torch.Tensor:
    """Return what the layers make of `source`; `padding` is not zero at the keys left out.

    Without `mask_check` the padding is believed to stand behind the sequences.
    """
    layers = [
        layer_arguments(source.size(2), heads, use_gelu, epsilon, weights[first:])
        for first in range(0, len(weights), LAYER_WEIGHTS)
    ]
    present = padding.logical_not()
    if mask_check and not torch._nested_tensor_from_mask_left_aligned(source, present):  # noqa: SLF001 - as torch's module does
        return _run(source, layers, (padding, _KEY_PADDING))
    nested = torch._nested_tensor_from_mask(source, present, mask_check=False)  # noqa: SLF001 - as torch's module does
    return _run(nested, layers, ()).to_padded_tensor(0.0, source.size())


@padded_encoder.register_fake
def _shape(source: torch.Tensor, *_: Any) -> torch.Tensor:
    return source.new_empty(source.shape)


def layer_arguments(
    size: int,
    heads: int,
    use_gelu: bool,  # noqa: FBT001 - see above
    epsilon: float,
    weights: Sequence[torch.Tensor],
) -> list[Any]:
    """Return what one layer gives to `torch._transformer_encoder_layer_fwd` behind the source."""
    attention, others = weights[:ATTENTION_WEIGHTS], weights[ATTENTION_WEIGHTS:LAYER_WEIGHTS]
    return [size, heads, *attention, use_gelu, False, epsilon, *others]


def _run(
    source: torch.Tensor, layers: Sequence[Sequence[Any]], mask: tuple[Any, ...]
) -> torch.Tensor:
    for layer in layers:
        source = torch._transformer_encoder_layer_fwd(source, *layer, *mask)  # noqa: SLF001 - as torch's module does
    return source
