"""The GPU memory that the shim advertises: torch.cuda's functions about it, and its limit."""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from itertools import compress
from typing import Any

import torch

from torch_shim.patching import DeviceLike, names_cuda
from torch_shim.tensors import write_epochs
from torch_shim.tensors.handles import CudaTensor


def _memory_allocated(device: DeviceLike = None) -> int:
    names_cuda(device)
    return allocated_bytes()


def _max_memory_allocated(device: DeviceLike = None) -> int:
    names_cuda(device)
    return peak_bytes()


def _memory_reserved(device: DeviceLike = None) -> int:
    return _memory_allocated(device)


def _max_memory_reserved(device: DeviceLike = None) -> int:
    return _max_memory_allocated(device)


def _memory_cached(device: DeviceLike = None) -> int:
    return _memory_allocated(device)


def _max_memory_cached(device: DeviceLike = None) -> int:
    return _max_memory_allocated(device)


def _reset_peak_memory_stats(device: DeviceLike = None) -> None:
    names_cuda(device)
    reset_peak()


def _reset_max_memory_allocated(device: DeviceLike = None) -> None:
    _reset_peak_memory_stats(device)


def _reset_max_memory_cached(device: DeviceLike = None) -> None:
    _reset_peak_memory_stats(device)


def _reset_accumulated_memory_stats(device: DeviceLike = None) -> None:
    names_cuda(device)


def _mem_get_info(device: DeviceLike = None) -> tuple[int, int]:
    names_cuda(device)
    total = limit_bytes()
    return max(total - allocated_bytes(), 0), total


def _memory_stats(device: DeviceLike = None) -> dict[str, int]:
    current, peak = _memory_allocated(device), peak_bytes()
    return {
        f"{kind}_bytes.all.{when}": amount
        for kind in ("allocated", "reserved", "active", "requested")
        for when, amount in (
            ("current", current),
            ("peak", peak),
            ("allocated", peak),
            ("freed", peak - current),
        )
    } | {"num_alloc_retries": 0, "num_ooms": 0}


def _memory_stats_as_nested_dict(device: DeviceLike = None) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for name, amount in _memory_stats(device).items():
        *groups, last = name.split(".")
        place = nested
        for group in groups:
            place = place.setdefault(group, {})
        place[last] = amount
    return nested


def _memory_summary(device: DeviceLike = None, abbreviated: bool = False) -> str:  # noqa: FBT001, FBT002, ARG001 - PyTorch's signature
    mib = 1 << 20
    rows = {
        "Allocated memory": (_memory_allocated(device), peak_bytes()),
        "Advertised memory": (limit_bytes(), limit_bytes()),
    }
    head = "| gpufaas: memory of device 0    |  current |     peak |"
    lines = [f"| {n:<30} | {c // mib:>4} MiB | {p // mib:>4} MiB |" for n, (c, p) in rows.items()]
    return "\n".join([head, *lines])


def _memory_snapshot(*_: Any, **__: Any) -> list[dict[str, Any]]:
    return []


def _list_gpu_processes(device: DeviceLike = None) -> str:
    names_cuda(device)
    return "GPU:0\nno processes are running"


def _device_memory_used(device: DeviceLike = None) -> int:
    return _memory_allocated(device)


def _set_per_process_memory_fraction(fraction: float, device: DeviceLike = None) -> None:
    names_cuda(device)
    if not 0 <= fraction <= 1:
        raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")


def _get_per_process_memory_fraction(device: DeviceLike = None) -> float:
    names_cuda(device)
    return 1.0


MEMORY: dict[str, Callable[..., Any]] = {
    "device_memory_used": _device_memory_used,
    "get_per_process_memory_fraction": _get_per_process_memory_fraction,
    "list_gpu_processes": _list_gpu_processes,
    "max_memory_allocated": _max_memory_allocated,
    "max_memory_cached": _max_memory_cached,
    "max_memory_reserved": _max_memory_reserved,
    "mem_get_info": _mem_get_info,
    "memory_allocated": _memory_allocated,
    "memory_cached": _memory_cached,
    "memory_reserved": _memory_reserved,
    "memory_snapshot": _memory_snapshot,
    "memory_stats": _memory_stats,
    "memory_stats_as_nested_dict": _memory_stats_as_nested_dict,
    "memory_summary": _memory_summary,
    "reset_accumulated_memory_stats": _reset_accumulated_memory_stats,
    "reset_max_memory_allocated": _reset_max_memory_allocated,
    "reset_max_memory_cached": _reset_max_memory_cached,
    "reset_peak_memory_stats": _reset_peak_memory_stats,
    "set_per_process_memory_fraction": _set_per_process_memory_fraction,
}


# Counting visits all objects of the process, so smaller allocations are not checked.
_COUNTED_FROM_BYTES = 256 << 20
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor  # noqa: SLF001 - no public check


@dataclass(slots=True)
class _Memory:
    limit_bytes: int = 80 << 30
    peak_bytes: int = 0


_memory = _Memory()


def install(limit_bytes: int) -> None:
    _memory.limit_bytes = limit_bytes


def limit_bytes() -> int:
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
    allocated_bytes()
    return _memory.peak_bytes


def reset_peak() -> None:
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
    gib = 1 << 30
    free = max(_memory.limit_bytes - used, 0)
    return torch.cuda.OutOfMemoryError(
        f"CUDA out of memory. Tried to allocate {wanted / gib:.2f} GiB. GPU 0 has a total capacity "
        f"of {_memory.limit_bytes / gib:.2f} GiB of which {free / gib:.2f} GiB is free."
    )
