"""Operators as programs get them: behind checks of their arguments, giving no memory unwritten."""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from gpu_manager.worker.program import layer_checks
from gpu_manager.worker.program.layer_checks import require, require_values, require_within

Operator = Callable[..., Any]


def checked(name: str, operator: Operator) -> Operator:
    """The operator, behind the checks that its name asks for."""
    short = short_name(name)
    choices = _choices(short, operator)
    if short in _FACTORIES:
        operator = _zero_filled(operator)
    check = CHECKS.get(name[2:]) or CHECKS.get(short)
    if check is not None:
        operator = _behind(check, operator)
    return _with_checked_choices(choices, operator) if choices else operator


def short_name(name: str) -> str:
    """`grid_sampler_2d` of `t:torch.grid_sampler_2d` and `a:aten::grid_sampler_2d.default`."""
    rest = name[2:]
    if "::" in rest:
        return rest.partition("::")[2].partition(".")[0]
    return rest.rpartition(".")[2]


def _behind(check: Operator, operator: Operator) -> Operator:
    @functools.wraps(operator, updated=())
    def call(*arguments: Any, **named: Any) -> Any:
        check(*arguments, **named)
        return operator(*arguments, **named)

    return call


# --- Memory that nobody wrote to --------------------------------------------------------------

_FACTORIES = frozenset(
    {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}
)


def _zero_filled(operator: Operator) -> Operator:
    """A factory whose tensors show no earlier content of the memory that they are given."""

    def call(*arguments: Any, **named: Any) -> torch.Tensor:
        made: torch.Tensor = operator(*arguments, **named)
        if made.is_contiguous():
            return made.zero_()
        storage = made.untyped_storage()
        torch.empty(0, dtype=torch.uint8, device=made.device).set_(
            storage, 0, (storage.nbytes(),), (1,)
        ).zero_()
        return made

    return call


# --- Choices that are numbers in C++ ----------------------------------------------------------

_LOSSES = ("loss", "loss2d", "loss_nd", "loss_forward", "entropy", "with_logits", "kl_div")
_KINDS = ("ScalarType", "Layout", "MemoryFormat")


class _Choice(NamedTuple):
    """An argument that is a choice between a few things."""

    position: int | None  # none where it has to be named
    name: str
    check: Operator


def _with_checked_choices(choices: Sequence[_Choice], operator: Operator) -> Operator:
    """An operator that refuses numbers that are no choice.

    Torch takes any number for a dtype, layout or memory format of a registered operator, and looks
    it up in tables behind whose end others lie. It takes any number for a reduction as well.
    """

    def call(*arguments: Any, **named: Any) -> Any:
        for position, name, check in choices:
            if name in named:
                check(named[name])
            elif position is not None and position < len(arguments):
                check(arguments[position])
        return operator(*arguments, **named)

    return call


def _choices(short: str, operator: Operator) -> list[_Choice]:
    found: dict[_Choice, None] = {}
    for schema in _schemas(short, operator):
        for position, argument in enumerate(schema.arguments):
            check = _check_of_choice(argument)
            if check is not None:
                place = None if argument.kwarg_only else position
                found[_Choice(place, argument.name, check)] = None
    return list(found)


def _check_of_choice(argument: Any) -> Operator | None:
    if any(kind in str(argument.real_type) for kind in _KINDS):
        return _no_number
    return reduction if argument.name == "reduction" else None


def _no_number(value: Any) -> None:
    if isinstance(value, int) and not isinstance(value, bool):
        raise ValueError(f"{value} is no dtype, layout or memory format")


def _schemas(short: str, operator: Operator) -> Iterator[Any]:
    """Those of a registered operator, or of the registered ones that a function stands for."""
    if isinstance(operator, torch._ops.OpOverload):  # noqa: SLF001 - torch.ops gives no public name
        yield operator._schema  # noqa: SLF001 - as above
        return
    packet: Any = operator
    if not isinstance(packet, torch._ops.OpOverloadPacket):  # noqa: SLF001 - as above
        packet = getattr(torch.ops.aten, short, None)
        if packet is None or not short.endswith(_LOSSES):
            return
    for overload in packet.overloads():
        yield getattr(packet, overload)._schema  # noqa: SLF001 - as above


# What has to hold of the arguments of some operators, because their kernels believe it.
#
# A check raises ValueError, or has the device assert what only the values in a tensor show.

_INTERPOLATIONS = _PADDINGS = _REDUCTIONS = range(3)
_MOST_ELEMENTS = 1 << 48
_MOST_PIECES = 1 << 17  # each takes hundreds of bytes of the host, and time in which no thread runs
# Names of arguments; torch takes NumPy's as well.
_TENSORS = ("tensor", "self", "input", "x", "a", "x1")
_SIZES = ("split_size_or_sections", "split_size", "split_sizes")
_DIMENSIONS = ("dim", "axis")
_DEFORMED_ARGUMENTS = 14
_BOX_FIELDS = 5  # the number of the image, then two corners


