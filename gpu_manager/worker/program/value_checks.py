"""What has to hold of the arguments of some operators, because their kernels believe it.

A check raises ValueError, or has the device assert what only the values in a tensor show: on a GPU
that costs no wait, and ends the worker instead of the check.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

_INTERPOLATIONS = _PADDINGS = _REDUCTIONS = range(3)
_STATIC = slice(21, 23)  # keys and values given to torch.nn.functional's attention
_DEFORMED_ARGUMENTS = 14
_BOX_FIELDS = 5  # the number of the image, then two corners
_ENCODER_ARGUMENTS = 15  # weights, and what lies between them
_LSTM_GATES, _GRU_GATES, _PLAIN_GATES = 4, 3, 1


def _require(holds: object, what: str, *values: object) -> None:
    if not holds:
        raise ValueError(what.format(*values))


def _require_values(hold: torch.Tensor, what: str) -> None:
    torch._assert_async(hold.all(), what)  # noqa: SLF001 - torch has no public one


def _within(indices: torch.Tensor, size: int, what: str) -> None:
    if indices.numel():
        _require_values((indices >= 0) & (indices < size), what)


def grid_sampler(
    _input: Any, _grid: Any, interpolation_mode: int, padding_mode: int, align_corners: Any
) -> None:
    """A mode that does not exist leaves the result unwritten."""
    del align_corners
    _require(interpolation_mode in _INTERPOLATIONS, "no interpolation {}", interpolation_mode)
    _require(padding_mode in _PADDINGS, "no padding {}", padding_mode)


def batch_norm(
    input: torch.Tensor,  # noqa: A002 - torch's name
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    running_mean: torch.Tensor | None = None,
    running_var: torch.Tensor | None = None,
    *_: Any,
    **__: Any,
) -> None:
    """The native forms read as many numbers as the input has channels."""
    channels = input.size(1) if input.dim() > 1 else -1
    for tensor in (weight, bias, running_mean, running_var):
        if isinstance(tensor, torch.Tensor):
            _require(tensor.shape == (channels,), "not one number a channel: {}", tensor.shape)


def group_norm(
    input: torch.Tensor,  # noqa: A002 - torch's name
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    N: int,  # noqa: N803 - torch's name
    C: int,  # noqa: N803 - torch's name
    HxW: int,  # noqa: N803 - torch's name
    group: int,
    eps: float,
) -> None:
    """The native form is told the sizes that it could read from the input."""
    del eps
    _require(input.dim() > 1 and input.shape[:2] == (N, C), "not {} of {} channels", N, C)
    _require(math.prod(input.shape[2:]) == HxW, "not {} numbers a channel", HxW)
    _require(group > 0 and C % group == 0, "{} channels in {} groups", C, group)
    for tensor in (weight, bias):
        if isinstance(tensor, torch.Tensor):
            _require(tensor.shape == (C,), "not one number a channel: {}", tensor.shape)


def divide(
    input: Any,  # noqa: A002 - torch's name
    other: Any,
    *,
    rounding_mode: Any = None,
    **_: Any,
) -> None:
    """The smallest integer by -1 ends a process, where the quotient is truncated."""
    if rounding_mode != "trunc":
        return
    values = [torch.as_tensor(value) for value in (input, other)]
    dtype = torch.result_type(*values)
    if not dtype.is_floating_point and not dtype.is_complex and dtype is not torch.bool:
        least = torch.iinfo(dtype).min
        _require_values((values[0] != least) | (values[1] != -1), "the quotient is too large")


def boxes(
    input: torch.Tensor,  # noqa: A002 - torch's name
    rois: torch.Tensor,
    spatial_scale: float,
    pooled_height: int,
    pooled_width: int,
    *_: Any,
    **__: Any,
) -> None:
    """Each box names an image of the batch, and becomes at least one number."""
    del spatial_scale
    _require(
        pooled_height > 0 and pooled_width > 0, "{} by {} numbers", pooled_height, pooled_width
    )
    _require(input.dim() == len("NCHW"), "images of shape {}", input.shape)
    _require(rois.dim() == 2 and rois.size(1) == _BOX_FIELDS, "boxes of shape {}", rois.shape)  # noqa: PLR2004 - a table
    _within(rois[:, 0], input.size(0), "a box of an image that is not there")


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
    _require(weight.dim() == 2, "a table of shape {}", weight.shape)  # noqa: PLR2004 - a table
    _within(indices, weight.size(0), "an index beyond the table")
    if isinstance(per_sample_weights, torch.Tensor):
        _require(per_sample_weights.shape == indices.shape, "not one weight an index")
    if offsets is None:
        return
    _require(offsets.dim() == 1 and indices.dim() == 1, "offsets into one list of indices")
    if not offsets.numel():
        _require(not indices.numel(), "indices without an offset")
        return
    _within(offsets, indices.numel() + 1, "an offset beyond the indices")
    _require_values(offsets[:1] == 0, "the first offset is not 0")
    _require_values(offsets[1:] >= offsets[:-1], "offsets out of order")


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> None:
    """Kernels read as many keys as there are values."""
    for tensor in (query, key, value):
        _require(tensor.dim() > 1, "attention over shape {}", tensor.shape)
    _require(key.size(-2) == value.size(-2), "{} keys, {} values", key.size(-2), value.size(-2))
    _require(query.size(-1) == key.size(-1), "queries of {}", query.size(-1))


def heads(*arguments: Any, static_k: Any = None, static_v: Any = None, **_: Any) -> None:
    """Its own checks do not compare keys and values that it did not compute."""
    given = (*arguments[_STATIC], static_k, static_v)
    _require(all(value is None for value in given), "keys and values are computed")


def weight_norm(v: torch.Tensor, g: torch.Tensor, dim: int = 0) -> None:
    """The fused kernels, for the first and the last dimension, read one number for each."""
    if v.dim() and dim in {0, v.dim() - 1}:
        _require(g.numel() == v.size(dim), "{} norms of {}", g.numel(), v.size(dim))


def binary_cross_entropy(
    input: torch.Tensor,  # noqa: A002 - torch's name
    target: torch.Tensor,
    *_: Any,
    **__: Any,
) -> None:
    """Numbers without a target stay unwritten."""
    _require(input.shape == target.shape, "targets of shape {}", target.shape)


def eigenvalues(A: torch.Tensor, *_: Any, **__: Any) -> None:  # noqa: N803 - torch's name
    """The library does not end well with infinities."""
    _require_values(A.isfinite(), "a matrix that is not finite")


def deformed(*arguments: Any) -> None:
    """Strides, dilations and groups divide."""
    _require(len(arguments) == _DEFORMED_ARGUMENTS, "14 arguments")
    for number in (*arguments[5:7], *arguments[9:13]):
        _require(number > 0, "a stride, dilation or group of {}", number)


def reduction(value: Any) -> None:
    """A reduction that does not exist leaves the result unwritten."""
    _require(not isinstance(value, int) or value in _REDUCTIONS, "no reduction {}", value)


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
    _require(len(weights) == _ENCODER_ARGUMENTS, "too few weights")
    mask, mask_type = (*options, mask, mask_type)[:2] if options else (mask, mask_type)
    size = embed_dim
    _require(src.dim() == len("BLE") and src.size(2) == size, "input of shape {}", src.shape)
    _require(
        num_heads > 0 and size > 0 and size % num_heads == 0, "{} heads of {}", num_heads, size
    )
    qkv, qkv_bias, out, out_bias, _, _, _, norm, norm_bias, norm_2, norm_2_bias = weights[:11]
    wide, wide_bias, narrow, narrow_bias = weights[11:]
    inner = wide.size(0)
    for weight, shape in (
        (qkv, (3 * size, size)),
        (qkv_bias, (3 * size,)),
        (out, (size, size)),
        (wide, (inner, size)),
        (wide_bias, (inner,)),
        (narrow, (size, inner)),
        *((vector, (size,)) for vector in (out_bias, norm, norm_bias, norm_2, norm_2_bias)),
        (narrow_bias, (size,)),
    ):
        _require(weight.shape == shape, "weights of shape {}, not {}", weight.shape, shape)
    batch, length = src.shape[:2]
    shapes = ((length, length), (batch, length), (batch, num_heads, length, length))
    if mask is not None:
        _require(mask_type in range(len(shapes)), "a mask of type {}", mask_type)
        _require(mask.shape == shapes[mask_type or 0], "a mask of shape {}", mask.shape)


def lstm(*arguments: Any) -> None:
    """The kernels read as much of states and weights as the first of them promises."""
    _recurrent(_LSTM_GATES, arguments)


def gru(*arguments: Any) -> None:
    """As for `lstm`."""
    _recurrent(_GRU_GATES, arguments)


def plain_recurrent(*arguments: Any) -> None:
    """As for `lstm`."""
    _recurrent(_PLAIN_GATES, arguments)


def _recurrent(gates: int, arguments: Sequence[Any]) -> None:
    """Both forms: a padded batch, and packed sequences with their batch sizes."""
    _require(len(arguments) == len(("data", "sizes", *"hwbldtr")), "nine arguments")
    if not isinstance(arguments[3], (list, tuple)):
        data, states, weights, has_biases, layers, _, _, both_ways, batch_first = arguments
        _require(data.dim() == len("TNF"), "sequences of shape {}", data.shape)
        batch = data.size(0 if batch_first else 1)
    else:
        data, sizes, states, weights, has_biases, layers, _, _, both_ways = arguments
        batch = _packed_batch(data, sizes)
    states = states if isinstance(states, (list, tuple)) else (states,)
    directions = 2 if both_ways else 1
    each, left = divmod(len(weights), layers * directions) if layers > 0 else (0, 1)
    plain = 4 if has_biases else 2
    projected = gates == _LSTM_GATES and each == plain + 1
    _require(not left and (each == plain or projected), "{} weights", len(weights))
    hidden, out = _sizes(weights, gates, projected=projected)
    for number, weight in enumerate(weights):
        layer, place = number // (each * directions), number % each
        inputs = out * directions if layer else data.size(-1)
        expected: list[tuple[int, ...]] = [(gates * hidden, inputs), (gates * hidden, out)]
        expected += [(gates * hidden,)] * (plain - 2) + [(out, hidden)]
        _require(weight.shape == expected[place], "weights of shape {}", weight.shape)
    for state, size in zip(states, (out, hidden), strict=False):
        shape = (layers * directions, batch, size)
        _require(state.shape == shape, "a state of shape {}, not {}", state.shape, shape)
    _require(len(states) == (2 if gates == _LSTM_GATES else 1), "{} states", len(states))


def _packed_batch(data: torch.Tensor, sizes: torch.Tensor) -> int:
    """How many sequences are packed. Their batch sizes lie on the CPU, as torch wants it."""
    _require(data.dim() == 2 and sizes.dim() == 1, "packed sequences and their batch sizes")  # noqa: PLR2004 - rows
    _require(sizes.device.type == "cpu" and sizes.dtype is torch.int64, "batch sizes on the CPU")
    counts: list[int] = sizes.tolist()
    _require(counts and counts[-1] > 0 and sum(counts) == data.size(0), "batch sizes of the data")
    _require(sorted(counts, reverse=True) == counts, "batch sizes that fall")
    return counts[0]


def _sizes(weights: Sequence[torch.Tensor], gates: int, *, projected: bool) -> tuple[int, int]:
    """The sizes of a cell's state and of its output."""
    first = weights[0]
    _require(first.dim() == 2 and first.size(0) % gates == 0, "weights of shape {}", first.shape)  # noqa: PLR2004 - rows and columns
    hidden = first.size(0) // gates
    if not projected:
        return hidden, hidden
    _require(weights[1].dim() == 2, "weights of shape {}", weights[1].shape)  # noqa: PLR2004 - as above
    return hidden, weights[1].size(1)


