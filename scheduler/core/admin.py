"""Orders of administrators and memory pressure: pin, unpin, prefetch, evict, free memory."""

from collections.abc import Sequence

from cache_manager.model.ids import GpuId, ModelId
from cache_manager.residency import idle_contexts
from scheduler.cluster.slots import Gpu, Slot
from scheduler.cluster.state import ClusterState
from scheduler.core.placer import Placer
from scheduler.model.actions import Action, Demote, EndContext, Refuse
from scheduler.model.events import EvictAsked, PinAsked, PrefetchAsked, UnpinAsked


class AdminHandler:
    """Carries an order out where that is safe, and otherwise refuses it with a reason."""

    def __init__(self, cluster: ClusterState, placer: Placer) -> None:
        self._cluster = cluster
        self._placer = placer

    def obey(
        self,
        event: PinAsked | UnpinAsked | PrefetchAsked | EvictAsked,
        now: float,
        out: list[Action],
    ) -> None:
        if event.gpu is not None and event.gpu not in self._cluster.gpus:
            out.append(Refuse(event, f"no GPU {event.gpu!r}"))
            return
        if isinstance(event, PinAsked):
            reason = self._pin(event.model, event.gpu, now, out)
        elif isinstance(event, UnpinAsked):
            reason = self._unpin(event.model, event.gpu)
        elif isinstance(event, PrefetchAsked):
            reason = self._prefetch(event.model, event.gpu, now, out)
        else:
            reason = self._evict(event.model, event.gpu, out)
        if reason:
            out.append(Refuse(event, reason))

    def relieve(
        self, gpu: Gpu, short_bytes: int, withheld_bytes: int, now: float, out: list[Action]
    ) -> None:
        """A GPU lacks memory that the core counted on: free that much and withhold it from use.

        Of what is only withheld, free what was not free. What cannot be freed now is left to the
        next report; a snapshot of the node ends the shortage.
        """
        cache = gpu.cache
        self._free(gpu, short_bytes + max(0, withheld_bytes - cache.free_bytes), now, out)
        self._cluster.index.withhold(cache, min(short_bytes + withheld_bytes, cache.free_bytes))
        self._free_what_waits(gpu)

    def set_apart(
        self,
        gpu: Gpu,
        processes: Sequence[tuple[int, Sequence[ModelId]]],
        now: float,
        out: list[Action],
    ) -> None:
        """Withhold memory that processes with several models take, until the next snapshot."""
        index, cache = self._cluster.index, gpu.cache
        self._free(gpu, sum(size for size, _ in processes) - cache.free_bytes, now, out)
        counted = []
        for size_bytes, models in processes:
            withheld_bytes = min(size_bytes, cache.free_bytes)
            index.withhold(cache, withheld_bytes)
            counted.append((withheld_bytes, models))
        index.replace_shared(cache, counted)
        self._free_what_waits(gpu)

    def _free(self, gpu: Gpu, short_bytes: int, now: float, out: list[Action]) -> None:
        """Free less where no more can be freed now."""
        if short_bytes <= 0:
            return
        index, cache = self._cluster.index, gpu.cache
        lacking_bytes = short_bytes - self._end_contexts(gpu, short_bytes, "memory pressure", out)
        victims = index.victims(cache, lacking_bytes, now) if lacking_bytes > 0 else ()
        if victims is None:
            idle = [resident for resident in cache.residents.values() if not resident.kept]
            victims = tuple(resident.model for resident in idle)
        for victim in victims:
            self._demote(gpu, victim, "memory pressure", out)

    def take_over(
        self, gpu: Gpu, model: ModelId, size_bytes: int | None, now: float, out: list[Action]
    ) -> None:
        """A manager holds a model that the core did not count there: count it, and free memory."""
        profiles, index, cache = self._cluster.profiles, self._cluster.index, gpu.cache
        needed = profiles.memory_bytes(model) if size_bytes is None else size_bytes
        short_bytes, reason = needed - cache.free_bytes, f"{model} is there unexpectedly"
        short_bytes -= self._end_contexts(gpu, short_bytes, reason, out)
        if short_bytes > 0:
            for victim in index.victims(cache, short_bytes, now) or ():
                self._demote(gpu, victim, reason, out)
        load_s = profiles.load_s(model, index.tier(gpu.spec.node, model))
        self._cluster.admit(gpu, model, min(needed, cache.free_bytes), now, load_s)
        for slot in gpu.slots:
            self._cluster.settle(slot)  # an idle one may have a hit now
        if self._placer.idle.active:
            self._placer.idle.found(gpu, model)

    def keep_context(
        self, gpu: Gpu, model: ModelId, size_bytes: int, since_s: float, out: list[Action]
    ) -> None:
        """A manager keeps an empty process that a model left: count it, if there is room."""
        if model in gpu.cache.residents:
            return  # it is on its way into that process
        if size_bytes > gpu.cache.free_bytes:
            out.append(EndContext(gpu.spec.id, model, "it has no room"))
            return
        self._cluster.index.keep_context(gpu.cache, model, size_bytes, since_s)
        self._placer.idle.found(gpu, model)

    def resize(self, model: ModelId, now: float, out: list[Action]) -> None:
        """A model was measured or declared again: correct its size on every GPU that holds it."""
        self._cluster.remeasure(model)
        needed = self._cluster.profiles.memory_bytes(model)
        for gpu_id in list(self._cluster.index.holders(model)):
            self._resize(self._cluster.gpus[gpu_id], model, needed, now, out)

    def _resize(self, gpu: Gpu, model: ModelId, needed: int, now: float, out: list[Action]) -> None:
        """Free memory for the new size; where that is impossible, evict an idle copy."""
        index, cache = self._cluster.index, gpu.cache
        resident = cache.residents[model]
        short_bytes = needed - resident.bytes - cache.free_bytes
        larger = f"{model} is larger than estimated"
        short_bytes -= self._end_contexts(gpu, short_bytes, larger, out)
        if short_bytes > 0:
            victims = index.victims(cache, short_bytes, now, keep=(model,))
            if victims is None and not resident.kept:
                self._demote(gpu, model, "its measured size does not fit this GPU", out)
                return
            for victim in victims or ():
                self._demote(gpu, victim, larger, out)
        index.resize(cache, model, needed)

    # -- one order each: the reason of a refusal, or "" ------------------------------------------

    def _pin(self, model: ModelId, gpu_id: GpuId | None, now: float, out: list[Action]) -> str:
        holders = list(self._cluster.index.holders(model).values())
        if gpu_id is None:
            for cache in holders:
                self._cluster.index.pin(cache, model, pinned=True)
                self._free_what_waits(self._cluster.gpus[cache.id])
            return "" if holders else "no GPU holds it; name a GPU to load it there"
        gpu = self._cluster.gpus[gpu_id]
        if model not in gpu.cache.residents:
            reason = self._prefetch(model, gpu_id, now, out)
            if reason:
                return reason
        self._cluster.index.pin(gpu.cache, model, pinned=True)
        self._free_what_waits(gpu)
        return ""

    def _unpin(self, model: ModelId, gpu_id: GpuId | None) -> str:
        holders = self._cluster.index.holders(model)
        chosen = [cache for gpu, cache in holders.items() if gpu_id in (None, gpu)]
        for cache in chosen:
            self._cluster.index.pin(cache, model, pinned=False)
        return "" if chosen else "it is not resident there"

    def _prefetch(self, model: ModelId, gpu_id: GpuId | None, now: float, out: list[Action]) -> str:
        slot = self._idle_slot_for(model, gpu_id)
        if slot is None:
            return "no idle GPU has room for it" if gpu_id is None else "that GPU is not idle"
        if slot.holds((model,)):
            return "it is resident there already"
        done = self._placer.prefetch(model, slot, now, out)
        return "" if done else "it does not fit beside the models in use there"

    def _idle_slot_for(self, model: ModelId, gpu_id: GpuId | None) -> Slot | None:
        bundle = self._cluster.bundle((model,))
        if gpu_id is not None:
            return next((s for s in self._cluster.gpus[gpu_id].slots if s.idle), None)
        fitting = [
            slot
            for slot in self._cluster.slots.values()
            if slot.idle
            and not slot.holds((model,))
            and self._cluster.index.fits(slot.gpu.cache, bundle.needs)
        ]
        return min(fitting, key=lambda slot: (slot.frequency, slot.id), default=None)

    def _evict(self, model: ModelId, gpu_id: GpuId | None, out: list[Action]) -> str:
        holders = list(self._cluster.index.holders(model))
        chosen = [self._cluster.gpus[gpu] for gpu in holders if gpu_id in (None, gpu)]
        if not chosen:
            return "it is not resident there"
        kept = [gpu for gpu in chosen if gpu.cache.residents[model].kept]
        for gpu in chosen:
            if gpu not in kept:
                self._demote(gpu, model, "asked for", out)
        in_use = ", ".join(gpu.spec.id for gpu in kept)
        return f"in use, waited for or pinned on {in_use}" if kept else ""

    def _demote(self, gpu: Gpu, model: ModelId, reason: str, out: list[Action]) -> None:
        self._cluster.evict(gpu, model)
        out.append(Demote(gpu.spec.id, model, reason))

    def _end_contexts(self, gpu: Gpu, short_bytes: int, reason: str, out: list[Action]) -> int:
        """Return the bytes that this frees."""
        before_bytes = gpu.cache.free_bytes
        for left in idle_contexts(gpu.cache, short_bytes):
            self._cluster.index.drop_context(gpu.cache, left)
            out.append(EndContext(gpu.spec.id, left, reason))
        return gpu.cache.free_bytes - before_bytes

    def _free_what_waits(self, gpu: Gpu) -> None:
        """After a pin or a shortage: requests that no longer fit here wait for any GPU again."""
        index = self._cluster.index
        for slot in gpu.slots:
            fit = all(
                index.could_fit(gpu.cache, lane.bundle.needs) for lane in slot.local.lanes.values()
            )
            if not fit:
                self._placer.recall(slot)
