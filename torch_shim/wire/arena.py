"""Memory that a function and a worker share, and the layout of tensors in it."""

import fcntl
import mmap
import os
from collections.abc import Sequence

import torch

from torch_shim.patching import original_of

FIRST_BYTES = 1 << 20
# PyTorch's original functions: moving bytes needs no handles.
_empty = original_of(torch.empty)
_frombuffer = original_of(torch.frombuffer)
_set = torch._C.TensorBase.set_  # noqa: SLF001 - the original, not the shim's replacement

Buffer = mmap.mmap | memoryview | bytearray

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Arena:
    """A sealed memfd of fixed size, mapped in this process; the peer gets its descriptor once."""

    def __init__(self, wanted_bytes: int) -> None:
        self.size_bytes = FIRST_BYTES
        while self.size_bytes < wanted_bytes:
            self.size_bytes *= 2
        self.descriptor = os.memfd_create("gpufaas-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.descriptor, self.size_bytes)
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _SEALS)
        self.memory = mmap.mmap(self.descriptor, self.size_bytes)

    def forget_descriptor(self) -> None:
        """Close the descriptor; the mapping stays."""
        os.close(self.descriptor)
        self.descriptor = -1

    def close(self) -> None:
        """Release the memory; it is freed when no tensor in it exists any more."""
        if self.descriptor >= 0:
            self.forget_descriptor()


def flat(buffer: Buffer, dtype: torch.dtype, offset: int, count: int) -> torch.Tensor:
    """Return `count` elements of a buffer as a one-dimensional tensor over the same memory."""
    found: torch.Tensor = (
        _frombuffer(buffer, dtype=dtype, count=count, offset=offset)
        if count
        else _empty(0, dtype=dtype)
    )
    return found


def tensor_over(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    offset: int,
    shape: Sequence[int],
    strides: Sequence[int],
) -> torch.Tensor:
    """Return a plain CPU tensor over a storage, even if the storage belongs to a handle."""
    found: torch.Tensor = _set(_empty(0, dtype=dtype), storage, offset, shape, strides)
    return found


def map_privately(descriptor: int, size_bytes: int) -> mmap.mmap:
    """Map a descriptor's content copy-on-write, and close the descriptor."""
    try:
        return mmap.mmap(descriptor, size_bytes, flags=mmap.MAP_PRIVATE)
    finally:
        os.close(descriptor)


def span_of(tensor: torch.Tensor) -> int:
    """Return the number of elements from the first to the last one that the tensor uses."""
    if tensor.numel() == 0:
        return 0
    steps = zip(tensor.size(), tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in steps)
