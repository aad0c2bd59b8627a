"""The rule for a batch that torch lacks for its attention on CPUs: one more batch is the same.

Without it vmap calls that kernel once for each call, which is most of what transformers compute.
"""

import functools
from typing import Any

import torch
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter

_NAME = "_scaled_dot_product_flash_attention_for_cpu"
_functorch = torch._C._functorch  # noqa: SLF001 - what torch's own rules in Python call
_Batch = tuple[torch.Tensor, int | None]


@functools.cache
def attention_rule() -> torch.library.Library:
    """Make the rule known to torch, once in a process; it holds as long as the result lives."""
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call] # as torch has it
    if hasattr(torch.ops.aten, _NAME):
        library.impl(_NAME, _attention, "FuncTorchBatched")  # type: ignore[no-untyped-call] # the same
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
        attention = getattr(torch.ops.aten, _NAME)
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
