"""The rules for a batch that torch lacks for its attention: one more batch is the same.

Without them vmap calls such a kernel once for each call, and it is most of what transformers
compute.
"""

import functools
from typing import Any

import torch
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter

_functorch = torch._C._functorch  # noqa: SLF001 - what torch's own rules in Python call
_Batch = tuple[torch.Tensor, int | None]


@functools.cache
def attention_rules() -> torch.library.Library:
    """Make the rules known to torch, once in a process; they hold as long as the result lives."""
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call] # as torch has it
    for name, rule in _RULES.items():
        if hasattr(torch.ops.aten, name):
            library.impl(name, rule, "FuncTorchBatched")  # type: ignore[no-untyped-call] # the same
    return library


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,  # noqa: FBT001, FBT002 - torch's signature
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    if dropout_p > 0:
        raise RuntimeError("vmap: randomness of attention with dropout")
    interpreter = retrieve_current_functorch_interpreter()
    level = interpreter.level()
    batches = [_functorch._unwrap_batched(each, level) for each in (query, key, value)]  # noqa: SLF001 - as above
    mask: Any = (None, None)
    if attn_mask is not None:
        mask = _functorch._unwrap_batched(attn_mask, level)  # noqa: SLF001 - as above
    (size,) = {found.size(place) for found, place in (*batches, mask) if place is not None}
    with interpreter.lower():
        folded = [_folded(found, place, size) for found, place in batches]
        sizes = folded[0].shape[0] // size
        both = None if mask[0] is None else _mask(mask, size, sizes)
        attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001 - as it is called
        found = attention(*folded, dropout_p, is_causal, attn_mask=both, scale=scale)
        parts = [each.unflatten(0, (size, sizes)) for each in found]
    first, second = (_functorch._add_batch_dim(each, 0, level) for each in parts)  # noqa: SLF001 - as above
    return first, second


def _folded(found: torch.Tensor, place: int | None, size: int) -> torch.Tensor:
    """The batch of calls and that of each call as one."""
    return _whole(found, place, size).flatten(0, 1)


def _whole(found: torch.Tensor, place: int | None, size: int) -> torch.Tensor:
    return found.expand(size, *found.shape) if place is None else found.movedim(place, 0)


def _mask(batch: _Batch, size: int, sizes: int) -> torch.Tensor:
    """A mask for each of the calls' batches: of two dimensions for all, or of four."""
    whole = _whole(*batch, size)
    if whole.dim() == 3:  # noqa: PLR2004 - rows and columns of each call
        whole = whole[:, None, None]
    return whole.expand(size, sizes, *whole.shape[2:]).flatten(0, 1)


def _heads(*arguments: Any) -> tuple[Any, Any]:
    """Attention with its weights, which all calls share."""
    out, weights = _over_sequences(torch.ops.aten._native_multi_head_attention, 3, 9, arguments)  # noqa: SLF001 - as it is called
    return out, weights


def _layer(*arguments: Any) -> Any:
    """A whole layer of an encoder."""
    (out,) = _over_sequences(torch.ops.aten._transformer_encoder_layer_fwd, 1, 18, arguments)  # noqa: SLF001 - as above
    return out


def _over_sequences(
    operator: Any, sequences: int, mask: int, arguments: tuple[Any, ...]
) -> list[Any]:
    """An operator whose first arguments are sequences, with weights that all calls share.

    Without a mask, whose shape the kernel would believe.
    """
    interpreter = retrieve_current_functorch_interpreter()
    level = interpreter.level()
    first, rest = arguments[:sequences], arguments[sequences:]
    tensors = [each for each in rest if isinstance(each, torch.Tensor)]
    has_mask = len(arguments) > mask and arguments[mask] is not None
    if has_mask or any(_functorch._unwrap_batched(each, level)[1] is not None for each in tensors):  # noqa: SLF001 - as above
        raise RuntimeError(f"Batching rule not implemented for {operator} with such arguments")
    batches = {id(each): _functorch._unwrap_batched(each, level) for each in first}  # noqa: SLF001 - as above
    size, *_ = (found.size(place) for found, place in batches.values() if place is not None)
    with interpreter.lower():
        # What is one tensor stays one: kernels look at that.
        folded = {number: _folded(*batch, size) for number, batch in batches.items()}
        found = operator(*(folded[id(each)] for each in first), *rest)
        results = found if isinstance(found, tuple) else (found,)
        parts = [None if each is None else each.unflatten(0, (size, -1)) for each in results]
    return [
        None if each is None else _functorch._add_batch_dim(each, 0, level)  # noqa: SLF001 - as above
        for each in parts
    ]


_RULES = {
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_native_multi_head_attention": _heads,
    "_transformer_encoder_layer_fwd": _layer,
}
