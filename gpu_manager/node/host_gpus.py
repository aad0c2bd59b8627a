"""A node's GPUs: found for a setting such as `cuda:0,2`, described to the scheduler with slots."""

import logging
import os
from dataclasses import replace
from pathlib import Path

import pynvml  # type: ignore[import-untyped]  # pynvml has no annotations

from cache_manager.model.ids import NodeId
from common.numerals import format_size, natural
from gpu_manager.cuda import nvidia_gpu
from gpu_manager.cuda.nvidia_gpu import NvidiaGpu, Nvml
from gpu_manager.devices.gpu_device import GpuDevice
from gpu_manager.devices.gpu_turns import make_turns
from gpu_manager.devices.paths import GpuPaths
from gpu_manager.emulated.gpu import emulated
from gpu_manager.errors import BadSetting, NoDriver
from gpu_manager.node.ledger import Ledger
from gpu_manager.node.residents import HostGpu
from gpu_manager.node.settings import MOST_SLOTS, NodeSettings
from scheduler.api import GpuSpec, SlotId, SlotSpec

log = logging.getLogger(__name__)

_SEVERAL = 2
# The memory that a process takes on a GPU before it holds a model; used until it is measured.
_CUDA_CONTEXT_BYTES = 600 << 20
_MPS_PIPES = Path("/tmp/nvidia-mps")


def host_gpu(
    device: GpuDevice, node: NodeId, settings: NodeSettings, paths: GpuPaths, gpus: int
) -> HostGpu:
    """Return one of so many GPUs of the node, with nothing on it.

    GPUs of one type have slots of the same speed: `h200 1/7`.
    """
    emulated = device.kind == "cpu"
    context_bytes = settings.emulation.context_bytes if emulated else _CUDA_CONTEXT_BYTES
    slots = _slots(device, settings)
    spec = GpuSpec(
        device.id,
        node,
        device.memory_bytes,
        device.gpu_type if len(slots) < _SEVERAL else f"{device.gpu_type} 1/{len(slots)}",
        slots,
        context_bytes=context_bytes,
        vcpus=_vcpus(settings, gpus, len(slots)),
    )
    ledger = Ledger(device.memory_bytes, context_bytes)
    # Turns also with one lease at a time: one whose models were loaded beside its runs may join it.
    turns = None if any(slot.at_once for slot in slots) else make_turns()
    return HostGpu(device, spec, ledger, turns=turns, paths=paths)


def _slots(device: GpuDevice, settings: NodeSettings) -> tuple[SlotSpec, ...]:
    """The GPU's slots; none where it is one slot of its own name with a single lease."""
    overlap, number = settings.gpu_overlap, settings.gpu_slots
    at_once = settings.gpu_concurrency
    if not 1 <= number <= MOST_SLOTS:
        raise BadSetting("GPU slots", str(number), f"a number from 1 to {MOST_SLOTS} is expected")
    if number > 1 and overlap > 1:
        detail = "a slot that is a part of a GPU holds one lease; the overlap must be 1"
        raise BadSetting("GPU slots", str(number), detail)
    if at_once > 1 and max(number, overlap) > 1:
        detail = "calls run at once on a whole GPU; slots and overlap must be 1"
        raise BadSetting("GPU concurrency", str(at_once), detail)
    if at_once > 1:
        return (SlotSpec(SlotId(device.id), at_once, at_once=True),)
    if number == 1 or not device.is_divisible:
        return (SlotSpec(SlotId(device.id), overlap),) if overlap > 1 else ()
    if device.kind == "cuda" and not _MPS_PIPES.exists():
        log.warning(
            "%s has %d slots, but NVIDIA's MPS does not run here: kernels of models in different "
            "processes take turns on the whole GPU (those of the runtime `stream` do not)",
            device.id,
            number,
        )
    return tuple(SlotSpec(SlotId(f"{device.id}/{slot}")) for slot in range(number))


