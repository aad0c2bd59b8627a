"""Copies of large tensors, for `.cuda()` and `.cpu()`, in memory that is shared with a worker."""

import os
from typing import Any, NamedTuple

import torch

from torch_shim.tensors import write_epochs
from torch_shim.tensors.handles import CudaTensor
from torch_shim.wire.shared_memory import (
    LEAST_BLOCK_BYTES,
    LentPages,
    map_privately,
    shared_blocks,
    tensor_over,
)


def copied_to_gpu(tensor: torch.Tensor, keywords: dict[str, Any]) -> torch.Tensor | None:
    """Return a copy of a large CPU tensor in memory that workers map.

    None for a tensor that torch itself has to copy. `keywords` are those of `to`.
    """
    dtype = keywords.get("dtype") or tensor.dtype
    size_bytes = tensor.numel() * dtype.itemsize
    if size_bytes < LEAST_BLOCK_BYTES or type(tensor) is not torch.Tensor:
        return None
    if _needs_torch(tensor, keywords) or tensor.device.type != "cpu":
        return None
    storage = shared_blocks.storage(size_bytes)
    if storage is None:
        return None
    with torch.no_grad():
        return tensor_over(storage, dtype, 0, tensor.size(), tensor.stride()).copy_(tensor)


def copied_to_cpu(tensor: torch.Tensor, keywords: dict[str, Any]) -> torch.Tensor | None:
    """Return a CPU tensor over the pages in which a large result of a worker came.

    None for a tensor that torch itself has to copy. `keywords` are those of `to`.
    """
    if type(tensor) is not CudaTensor or not keywords.get("copy"):
        return None
    if keywords.get("dtype") not in (None, tensor.dtype) or _needs_torch(tensor, keywords):
        return None
    return mapped_copy(tensor)


def _needs_torch(tensor: torch.Tensor, keywords: dict[str, Any]) -> bool:
    return (
        tensor.layout is not torch.strided
        or "memory_format" in keywords
        or (tensor.requires_grad and torch.is_grad_enabled())
        or not tensor.is_contiguous()
    )


# Copies of results that lie in a worker's file: both map the file, and writes take own pages.
#
# So `.cpu()` of a large result that nobody has written to copies nothing.

LEAST_BYTES = 1 << 20
_ORIGIN = "_gpufaas_origin"


class _Origin(NamedTuple):
    """Where a storage's content lies, as long as the storage was not written to."""

    lent: LentPages
    start: int  # in the file
    content: tuple[int, int]


def note_origin(tensor: torch.Tensor, lent: LentPages, start: int) -> None:
    """Record that a marked tensor's storage was just mapped from a file."""
    storage = write_epochs.storage_of(tensor)
    storage.__dict__[_ORIGIN] = _Origin(lent, start, write_epochs.content_of(tensor))


def mapped_copy(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a CPU tensor with the same values over other pages; None if they are to be copied."""
    storage = write_epochs.storage_of(tensor)
    origin: _Origin | None = storage.__dict__.get(_ORIGIN)
    size = tensor.numel() * tensor.element_size()
    if origin is None or size < LEAST_BYTES or 2 * size < storage.nbytes():
        return None
    is_lazy = tensor.is_conj() or tensor.is_neg()  # the storage has other values than the tensor
    if origin.content != write_epochs.content_of(tensor) or not tensor.is_contiguous() or is_lazy:
        return None
    descriptor = os.dup(origin.lent.descriptor)
    memory = map_privately(descriptor, origin.start + storage.nbytes(), origin.lent)
    whole = torch.frombuffer(
        memory, dtype=torch.uint8, offset=origin.start, count=storage.nbytes()
    ).untyped_storage()
    offset = int(tensor.storage_offset())
    return tensor_over(whole, tensor.dtype, offset, tensor.size(), tensor.stride())
