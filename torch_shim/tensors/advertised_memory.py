"""The GPU memory that the shim advertises: torch.cuda's functions about it, and its limit."""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from itertools import compress
from typing import Any

import torch

from torch_shim.patching import DeviceLike, names_cuda, of_device
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


# torch.cuda's functions about memory.


def _mem_get_info() -> tuple[int, int]:
    total = limit_bytes()
    return max(total - allocated_bytes(), 0), total


def _memory_stats() -> dict[str, int]:
    current, peak = allocated_bytes(), peak_bytes()
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


def _memory_stats_as_nested_dict() -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for name, amount in _memory_stats().items():
        *groups, last = name.split(".")
        place = nested
        for group in groups:
            place = place.setdefault(group, {})
        place[last] = amount
    return nested


def _memory_summary(device: DeviceLike = None, abbreviated: bool = False) -> str:  # noqa: FBT001, FBT002, ARG001 - PyTorch's signature
    names_cuda(device)
    mib = 1 << 20
    rows = {
        "Allocated memory": (allocated_bytes(), peak_bytes()),
        "Advertised memory": (limit_bytes(), limit_bytes()),
    }
    head = "| gpufaas: memory of device 0    |  current |     peak |"
    lines = [f"| {n:<30} | {c // mib:>4} MiB | {p // mib:>4} MiB |" for n, (c, p) in rows.items()]
    return "\n".join([head, *lines])


def _memory_snapshot(*_: Any, **__: Any) -> list[dict[str, Any]]:
    return []


def _set_per_process_memory_fraction(fraction: float, device: DeviceLike = None) -> None:
    names_cuda(device)
    if not 0 <= fraction <= 1:
        raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")


_ANSWERS: dict[Callable[[], Any], str] = {
    allocated_bytes: "device_memory_used memory_allocated memory_cached memory_reserved",
    peak_bytes: "max_memory_allocated max_memory_cached max_memory_reserved",
    reset_peak: "reset_max_memory_allocated reset_max_memory_cached reset_peak_memory_stats",
    _mem_get_info: "mem_get_info",
    _memory_stats: "memory_stats",
    _memory_stats_as_nested_dict: "memory_stats_as_nested_dict",
    lambda: 1.0: "get_per_process_memory_fraction",
    lambda: "GPU:0\nno processes are running": "list_gpu_processes",
    lambda: None: "reset_accumulated_memory_stats",
}
MEMORY: dict[str, Callable[..., Any]] = {
    "memory_snapshot": _memory_snapshot,
    "memory_summary": _memory_summary,
    "set_per_process_memory_fraction": _set_per_process_memory_fraction,
    **{
        name: of_device(name, answer)
        for answer, words in _ANSWERS.items()
        for name in words.split()
    },
}
