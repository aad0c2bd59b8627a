"""torch.cuda's memory functions: the use of the advertised memory by this process's handles."""

from collections.abc import Callable
from typing import Any

from torch_shim.redirected_device import DeviceLike, names_cuda
from torch_shim.tensors import advertised_memory


def _memory_allocated(device: DeviceLike = None) -> int:
    names_cuda(device)
    return advertised_memory.allocated_bytes()


def _max_memory_allocated(device: DeviceLike = None) -> int:
    names_cuda(device)
    return advertised_memory.peak_bytes()


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
    advertised_memory.reset_peak()


def _reset_max_memory_allocated(device: DeviceLike = None) -> None:
    _reset_peak_memory_stats(device)


def _reset_max_memory_cached(device: DeviceLike = None) -> None:
    _reset_peak_memory_stats(device)


def _reset_accumulated_memory_stats(device: DeviceLike = None) -> None:
    names_cuda(device)


def _mem_get_info(device: DeviceLike = None) -> tuple[int, int]:
    names_cuda(device)
    total = advertised_memory.limit_bytes()
    return max(total - advertised_memory.allocated_bytes(), 0), total


def _memory_stats(device: DeviceLike = None) -> dict[str, int]:
    current, peak = _memory_allocated(device), advertised_memory.peak_bytes()
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
        "Allocated memory": (_memory_allocated(device), advertised_memory.peak_bytes()),
        "Advertised memory": (advertised_memory.limit_bytes(), advertised_memory.limit_bytes()),
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
