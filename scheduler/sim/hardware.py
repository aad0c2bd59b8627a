"""The GPUs of a simulated cluster."""

from dataclasses import dataclass

from cache_manager.model.ids import MIB, GpuId, NodeId
from scheduler.model.values import GpuSpec, SlotId, SlotSpec

GPUS_PER_NODE = 4


@dataclass(frozen=True, slots=True)
class Hardware:
    """The simulated cluster; `overhead_s` holds the GPU in every request, hit or miss.

    A GPU's memory is one, its compute is divided equally among its `slots`. Of a further request in
    a batch, `merged` is the part of its time that the batch saves. A load beside runs takes the
    part `load_takes` of its time from the slot's compute.
    """

    gpus: int = 12
    gpu_memory_mb: int = 7982
    overhead_s: float = 0.0
    slots: int = 1
    merged: float = 0.0
    load_takes: float = 0.0

    def specs(self) -> list[GpuSpec]:
        width = len(str(max(self.gpus - 1, 0)))
        return [
            GpuSpec(
                GpuId(f"gpu{number:0{width}d}"),
                NodeId(f"node{number // GPUS_PER_NODE}"),
                self.gpu_memory_mb * MIB,
                slots=self.parts(f"gpu{number:0{width}d}"),
            )
            for number in range(self.gpus)
        ]

    def run_s(self, alone_s: float, portion: int) -> float:
        """How long a slot takes for a portion of a batch, by the time of one on a whole GPU."""
        return alone_s * self.slots * (portion - self.merged * (portion - 1))

    def parts(self, gpu: str) -> tuple[SlotSpec, ...]:
        """The slots of a GPU; none is named where the whole GPU is one."""
        if self.slots == 1:
            return ()
        return tuple(SlotSpec(SlotId(f"{gpu}.{number}")) for number in range(self.slots))
