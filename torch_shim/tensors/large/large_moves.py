"""Copies of large tensors, for `.cuda()` and `.cpu()`, in memory that is shared with a worker."""

from typing import Any

import torch

from torch_shim.tensors.handles import CudaTensor
from torch_shim.tensors.large.lent_copies import mapped_copy
from torch_shim.wire.arena import tensor_over
from torch_shim.wire.memory.shared_blocks import LEAST_BYTES, shared_blocks


def copied_to_gpu(tensor: torch.Tensor, keywords: dict[str, Any]) -> torch.Tensor | None:
    """Return a copy of a large CPU tensor in memory that workers map.

    None for a tensor that torch itself has to copy. `keywords` are those of `to`.
    """
    dtype = keywords.get("dtype") or tensor.dtype
    size_bytes = tensor.numel() * dtype.itemsize
    if size_bytes < LEAST_BYTES or type(tensor) is not torch.Tensor:
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
