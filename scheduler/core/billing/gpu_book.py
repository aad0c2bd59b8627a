"""One GPU's account: its slots, its models, its empty processes, and the memory nobody uses."""

from cache_manager.model.ids import ModelId
from scheduler.core.billing.charges import CONTEXT, GPU_TIME, IDLE, IN_USE, Payer
from scheduler.core.billing.holding import Holding
from scheduler.core.state.slots import Gpu
from scheduler.model.values import SlotId

_NO_MODEL = ModelId("")


class GpuBook:
    """What a GPU holds, as of the last update, and what is charged for it.

    Unused memory is counted by itself: free, and withheld for programs outside gpufaas.
    """

    __slots__ = (
        "_charged",
        "_counted_us",
        "_span_us",
        "_unused_byte_us",
        "_unused_bytes",
        "cache",
        "contexts",
        "gpu",
        "gpu_type",
        "node",
        "residents",
        "slots",
    )

    def __init__(self, gpu: Gpu, charged: list[Payer], now_us: int) -> None:
        self.cache = gpu.cache
        self.gpu = gpu.spec.id
        self.node = gpu.spec.node
        self.gpu_type = gpu.spec.gpu_type
        self.residents: dict[ModelId, Holding] = {}
        self.contexts: dict[ModelId, Holding] = {}
        self.slots: dict[SlotId, Holding] = {
            slot.id: Holding(_NO_MODEL, self.gpu, 1, GPU_TIME, None, charged, now_us)
            for slot in gpu.slots
        }
        self._charged = charged
        self._counted_us = now_us
        self._span_us = 0
        self._unused_byte_us = 0
        self._unused_bytes = gpu.cache.memory_bytes

    def update(self, now_us: int) -> list[ModelId]:
        """Take over what the GPU holds now; returns the models that are new there."""
        cache, residents = self.cache, self.residents
        left = [model for model in residents if model not in cache.residents]
        for model in [model for model in self.contexts if model not in cache.contexts]:
            self.contexts.pop(model).settle(now_us)
        for model, context in cache.contexts.items():
            if model not in self.contexts:
                self.contexts[model] = self._context(model, now_us)
            self.contexts[model].resize(context.bytes, now_us)
        for model in left:
            residents.pop(model).resize(0, now_us)
        arrived = []
        for model, resident in cache.residents.items():
            holding = residents.get(model)
            if holding is None:
                arrived.append(model)
                size = resident.bytes
                residents[model] = Holding(
                    model, self.gpu, size, IN_USE, IDLE, self._charged, now_us
                )
            elif holding.size != resident.bytes:
                holding.resize(resident.bytes, now_us)
        self._count(now_us)
        held = sum([each.size for each in residents.values()])
        held += sum([each.size for each in self.contexts.values()])
        self._unused_bytes = cache.memory_bytes - held
        return arrived

    def settle(self, now_us: int) -> None:
        """Charge everything up to now."""
        for holding in self.residents.values():
            holding.settle(now_us)
        for holding in self.contexts.values():
            holding.settle(now_us)
        for holding in self.slots.values():
            holding.settle(now_us)
        self._count(now_us)

    def take_totals(self) -> tuple[int, int, int, int]:
        """Since the last time: slot time, idle slot time, bytes over time, unused bytes over time.

        Settle it before.
        """
        span_us, self._span_us = self._span_us, 0
        unused, self._unused_byte_us = self._unused_byte_us, 0
        idle_us = 0
        for slot in self.slots.values():
            idle_us += slot.unused_us
            slot.unused_us = 0
        return span_us * len(self.slots), idle_us, span_us * self.cache.memory_bytes, unused

    def _context(self, model: ModelId, now_us: int) -> Holding:
        """What a model leaves is paid by those who used the model."""
        found = Holding(model, self.gpu, 0, CONTEXT, CONTEXT, self._charged, now_us)
        left = self.residents.get(model)
        if left is not None:
            for function in left.users:
                found.payer(function, now_us)
        return found

    def _count(self, now_us: int) -> None:
        span_us = now_us - self._counted_us
        self._counted_us = now_us
        self._span_us += span_us
        self._unused_byte_us += span_us * self._unused_bytes
