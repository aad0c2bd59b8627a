"""Memory that a function and a worker both see, and how tensors lie in it."""

import fcntl
import mmap
import os
from collections.abc import Sequence

import torch

from torch_shim.patching import original_of

FIRST_BYTES = 1 << 20
# What moves bytes goes by PyTorch's own functions: handles are of no interest here.
_empty = original_of(torch.empty)
_frombuffer = original_of(torch.frombuffer)
_set = torch._C.TensorBase.set_  # noqa: SLF001 - the one that is not ours

Buffer = mmap.mmap | memoryview | bytearray

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Arena:
    """A sealed memfd of fixed size, mapped here; the other side gets its descriptor once."""

    def __init__(self, wanted_bytes: int) -> None:
        self.size_bytes = FIRST_BYTES
        while self.size_bytes < wanted_bytes:
            self.size_bytes *= 2
        self.descriptor = os.memfd_create("gpufaas-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.descriptor, self.size_bytes)
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _SEALS)
        self.memory = mmap.mmap(self.descriptor, self.size_bytes)

    def forget_descriptor(self) -> None:
        """The mapping stays when the descriptor is closed."""
        os.close(self.descriptor)
        self.descriptor = -1

    def close(self) -> None:
        """Give the memory back once no tensor lies in it any more."""
        if self.descriptor >= 0:
            self.forget_descriptor()


def flat(buffer: Buffer, dtype: torch.dtype, offset: int, count: int) -> torch.Tensor:
    """`count` elements of a buffer as a one-dimensional tensor over the same memory."""
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
    """The CPU tensor over a storage, whatever handle it belongs to."""
    found: torch.Tensor = _set(_empty(0, dtype=dtype), storage, offset, shape, strides)
    return found


def map_privately(descriptor: int, size_bytes: int) -> mmap.mmap:
    """A descriptor's content, writes to which stay ours; the descriptor is closed."""
    try:
        return mmap.mmap(descriptor, size_bytes, flags=mmap.MAP_PRIVATE)
    finally:
        os.close(descriptor)


def span_of(tensor: torch.Tensor) -> int:
    """Elements of the storage from the first to the last one that the tensor uses."""
    if tensor.numel() == 0:
        return 0
    steps = zip(tensor.size(), tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in steps)
