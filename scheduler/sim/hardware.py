"""The GPUs of a simulated cluster."""

from dataclasses import dataclass

from cache_manager.model.ids import MIB, GpuId, NodeId
from scheduler.model.values import GpuSpec

GPUS_PER_NODE = 4


@dataclass(frozen=True, slots=True)
class Hardware:
    """The simulated cluster; `overhead_s` holds the GPU in every request, hit or miss."""

    gpus: int = 12
    gpu_memory_mb: int = 7982
    overhead_s: float = 0.0

    def specs(self) -> list[GpuSpec]:
        width = len(str(max(self.gpus - 1, 0)))
        return [
            GpuSpec(
                GpuId(f"gpu{number:0{width}d}"),
                NodeId(f"node{number // GPUS_PER_NODE}"),
                self.gpu_memory_mb * MIB,
            )
            for number in range(self.gpus)
        ]
