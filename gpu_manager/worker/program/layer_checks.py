"""What has to hold of the weights, states and indices of whole layers.

The kernels read as much of each as the others promise.
"""

from collections.abc import Sequence
from typing import Any

import torch

from torch_shim.kernels.padded_encoder import LAYER_WEIGHTS, layer_arguments

_STATIC = slice(21, 23)  # keys and values given to torch.nn.functional's attention
_ENCODER_ARGUMENTS = 15  # weights, and what lies between them
_HEADS_ARGUMENTS = 4  # the weights of attention alone
LSTM_GATES, GRU_GATES, PLAIN_GATES = 4, 3, 1


def require(holds: object, what: str, *values: object) -> None:
    """Raise ValueError with this text, which has room for the values, unless it holds."""
    if not holds:
        raise ValueError(what.format(*values))


def require_values(hold: torch.Tensor, what: str) -> None:
    """Have the device assert it: on a GPU that costs no wait, and ends the worker."""
    torch._assert_async(hold.all(), what)  # noqa: SLF001 - torch has no public one


def require_within(indices: torch.Tensor, size: int, what: str) -> None:
    """Every index is one of so many things."""
    if indices.numel():
        require_values((indices >= 0) & (indices < size), what)


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> None:
    """Kernels read as many keys as there are values."""
    for tensor in (query, key, value):
        require(tensor.dim() > 1, "attention over shape {}", tensor.shape)
    require(key.size(-2) == value.size(-2), "{} keys, {} values", key.size(-2), value.size(-2))
    require(query.size(-1) == key.size(-1), "queries of {}", query.size(-1))


def heads(*arguments: Any, static_k: Any = None, static_v: Any = None, **_: Any) -> None:
    """Its own checks do not compare keys and values that it did not compute."""
    given = (*arguments[_STATIC], static_k, static_v)
    require(all(value is None for value in given), "keys and values are computed")


def embedding_bag(
    weight: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor | None = None,
    scale_grad_by_freq: Any = None,
    mode: Any = None,
    sparse: Any = None,
    per_sample_weights: torch.Tensor | None = None,
    *_more: Any,
    **_: Any,
) -> None:
    """Indices lie in the table, and offsets in the indices, in order."""
    del scale_grad_by_freq, mode, sparse
    _bags(weight, indices, offsets, per_sample_weights)


def functional_embedding_bag(
    input: torch.Tensor,  # noqa: A002 - torch's name
    weight: torch.Tensor,
    offsets: torch.Tensor | None = None,
    *more: Any,
    per_sample_weights: torch.Tensor | None = None,
    **_: Any,
) -> None:
    """The same, in the order of `torch.nn.functional`."""
    place = 5  # of the weights, behind the offsets
    _bags(weight, input, offsets, more[place] if len(more) > place else per_sample_weights)


def _bags(
    weight: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor | None,
    per_sample_weights: torch.Tensor | None,
) -> None:
    require(weight.dim() == 2, "a table of shape {}", weight.shape)  # noqa: PLR2004 - a table
    require_within(indices, weight.size(0), "an index beyond the table")
    if isinstance(per_sample_weights, torch.Tensor):
        require(per_sample_weights.shape == indices.shape, "not one weight an index")
    if offsets is None:
        return
    require(offsets.dim() == 1 and indices.dim() == 1, "offsets into one list of indices")
    if not offsets.numel():
        require(not indices.numel(), "indices without an offset")
        return
    require_within(offsets, indices.numel() + 1, "an offset beyond the indices")
    require_values(offsets[:1] == 0, "the first offset is not 0")
    require_values(offsets[1:] >= offsets[:-1], "offsets out of order")


def encoder_layer(
    src: torch.Tensor,
    embed_dim: int,
    num_heads: int,
    *more: Any,
    mask: torch.Tensor | None = None,
    mask_type: int | None = None,
) -> None:
    """The kernels read as much of the weights and of the mask as the sizes promise."""
    weights, options = more[:_ENCODER_ARGUMENTS], more[_ENCODER_ARGUMENTS:]
    require(len(weights) == _ENCODER_ARGUMENTS, "too few weights")
    mask, mask_type = (*options, mask, mask_type)[:2] if options else (mask, mask_type)
    size = embed_dim
    require(src.dim() == len("BLE") and src.size(2) == size, "input of shape {}", src.shape)
    require(num_heads > 0 and size > 0 and size % num_heads == 0, "{} heads of {}", num_heads, size)
    qkv, qkv_bias, out, out_bias, _, _, _, norm, norm_bias, norm_2, norm_2_bias = weights[:11]
    wide, wide_bias, narrow, narrow_bias = weights[11:]
    inner = wide.size(0)
    _shapes(
        (wide, (inner, size)),
        (wide_bias, (inner,)),
        (narrow, (size, inner)),
        *((vector, (size,)) for vector in (norm, norm_bias, norm_2, norm_2_bias, narrow_bias)),
    )
    _attention_weights(size, qkv, qkv_bias, out, out_bias)
    _mask(src, num_heads, mask, mask_type)


