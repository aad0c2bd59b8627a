"""One GPU as the node keeps it: its residents, those that leave, and its memory."""

import asyncio
import os
from dataclasses import dataclass, field

from cache_manager.model.ids import GpuId, ModelId
from gpu_manager.devices.gpu_device import GpuDevice
from gpu_manager.errors import GpuManagerError
from gpu_manager.node.change_signal import Change
from gpu_manager.node.ledger import Ledger
from gpu_manager.runtimes.runtime import HostedModel
from gpu_manager.weights.host_images import ImageHold
from scheduler.api import GpuSpec, SlotId


class ModelOnGpu:
    """One model on one GPU, from the order to load it until the order to unload it.

    `hosted` is None while it loads; `reserved_bytes` is what the scheduler counts for it.
    """

    def __init__(self, model: ModelId, reserved_bytes: int, now_s: float) -> None:
        self.model = model
        self.reserved_bytes = reserved_bytes
        self.since_s = self.used_s = now_s
        self.uses = 0
        self.hosted: HostedModel | None = None
        self.hold: ImageHold | None = None
        self.loading: asyncio.Task[None] | None = None
        self._lost: GpuManagerError | None = None
        self._decided = asyncio.Event()

    def arrived(self, hosted: HostedModel, now_s: float) -> None:
        """It is loaded."""
        self.hosted = hosted
        self.since_s = self.used_s = now_s
        self._decided.set()

    def lost(self, cause: GpuManagerError) -> None:
        """It never came, or is gone."""
        self._lost = cause
        self._decided.set()

    async def ready(self) -> HostedModel:
        """Wait until it is loaded, or raise why that will not be."""
        await self._decided.wait()
        if self._lost is not None:
            raise self._lost
        assert self.hosted is not None, f"{self.model} neither came nor was lost"
        return self.hosted

    def release(self) -> None:
        """Its weights are not used here any more."""
        if self.hold is not None:
            self.hold.release()
            self.hold = None


@dataclass(slots=True)
class HostGpu:
    """One GPU of the node; `foreign_bytes` of its memory are used by other programs.

    `turns` is the file by which its workers take turns, where its slot holds several leases.
    """

    device: GpuDevice
    spec: GpuSpec
    ledger: Ledger
    residents: dict[ModelId, ModelOnGpu] = field(default_factory=dict)
    leaving: set[asyncio.Task[None]] = field(default_factory=set)
    change: Change = field(default_factory=Change)
    foreign_bytes: int = 0
    lost: bool = False
    turns: int | None = None

    @property
    def id(self) -> GpuId:
        """Its name in the scheduler."""
        return self.spec.id

    def close(self) -> None:
        """It is used no more."""
        self.device.close()
        if self.turns is not None:
            os.close(self.turns)
            self.turns = None

    @property
    def slot(self) -> SlotId:
        """Its first slot."""
        return self.spec.slot_specs()[0].id

    def hosted(self, model: ModelId) -> HostedModel | None:
        """The model, if it is loaded."""
        resident = self.residents.get(model)
        return None if resident is None else resident.hosted

    def loaded(self) -> list[HostedModel]:
        """Its models that are loaded."""
        found = [resident.hosted for resident in self.residents.values()]
        return [hosted for hosted in found if hosted is not None]

    def resident_of(self, hosted: HostedModel) -> ModelOnGpu | None:
        """The resident of this hosted model, unless an order to unload it has come."""
        resident = self.residents.get(ModelId(hosted.order.model))
        return resident if resident is not None and resident.hosted is hosted else None

    def by_use(self) -> list[ModelOnGpu]:
        """From the least to the most recently used; what is loading comes last."""
        return sorted(
            self.residents.values(), key=lambda found: (found.hosted is None, found.used_s)
        )

    def size_bytes(self, resident: ModelOnGpu) -> int:
        """What it was granted, or will be."""
        return self.ledger.models().get(resident.model, resident.reserved_bytes)

    def settle(self) -> None:
        """After memory came free or was taken: grant what was measured, and say the new limits."""
        loaded = [found for found in self.residents.values() if found.hosted is not None]
        for resident in loaded:
            self.ledger.grow(resident.model, self.ledger.measured_bytes(resident.model))
        for resident in loaded:
            if resident.hosted is not None:
                resident.hosted.limit(self.ledger.limit_bytes(resident.model))
        self.change.happened()
