"""One GPU's account: its slots, its models, its empty processes, and the memory nobody uses."""

from cache_manager.model.ids import ModelId
from cache_manager.residency.gpu_cache import part_of
from scheduler.core.billing.charges import CONTEXT, GPU_TIME, IDLE, IN_USE, Payer
from scheduler.core.billing.holding import FormerUsers, Holding
from scheduler.core.state.slots import Gpu
from scheduler.model.values import SlotId

_NO_MODEL = ModelId("")


class GpuBook:
    """What a GPU holds, as of the last update, and what is charged for it.

    Unused memory is counted by itself: free, and withheld for programs outside gpufaas.
    """

    __slots__ = (
        "_counted_us",
        "_former",
        "_span_us",
        "_unused_byte_us",
        "_unused_bytes",
        "cache",
        "charged",
        "contexts",
        "gpu",
        "gpu_type",
        "node",
        "residents",
        "slots",
    )

    def __init__(self, gpu: Gpu, former: FormerUsers, now_us: int) -> None:
        self.cache = gpu.cache
        self._former = former
        self.gpu = gpu.spec.id
        self.node = gpu.spec.node
        self.gpu_type = gpu.spec.gpu_type
        self.charged: list[Payer] = []
        self.residents: dict[ModelId, Holding] = {}
        self.contexts: dict[ModelId, Holding] = {}
        self.slots: dict[SlotId, Holding] = {
            slot.id: Holding(_NO_MODEL, self.gpu, 1, GPU_TIME, None, self.charged, now_us)
            for slot in gpu.slots
        }
        self._counted_us = now_us
        self._span_us = 0
        self._unused_byte_us = 0
        self._unused_bytes = gpu.cache.memory_bytes

    def update(self, model: ModelId, now_us: int) -> Holding | None:
        """Take over what the GPU holds of a model now; returns the model if it is new there.

        In a process that it shares with others, its part of the process's own memory counts too.
        """
        resident, context = self.cache.residents.get(model), self.cache.contexts.get(model)
        self._resize_context(model, 0 if context is None else context.bytes, now_us)
        holding = self.residents.get(model)
        if resident is None:
            if holding is not None:
                self._resize(holding, 0, now_us)
                holding.kept_sole = None  # it refers to the holding
                del self.residents[model]
                self._former.left(self.node, model, holding.users)
            return None
        size = resident.bytes + part_of(self.cache, model)
        if holding is not None:
            if holding.size != size:
                self._resize(holding, size, now_us)
            return None
        holding = Holding(model, self.gpu, 0, IN_USE, IDLE, self.charged, now_us)
        self._resize(holding, size, now_us)
        self.residents[model] = holding
        return holding

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

    def _resize_context(self, model: ModelId, size: int, now_us: int) -> None:
        """What a model leaves is paid by those who used the model."""
        found = self.contexts.get(model)
        if found is None:
            if not size:
                return
            found = Holding(model, self.gpu, 0, CONTEXT, CONTEXT, self.charged, now_us)
            self.contexts[model] = found
            left = self.residents.get(model)
            users = self._former.of(self.node, model) if left is None else left.users
            for function in users:
                found.payer(function, now_us)
        if found.size != size:
            self._resize(found, size, now_us)
        if not size:
            del self.contexts[model]

    def _resize(self, holding: Holding, size: int, now_us: int) -> None:
        self._count(now_us)
        self._unused_bytes += holding.size - size
        holding.resize(size, now_us)

    def _count(self, now_us: int) -> None:
        span_us = now_us - self._counted_us
        self._counted_us = now_us
        self._span_us += span_us
        self._unused_byte_us += span_us * self._unused_bytes