def native_heads(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    size: int,
    heads: int,
    *more: Any,
    mask: torch.Tensor | None = None,
    **named: Any,
) -> None:
    """As for `encoder_layer`, of its attention alone."""
    weights, options = more[:_HEADS_ARGUMENTS], more[_HEADS_ARGUMENTS:]
    require(len(weights) == _HEADS_ARGUMENTS, "too few weights")
    mask = options[0] if options else mask
    mask_type = options[3] if len(options) > len("mnv") else named.get("mask_type")
    require(query.dim() == len("BLE") and query.size(2) == size, "queries of {}", query.shape)
    require(query.shape == key.shape == value.shape, "keys of shape {}", key.shape)
    require(heads > 0 and size > 0 and size % heads == 0, "{} heads of {}", heads, size)
    _attention_weights(size, *weights)
    _mask(query, heads, mask, mask_type)


def padded_encoder(
    source: torch.Tensor,
    padding: torch.Tensor,
    mask_check: Any,
    heads: int,
    use_gelu: Any,
    epsilon: float,
    weights: Sequence[torch.Tensor],
) -> None:
    """Every layer holds to what `encoder_layer` asks for, and the mask to the source."""
    del mask_check
    require(source.dim() == len("BLE"), "input of shape {}", source.shape)
    require(padding.shape == source.shape[:2], "a mask of shape {}", padding.shape)
    require(weights and len(weights) % LAYER_WEIGHTS == 0, "{} weights", len(weights))
    for first in range(0, len(weights), LAYER_WEIGHTS):
        layer = weights[first : first + LAYER_WEIGHTS]
        encoder_layer(
            source, *layer_arguments(source.size(2), heads, bool(use_gelu), epsilon, layer)
        )


def _attention_weights(
    size: int,
    qkv: torch.Tensor,
    qkv_bias: torch.Tensor,
    out: torch.Tensor,
    out_bias: torch.Tensor,
) -> None:
    _shapes(
        (qkv, (3 * size, size)),
        (qkv_bias, (3 * size,)),
        (out, (size, size)),
        (out_bias, (size,)),
    )


def _shapes(*expected: tuple[torch.Tensor, tuple[int, ...]]) -> None:
    for weight, shape in expected:
        require(weight.shape == shape, "weights of shape {}, not {}", weight.shape, shape)


def _mask(
    source: torch.Tensor, num_heads: int, mask: torch.Tensor | None, mask_type: int | None
) -> None:
    batch, length = source.shape[:2]
    shapes = ((length, length), (batch, length), (batch, num_heads, length, length))
    if mask is not None:
        require(mask_type in range(len(shapes)), "a mask of type {}", mask_type)
        require(mask.shape == shapes[mask_type or 0], "a mask of shape {}", mask.shape)


def recurrent(gates: int, *arguments: Any) -> None:
    """The kernels read as much of states and weights as the first of them promises.

    Both forms: a padded batch, and packed sequences with their batch sizes.
    """
    require(len(arguments) == len(("data", "sizes", *"hwbldtr")), "nine arguments")
    if not isinstance(arguments[3], (list, tuple)):
        data, states, weights, has_biases, layers, _, _, both_ways, batch_first = arguments
        require(data.dim() == len("TNF"), "sequences of shape {}", data.shape)
        batch = data.size(0 if batch_first else 1)
    else:
        data, sizes, states, weights, has_biases, layers, _, _, both_ways = arguments
        batch = _packed_batch(data, sizes)
    states = states if isinstance(states, (list, tuple)) else (states,)
    directions = 2 if both_ways else 1
    each, left = divmod(len(weights), layers * directions) if layers > 0 else (0, 1)
    plain = 4 if has_biases else 2
    projected = gates == LSTM_GATES and each == plain + 1
    require(not left and (each == plain or projected), "{} weights", len(weights))
    hidden, out = _sizes(weights, gates, projected=projected)
    for number, weight in enumerate(weights):
        layer, place = number // (each * directions), number % each
        inputs = out * directions if layer else data.size(-1)
        expected: list[tuple[int, ...]] = [(gates * hidden, inputs), (gates * hidden, out)]
        expected += [(gates * hidden,)] * (plain - 2) + [(out, hidden)]
        require(weight.shape == expected[place], "weights of shape {}", weight.shape)
    for state, size in zip(states, (out, hidden), strict=False):
        shape = (layers * directions, batch, size)
        require(state.shape == shape, "a state of shape {}, not {}", state.shape, shape)
    require(len(states) == (2 if gates == LSTM_GATES else 1), "{} states", len(states))


def _packed_batch(data: torch.Tensor, sizes: torch.Tensor) -> int:
    """How many sequences are packed. Their batch sizes lie on the CPU, as torch wants it."""
    require(data.dim() == 2 and sizes.dim() == 1, "packed sequences and their batch sizes")  # noqa: PLR2004 - rows
    require(sizes.device.type == "cpu" and sizes.dtype is torch.int64, "batch sizes on the CPU")
    counts: list[int] = sizes.tolist()
    require(counts and counts[-1] > 0 and sum(counts) == data.size(0), "batch sizes of the data")
    require(sorted(counts, reverse=True) == counts, "batch sizes that fall")
    return counts[0]


def _sizes(weights: Sequence[torch.Tensor], gates: int, *, projected: bool) -> tuple[int, int]:
    first = weights[0]
    require(first.dim() == 2 and first.size(0) % gates == 0, "weights of shape {}", first.shape)  # noqa: PLR2004 - rows and columns
    hidden = first.size(0) // gates
    if not projected:
        return hidden, hidden
    require(weights[1].dim() == 2, "weights of shape {}", weights[1].shape)  # noqa: PLR2004 - as above
    return hidden, weights[1].size(1)
