"""The GPUs of a simulated cluster."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cache_manager.model.ids import MIB, GpuId, ModelId, NodeId
from scheduler.model.values import GpuSpec, SlotId, SlotSpec

GPUS_PER_NODE = 4
_LEAST = 0.1  # no run is faster than this beside others, whatever a table says


@dataclass(frozen=True, slots=True)
class Hardware:
    """The simulated cluster; `overhead_s` holds the GPU in every request, hit or miss.

    A GPU's memory is one, its compute is divided equally among its `slots`. Of a further request in
    a batch, `merged` is the part of its time that the batch saves. A load beside runs takes the
    part `load_takes` of its time from the slot's compute, unless runs go on at once. With `at_once`
    a whole GPU has so many leases, whose runs slow each other down by `slowdowns`: of one model
    beside another, and nothing for pairs that it does not name. Runs of one model take turns.
    """

    gpus: int = 12
    gpu_memory_mb: int = 7982
    overhead_s: float = 0.0
    slots: int = 1
    merged: float = 0.0
    load_takes: float = 0.0
    at_once: int = 1
    slowdowns: Mapping[tuple[ModelId, ModelId], float] = field(default_factory=dict, hash=False)

    def slowdown(self, model: ModelId, others: Sequence[ModelId]) -> float:
        """How many times as long a run takes beside runs of these."""
        factor = 1.0
        for other in others:
            factor += 1.0 if other == model else self.slowdowns.get((model, other), 1.0) - 1.0
        return max(factor, _LEAST)

    def specs(self) -> list[GpuSpec]:
        width = len(str(max(self.gpus - 1, 0)))
        return [
            GpuSpec(
                GpuId(f"gpu{number:0{width}d}"),
                NodeId(f"node{number // GPUS_PER_NODE}"),
                self.gpu_memory_mb * MIB,
                slots=self._slots(f"gpu{number:0{width}d}"),
            )
            for number in range(self.gpus)
        ]

    def run_s(self, alone_s: float, portion: int) -> float:
        """How long a slot takes for a portion of a batch, by the time of one on a whole GPU."""
        return alone_s * self.slots * (portion - self.merged * (portion - 1))

    def _slots(self, gpu: str) -> tuple[SlotSpec, ...]:
        if self.at_once > 1:
            return (SlotSpec(SlotId(gpu), self.at_once, at_once=True),)
        if self.slots == 1:
            return ()
        return tuple(SlotSpec(SlotId(f"{gpu}.{number}")) for number in range(self.slots))
