"""Emulated GPUs: models run on the CPU, each GPU is a budget of bytes."""

from collections.abc import Mapping
from dataclasses import dataclass

from cache_manager.model.ids import GpuId, NodeId
from gpu_manager.devices.gpu_device import HealthEvent
from gpu_manager.devices.host_memory import available_bytes

_LEAST_BYTES = 256 << 20
# Workers of emulated GPUs must not touch a real one.


@dataclass(frozen=True, slots=True)
class EmulatedGpu:
    """One emulated GPU."""

    id: GpuId
    memory_bytes: int
    kind: str = "cpu"
    name: str = "emulated GPU"
    gpu_type: str = "emulated"
    worker_device: str = "cpu"

    @property
    def device_bytes(self) -> int:
        """The budget: no other program uses an emulated GPU."""
        return self.memory_bytes

    def used_bytes(self) -> None:
        """Only the workers can say."""

    def process_bytes(self) -> Mapping[int, int]:
        """Only the workers can say."""
        return {}

    def utilisation(self) -> None:
        """Only the workers can say."""

    def health(self) -> tuple[HealthEvent, ...]:
        """Nothing ever ails it."""
        return ()

    def close(self) -> None:
        """Nothing to close."""


def emulated(node: NodeId, count: int, memory_bytes: int | None = None) -> list[EmulatedGpu]:
    """That many GPUs, each with `memory_bytes` or a fair share of the machine's free memory."""
    each = memory_bytes or _fair_share_bytes(count)
    return [EmulatedGpu(GpuId(f"{node}/cpu:{number}"), each) for number in range(count)]


def _fair_share_bytes(count: int) -> int:
    """Half of the memory for all GPUs; the functions and the weight store need the other."""
    return max(_LEAST_BYTES, available_bytes() // (2 * count))