def grid_sampler(
    _input: Any, _grid: Any, interpolation_mode: int, padding_mode: int, align_corners: Any
) -> None:
    """A mode that does not exist leaves the result unwritten."""
    del align_corners
    require(interpolation_mode in _INTERPOLATIONS, "no interpolation {}", interpolation_mode)
    require(padding_mode in _PADDINGS, "no padding {}", padding_mode)


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
            require(tensor.shape == (channels,), "not one number a channel: {}", tensor.shape)


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
    require(input.dim() > 1 and input.shape[:2] == (N, C), "not {} of {} channels", N, C)
    require(math.prod(input.shape[2:]) == HxW, "not {} numbers a channel", HxW)
    require(group > 0 and C % group == 0, "{} channels in {} groups", C, group)
    for tensor in (weight, bias):
        if isinstance(tensor, torch.Tensor):
            require(tensor.shape == (C,), "not one number a channel: {}", tensor.shape)


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
        require_values((values[0] != least) | (values[1] != -1), "the quotient is too large")


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
    require(pooled_height > 0 and pooled_width > 0, "{} by {} numbers", pooled_height, pooled_width)
    require(input.dim() == len("NCHW"), "images of shape {}", input.shape)
    require(rois.dim() == 2 and rois.size(1) == _BOX_FIELDS, "boxes of shape {}", rois.shape)  # noqa: PLR2004 - a table
    require_within(rois[:, 0], input.size(0), "a box of an image that is not there")


def weight_norm(v: torch.Tensor, g: torch.Tensor, dim: int = 0) -> None:
    """The fused kernels, for the first and the last dimension, read one number for each."""
    if v.dim() and dim in {0, v.dim() - 1}:
        require(g.numel() == v.size(dim), "{} norms of {}", g.numel(), v.size(dim))


def binary_cross_entropy(
    input: torch.Tensor,  # noqa: A002 - torch's name
    target: torch.Tensor,
    *_: Any,
    **__: Any,
) -> None:
    """Numbers without a target stay unwritten."""
    require(input.shape == target.shape, "targets of shape {}", target.shape)


def eigenvalues(A: torch.Tensor, *_: Any, **__: Any) -> None:  # noqa: N803 - torch's name
    """The library does not end well with infinities."""
    require_values(A.isfinite(), "a matrix that is not finite")


def deformed(*arguments: Any) -> None:
    """Strides, dilations and groups divide."""
    require(len(arguments) == _DEFORMED_ARGUMENTS, "14 arguments")
    for number in (*arguments[5:7], *arguments[9:13]):
        require(number > 0, "a stride, dilation or group of {}", number)


def reduction(value: Any) -> None:
    """A reduction that does not exist leaves the result unwritten."""
    require(not isinstance(value, int) or value in _REDUCTIONS, "no reduction {}", value)


def strided(
    input: torch.Tensor,  # noqa: A002 - torch's name
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int | None = None,
) -> None:
    """Torch's own comparison with the storage overflows."""
    offset = input.storage_offset() if storage_offset is None else storage_offset
    end = _end(size, stride, int(offset))
    require(end * input.element_size() <= input.untyped_storage().nbytes(), "beyond the storage")


def strided_scatter(
    input: torch.Tensor,  # noqa: A002 - torch's name
    src: torch.Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int | None = None,
) -> None:
    """It goes to a copy that may be smaller than the storage."""
    del src
    offset = input.storage_offset() if storage_offset is None else storage_offset
    end = _end(size, stride, int(offset))
    require(end <= input.numel(), "beyond the elements")


def new_strided(*arguments: Any, **named: Any) -> None:
    """Of a factory: `size` and `stride`, behind a tensor where it is a method."""
    numbers = [value for value in arguments if not isinstance(value, torch.Tensor)]
    size, stride = (*numbers, *(named[name] for name in ("size", "stride") if name in named))[:2]
    require(_end(size, stride, 0) < _MOST_ELEMENTS, "too many elements")


def _end(size: Sequence[int], stride: Sequence[int], offset: int) -> int:
    """Behind which element a tensor ends, in numbers without limits."""
    require(offset >= 0 and all(step >= 0 for step in stride), "a negative stride or offset")
    require(all(count >= 0 for count in size) and len(size) == len(stride), "no shape")
    if not all(size):
        return 0
    return offset + 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))


def upsample(
    input: torch.Tensor,  # noqa: A002 - torch's name
    output_size: Sequence[int] | None,
    *more: Any,
    **named: Any,
) -> None:
    """Kernels go over the input by the scales, as far as the sizes say."""
    scales = [value for value in (*more, *named.values()) if isinstance(value, float)]
    for inside, outside, scale in zip(input.shape[2:], output_size or (), scales, strict=False):
        fits = math.isfinite(scale) and abs(inside * scale - outside) <= 1
        require(fits, "scale {} from {} to {}", scale, inside, outside)