CHECKS: dict[str, Callable[..., None]] = {
    **dict.fromkeys(("grid_sampler", "grid_sampler_2d", "grid_sampler_3d"), grid_sampler),
    **dict.fromkeys(
        (
            "native_batch_norm",
            "_native_batch_norm_legit",
            "_native_batch_norm_legit_functional",
            "_native_batch_norm_legit_no_training",
            "_batch_norm_with_update",
        ),
        batch_norm,
    ),
    "native_group_norm": group_norm,
    **dict.fromkeys(("div", "div_", "divide", "divide_"), divide),
    **dict.fromkeys(("roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool"), boxes),
    **dict.fromkeys(
        ("embedding_bag", "_embedding_bag", "_embedding_bag_forward_only"), embedding_bag
    ),
    "torch.nn.functional.embedding_bag": functional_embedding_bag,
    "_transformer_encoder_layer_fwd": encoder_layer,
    **dict.fromkeys(
        ("scaled_dot_product_attention", "_scaled_dot_product_attention_math"), attention
    ),
    "multi_head_attention_forward": heads,
    **dict.fromkeys(("_weight_norm", "_weight_norm_interface"), weight_norm),
    "binary_cross_entropy": binary_cross_entropy,
    **dict.fromkeys(("eig", "eigvals", "linalg_eig", "linalg_eigvals"), eigenvalues),
    "deform_conv2d": deformed,
    "lstm": lstm,
    "gru": gru,
    **dict.fromkeys(("rnn_tanh", "rnn_relu"), plain_recurrent),
}