def _vcpus(settings: NodeSettings, gpus: int, slots: int) -> int:
    if settings.gpu_vcpus is not None:
        return settings.gpu_vcpus
    return max(1, len(os.sched_getaffinity(0)) // gpus) if slots > 1 else 0


_MOST_EMULATED = 1024
_OPEN_TO_ALL = 0o006  # read and write, of others


def choose_devices(
    choice: str,
    node: NodeId,
    memory_bytes: int | None = None,
    visible: str | None = None,
    nvml: Nvml = pynvml,
) -> list[GpuDevice]:
    """Return the devices to use, with health monitoring started; raise NoDriver or BadSetting.

    `auto` means every GPU that NVML finds, or one emulated GPU if there is none. `memory_bytes`
    limits the memory used of each device. `visible` is the value of CUDA_VISIBLE_DEVICES, which
    restricts the choice as usual.
    """
    kind, _, rest = choice.partition(":")
    if kind == "cpu":
        return list(emulated(node, _count(choice, rest), memory_bytes))
    if choice == "auto":
        devices = _find_quietly(node, visible, nvml)
        if not devices:
            return list(emulated(node, 1, memory_bytes))
    elif kind == "cuda":
        devices = _found_and_named(choice, node, visible, nvml)
    else:
        raise BadSetting("devices", choice, "use auto, cuda, cuda:0,2 or cpu:N")
    _check_shareable(choice, devices)
    for path in closed_device_files():
        log.warning(
            "%s is not open to all users: workers have users of their own, and CUDA opens it again "
            "while they run (chmod 0666, or the driver's option NVreg_DeviceFileMode)",
            path,
        )
    limited = [_limited(choice, device, memory_bytes) for device in devices]
    nvidia_gpu.start_watching(limited)
    return list(limited)


def check_named(choice: str, visible: str | None, nvml: Nvml = pynvml) -> None:
    """Raise for `cuda` or `cuda:0,2` what `choose_devices` would, with NVML closed at the end."""
    _found_and_named(choice, NodeId(""), visible, nvml)
    nvml.nvmlShutdown()


def _check_shareable(choice: str, gpus: list[NvidiaGpu]) -> None:
    """Raise BadSetting for a GPU that only one process may use: each model has its own."""
    for device in gpus:
        if device.compute_mode:
            raise BadSetting(
                "devices",
                choice,
                f"{device.id} is in compute mode {device.compute_mode}, in which several processes "
                f"cannot use it: nvidia-smi -i {device.index} -c DEFAULT",
            )


def closed_device_files(root: Path = Path("/")) -> list[Path]:
    """The driver's device files that not every user may read and write."""
    names = ("nvidia[0-9]*", "nvidiactl", "nvidia-uvm")
    paths = [path for name in names for path in sorted((root / "dev").glob(name))]
    return [path for path in paths if path.stat().st_mode & _OPEN_TO_ALL != _OPEN_TO_ALL]


def _find_quietly(node: NodeId, visible: str | None, nvml: Nvml) -> list[NvidiaGpu]:
    try:
        return _confined(nvidia_gpu.find(node, nvml), visible)
    except NoDriver as error:
        log.info("GPUs are emulated on the CPU: %s", error)
        return []


def _count(choice: str, text: str) -> int:
    count = natural(text) or 0
    if text and not 1 <= count <= _MOST_EMULATED:
        raise BadSetting("devices", choice, f"use cpu:N with N from 1 to {_MOST_EMULATED}")
    return count or 1


def _found_and_named(choice: str, node: NodeId, visible: str | None, nvml: Nvml) -> list[NvidiaGpu]:
    _, _, rest = choice.partition(":")
    return _named(choice, rest, _confined(nvidia_gpu.find(node, nvml), visible))


def _named(choice: str, text: str, gpus: list[NvidiaGpu]) -> list[NvidiaGpu]:
    """Return the GPUs with the given indices; raise BadSetting if one of them is missing."""
    if not gpus:
        raise BadSetting("devices", choice, "NVML finds no usable GPU")
    if ":" not in choice:
        return gpus
    numbers = [natural(part.strip()) for part in text.split(",")]
    wanted = {number for number in numbers if number is not None}
    if None in numbers:
        raise BadSetting("devices", choice, "use numbers, as in cuda:0,2")
    missing = wanted - {device.index for device in gpus}
    if missing:
        indices = ", ".join(str(index) for index in sorted({device.index for device in gpus}))
        raise BadSetting("devices", choice, f"no GPU {min(missing)}; there are {indices}")
    return [device for device in gpus if device.index in wanted]


def _confined(gpus: list[NvidiaGpu], visible: str | None) -> list[NvidiaGpu]:
    """Apply CUDA_VISIBLE_DEVICES as CUDA does: in order, up to the first unknown entry."""
    if visible is None:
        return gpus
    allowed: list[NvidiaGpu] = []
    for entry in visible.split(","):
        name = entry.strip()
        named = [device for device in gpus if name and _is_named(device, name)]
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
        raise BadSetting("devices", choice, f"{device.id} has {total} of memory, not {wanted}")
    return replace(device, memory_bytes=memory_bytes)
