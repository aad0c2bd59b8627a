"""Finds a node's devices for a setting such as `auto`, `cuda`, `cuda:0,2` or `cpu:4`."""

import logging
from dataclasses import replace
from pathlib import Path

import pynvml  # type: ignore[import-untyped]  # pynvml has no annotations

from cache_manager.model.ids import NodeId
from common.numerals import format_size, natural
from gpu_manager.devices import nvidia_gpu
from gpu_manager.devices.driver_events import Nvml
from gpu_manager.devices.emulated_gpu import emulated
from gpu_manager.devices.gpu_device import GpuDevice
from gpu_manager.devices.nvidia_gpu import NvidiaGpu
from gpu_manager.errors import NoDriver, NoSuchDevice

_log = logging.getLogger(__name__)
_MOST_EMULATED = 1024
_OPEN_TO_ALL = 0o006  # read and write, of others


def choose(
    choice: str,
    node: NodeId,
    memory_bytes: int | None = None,
    visible: str | None = None,
    nvml: Nvml = pynvml,
) -> list[GpuDevice]:
    """Return the devices to use, with health monitoring started; raise NoDriver or NoSuchDevice.

    `auto` means every GPU that NVML finds, or one emulated GPU if there is none. `memory_bytes`
    limits the memory used of each device. `visible` is the value of CUDA_VISIBLE_DEVICES, which
    restricts the choice as usual.
    """
    kind, _, rest = choice.partition(":")
    if kind == "cpu":
        return list(emulated(node, _count(choice, rest), memory_bytes))
    if choice == "auto":
        found = _find_quietly(node, visible, nvml)
        if not found:
            return list(emulated(node, 1, memory_bytes))
    elif kind == "cuda":
        found = _found_and_named(choice, node, visible, nvml)
    else:
        raise NoSuchDevice(choice, "use auto, cuda, cuda:0,2 or cpu:N")
    _check_shareable(choice, found)
    for path in closed_device_files():
        _log.warning(
            "%s is not open to all users: workers have users of their own, and CUDA opens it again "
            "while they run (chmod 0666, or the driver's option NVreg_DeviceFileMode)",
            path,
        )
    limited = [_limited(choice, device, memory_bytes) for device in found]
    nvidia_gpu.start_watching(limited)
    return list(limited)


def check_named(choice: str, visible: str | None, nvml: Nvml = pynvml) -> None:
    """Raise for `cuda` or `cuda:0,2` what `choose` would, with NVML closed at the end."""
    _found_and_named(choice, NodeId(""), visible, nvml)
    nvml.nvmlShutdown()


def _check_shareable(choice: str, found: list[NvidiaGpu]) -> None:
    """Raise NoSuchDevice for a GPU that only one process may use: each model has its own."""
    for device in found:
        if device.compute_mode:
            raise NoSuchDevice(
                choice,
                f"{device.id} is in compute mode {device.compute_mode}, in which several processes "
                f"cannot use it: nvidia-smi -i {device.index} -c DEFAULT",
            )


def closed_device_files(root: Path = Path("/")) -> list[Path]:
    """The driver's device files that not every user may read and write."""
    names = ("nvidia[0-9]*", "nvidiactl", "nvidia-uvm")
    found = [path for name in names for path in sorted((root / "dev").glob(name))]
    return [path for path in found if path.stat().st_mode & _OPEN_TO_ALL != _OPEN_TO_ALL]


def _find_quietly(node: NodeId, visible: str | None, nvml: Nvml) -> list[NvidiaGpu]:
    try:
        return _confined(nvidia_gpu.find(node, nvml), visible)
    except NoDriver as error:
        _log.info("GPUs are emulated on the CPU: %s", error)
        return []


def _count(choice: str, text: str) -> int:
    count = natural(text) or 0
    if text and not 1 <= count <= _MOST_EMULATED:
        raise NoSuchDevice(choice, f"use cpu:N with N from 1 to {_MOST_EMULATED}")
    return count or 1


def _found_and_named(choice: str, node: NodeId, visible: str | None, nvml: Nvml) -> list[NvidiaGpu]:
    _, _, rest = choice.partition(":")
    return _named(choice, rest, _confined(nvidia_gpu.find(node, nvml), visible))


def _named(choice: str, text: str, found: list[NvidiaGpu]) -> list[NvidiaGpu]:
    """Return the GPUs with the given indices; raise NoSuchDevice if one of them is missing."""
    if not found:
        raise NoSuchDevice(choice, "NVML finds no usable GPU")
    if ":" not in choice:
        return found
    numbers = [natural(part.strip()) for part in text.split(",")]
    wanted = {number for number in numbers if number is not None}
    if None in numbers:
        raise NoSuchDevice(choice, "use numbers, as in cuda:0,2")
    missing = wanted - {device.index for device in found}
    if missing:
        known = ", ".join(str(index) for index in sorted({device.index for device in found}))
        raise NoSuchDevice(choice, f"no GPU {min(missing)}; there are {known}")
    return [device for device in found if device.index in wanted]


def _confined(found: list[NvidiaGpu], visible: str | None) -> list[NvidiaGpu]:
    """Apply CUDA_VISIBLE_DEVICES as CUDA does: in order, up to the first unknown entry."""
    if visible is None:
        return found
    allowed: list[NvidiaGpu] = []
    for entry in visible.split(","):
        name = entry.strip()
        named = [device for device in found if name and _is_named(device, name)]
        if not named:
            break
        allowed += [device for device in named if device not in allowed]
    return allowed


def _is_named(device: NvidiaGpu, name: str) -> bool:
    if (number := natural(name)) is not None:
        return device.index == number
    return device.uuid.startswith(name) or device.parent_uuid.startswith(name)


def _limited(choice: str, device: NvidiaGpu, memory_bytes: int | None) -> NvidiaGpu:
    if memory_bytes is None:
        return device
    if memory_bytes > device.device_bytes:
        wanted, total = format_size(memory_bytes), format_size(device.device_bytes)
        raise NoSuchDevice(choice, f"{device.id} has {total} of memory, not {wanted}")
    return replace(device, memory_bytes=memory_bytes)
