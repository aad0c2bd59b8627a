"""The GPU memory that the shim advertises to the function: its size, and the bytes allocated."""

import gc
from dataclasses import dataclass
from itertools import compress

import torch

from torch_shim.tensors import write_epochs
from torch_shim.tensors.handles import CudaTensor

# Counting visits all objects of the process, so smaller allocations are not checked.
_COUNTED_FROM_BYTES = 256 << 20
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor  # noqa: SLF001 - no public check


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
    with torch._C.DisableTorchFunction():  # noqa: SLF001 - a program's mode is not to see this
        for handle in _live_handles():
            if handle.layout is torch.strided and not _is_wrapped(handle):
                storage = write_epochs.storage_of(handle)
                sizes[storage._cdata] = storage.nbytes()  # noqa: SLF001 - a storage's identity
    total = sum(sizes.values())
    _memory.peak_bytes = max(_memory.peak_bytes, total)
    return total


def _live_handles() -> list[CudaTensor]:
    """Return all handles; no Python runs for each object, of which there are 100 for a handle."""
    kinds: list[type] = [CudaTensor]
    for kind in kinds:
        kinds.extend(type.__subclasses__(kind))
    objects = gc.get_objects()
    # By identity: a handle class equals its program's, and other classes may not be hashable.
    is_handle = map(frozenset(map(id, kinds)).__contains__, map(id, map(type, objects)))
    return list(compress(objects, is_handle))


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
    _memory.peak_bytes = max(_memory.peak_bytes, used + wanted)


def out_of_memory(wanted: int, used: int) -> Exception:
    """Return the error that CUDA raises when an allocation does not fit."""
    gib = 1 << 30
    free = max(_memory.limit_bytes - used, 0)
    return torch.cuda.OutOfMemoryError(
        f"CUDA out of memory. Tried to allocate {wanted / gib:.2f} GiB. GPU 0 has a total capacity "
        f"of {_memory.limit_bytes / gib:.2f} GiB of which {free / gib:.2f} GiB is free."
    )