def rows(*arguments: Any, **named: Any) -> None:
    """Each row becomes a tensor."""
    place = _given(arguments, named, 1, _DIMENSIONS, 0)
    _pieces(_given(arguments, named, 0, _TENSORS), 1, place)


def split(*arguments: Any, **named: Any) -> None:
    """Into pieces of a size, or of a list of sizes."""
    size = _given(arguments, named, 1, _SIZES)
    if isinstance(size, (list, tuple)):
        _require_few(len(size))
    else:
        place = _given(arguments, named, 2, _DIMENSIONS, 0)
        _pieces(_given(arguments, named, 0, _TENSORS), size, place)


def chunk(*arguments: Any, **named: Any) -> None:
    """There are no more than rows, unless there are no rows: then as many as the program says."""
    pieces = int(_given(arguments, named, 1, ("chunks",)))
    if pieces > _MOST_PIECES:
        place = _given(arguments, named, 2, _DIMENSIONS, 0)
        size = _given(arguments, named, 0, _TENSORS).size(place)
        _require_few(min(pieces, size) if size else pieces)


def chunks(*arguments: Any, **named: Any) -> None:
    """There are as many as the program says, also empty ones; a tensor may say it."""
    others = [value for name, value in named.items() if name not in _TENSORS]
    for each in (*arguments[1:], *others):
        if type(each) is int and each <= _MOST_PIECES:  # nearly all: this is quick
            continue
        is_number = isinstance(each, int) or (isinstance(each, torch.Tensor) and not each.dim())
        _require_few(int(each) if is_number else len(each))


def _given(
    arguments: Sequence[Any],
    named: Mapping[str, Any],
    position: int,
    names: Sequence[str],
    otherwise: Any = None,
) -> Any:
    """An argument by its position, or by whichever of these names torch takes it."""
    if position < len(arguments):
        return arguments[position]
    found = next((named[name] for name in names if name in named), otherwise)
    require(found is not None, "no {}", names[0])
    return found


def _pieces(tensor: torch.Tensor, size: Any, dim: int) -> None:
    if max(tensor.shape, default=0) > _MOST_PIECES:
        _require_few(tensor.size(dim) // max(int(size), 1))


def _require_few(pieces: int) -> None:
    require(pieces <= _MOST_PIECES, "more than {} pieces", _MOST_PIECES)


_CHECKED: tuple[tuple[str, Operator], ...] = (
    ("grid_sampler grid_sampler_2d grid_sampler_3d", grid_sampler),
    (
        """native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional
        _native_batch_norm_legit_no_training _batch_norm_with_update""",
        batch_norm,
    ),
    ("native_group_norm", group_norm),
    ("div div_ divide divide_", divide),
    ("roi_align roi_pool ps_roi_align ps_roi_pool", boxes),
    ("embedding_bag _embedding_bag _embedding_bag_forward_only", layer_checks.embedding_bag),
    ("torch.nn.functional.embedding_bag", layer_checks.functional_embedding_bag),
    ("as_strided as_strided_ as_strided_copy", strided),
    ("as_strided_scatter", strided_scatter),
    ("empty_strided new_empty_strided", new_strided),
    (
        """upsample_linear1d upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d
        upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d
        _upsample_nearest_exact2d _upsample_nearest_exact3d""",
        upsample,
    ),
    ("_transformer_encoder_layer_fwd", layer_checks.encoder_layer),
    ("_native_multi_head_attention", layer_checks.native_heads),
    ("padded_encoder", layer_checks.padded_encoder),
    ("scaled_dot_product_attention _scaled_dot_product_attention_math", layer_checks.attention),
    ("multi_head_attention_forward", layer_checks.heads),
    ("_weight_norm _weight_norm_interface", weight_norm),
    ("binary_cross_entropy", binary_cross_entropy),
    ("eig eigvals linalg_eig linalg_eigvals", eigenvalues),
    ("deform_conv2d", deformed),
    ("lstm", functools.partial(layer_checks.recurrent, layer_checks.LSTM_GATES)),
    ("gru", functools.partial(layer_checks.recurrent, layer_checks.GRU_GATES)),
    ("rnn_tanh rnn_relu", functools.partial(layer_checks.recurrent, layer_checks.PLAIN_GATES)),
    ("unbind unbind_copy", rows),
    ("split split_copy", split),
    ("chunk", chunk),
    ("tensor_split hsplit vsplit dsplit split_with_sizes split_with_sizes_copy", chunks),
)
CHECKS = {name: check for names, check in _CHECKED for name in names.split()}
