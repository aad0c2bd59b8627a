"""The GPU memory that the shim advertises to the function: its size, and the bytes allocated."""

import gc
from dataclasses import dataclass

import torch

from torch_shim.tensors import write_epochs
from torch_shim.tensors.handles import CudaTensor

# Counting visits all objects of the process, so smaller allocations are not checked.
_COUNTED_FROM_BYTES = 256 << 20


@dataclass(slots=True)
class _Memory:
    limit_bytes: int = 80 << 30
    peak_bytes: int = 0


_memory = _Memory()


def install(limit_bytes: int) -> None:
    """Set the size of the advertised memory."""
    _memory.limit_bytes = limit_bytes


def limit_bytes() -> int:
    """Return the size of the advertised memory."""
    return _memory.limit_bytes


def allocated_bytes() -> int:
    """Return the total size of the storages of all live handles, each counted once."""
    sizes: dict[int, int] = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), CudaTensor) and thing.layout is torch.strided:
            storage = write_epochs.storage_of(thing)
            sizes[storage._cdata] = storage.nbytes()  # noqa: SLF001 - a storage's identity
    total = sum(sizes.values())
    _memory.peak_bytes = max(_memory.peak_bytes, total)
    return total


def peak_bytes() -> int:
    """Return the highest allocation measured."""
    allocated_bytes()
    return _memory.peak_bytes


def reset_peak() -> None:
    """Reset the highest allocation measured."""
    _memory.peak_bytes = 0


def reserve(source: torch.Tensor) -> None:
    """Raise torch.cuda.OutOfMemoryError if a tensor of this size does not fit on the GPU."""
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - some subclasses hide their size
        wanted = source.numel() * source.element_size()
    reserve_bytes(wanted)


def reserve_bytes(wanted: int) -> None:
    """Raise torch.cuda.OutOfMemoryError if this many bytes do not fit on the GPU."""
    if wanted < _COUNTED_FROM_BYTES and wanted < _memory.limit_bytes:
        return
    used = allocated_bytes()
    if used + wanted > _memory.limit_bytes:
        raise out_of_memory(wanted, used)


def out_of_memory(wanted: int, used: int) -> Exception:
    """Return the error that CUDA raises when an allocation does not fit."""
    gib = 1 << 30
    free = max(_memory.limit_bytes - used, 0)
    return torch.cuda.OutOfMemoryError(
        f"CUDA out of memory. Tried to allocate {wanted / gib:.2f} GiB. GPU 0 has a total capacity "
        f"of {_memory.limit_bytes / gib:.2f} GiB of which {free / gib:.2f} GiB is free."
    )
