"""A node's GPUs for the scheduler, with their slots and virtual CPUs as the settings say."""

import logging
import os
from pathlib import Path

from cache_manager.model.ids import NodeId
from gpu_manager.devices.gpu_device import GpuDevice
from gpu_manager.errors import BadSetting
from gpu_manager.node.ledger import Ledger
from gpu_manager.node.residents import HostGpu
from gpu_manager.node.settings import MOST_SLOTS, NodeSettings
from gpu_manager.transfers.gpu_paths import GpuPaths, SharedGates
from gpu_manager.worker.device.gpu_turns import make_turns
from scheduler.api import GpuSpec, SlotId, SlotSpec

log = logging.getLogger(__name__)

_SEVERAL = 2
# The memory that a process takes on a GPU before it holds a model; used until it is measured.
_CUDA_CONTEXT_BYTES = 600 << 20
_MPS_PIPES = Path("/tmp/nvidia-mps")


def host_gpu(
    device: GpuDevice,
    node: NodeId,
    settings: NodeSettings,
    gates: SharedGates | None,
    gpus: int,
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
    return HostGpu(device, spec, ledger, turns=turns, paths=GpuPaths(gates))


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
