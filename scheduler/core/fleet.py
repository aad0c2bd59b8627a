"""GPUs that join, drain, are lost or report; what their models need; orders of administrators."""

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from cache_manager.model.ids import GpuId, ModelId, Tier
from cache_manager.residency import idle_contexts
from scheduler.cluster.side_by_side import SideBySide
from scheduler.cluster.slots import ActiveLease, Gpu, Slot
from scheduler.cluster.state import ClusterState
from scheduler.core.lifecycle import Lifecycle
from scheduler.core.placer import Placer
from scheduler.model.actions import Action, Demote, EndContext, EndLease, Refuse
from scheduler.model.errors import BadEvent
from scheduler.model.events import (
    EvictAsked,
    GpuDraining,
    GpuJoined,
    GpuLost,
    GpuSnapshot,
    LoadFailed,
    MemoryPressure,
    ModelDemoted,
    ModelLoaded,
    ModelRegistered,
    NodeHeard,
    NodeSilent,
    NodeSnapshot,
    PinAsked,
    PrefetchAsked,
    RunFinished,
    UnpinAsked,
)
from scheduler.model.values import AfterLoss, LeaseId, SlotId


class Fleet:
    """Keeps GPUs in step with their managers' reports and administrators' orders."""

    def __init__(self, cluster: ClusterState, placer: Placer, lifecycle: Lifecycle) -> None:
        self._cluster = cluster
        self._placer = placer
        self._lifecycle = lifecycle
        self._side_by_side = SideBySide(cluster)

    def gpu(self, gpu: GpuId) -> Gpu:
        """BadEvent if this GPU has not joined."""
        joined = self._cluster.gpus.get(gpu)
        if joined is None:
            raise BadEvent("GPU", gpu)
        return joined

    def join(self, event: GpuJoined, now: float, out: list[Action]) -> None:
        spec = event.gpu
        if spec.id in self._cluster.gpus:
            out.append(Refuse(event, f"GPU {spec.id} has joined already"))
        elif any(slot.id in self._cluster.slots for slot in spec.slot_specs()):
            out.append(Refuse(event, f"a slot of GPU {spec.id} has joined already"))
        elif len({slot.id for slot in spec.slot_specs()}) < len(spec.slot_specs()):
            out.append(Refuse(event, f"GPU {spec.id} names a slot twice"))
        else:
            self._time_without_gpus_ends()
            self._cluster.join(spec)
            self._lifecycle.refuse_what_cannot_fit(out)

    def drain(self, event: GpuDraining, now: float, out: list[Action]) -> None:
        """Offer the GPU no more; requests in its local queues wait for any GPU again."""
        gpu = self.gpu(event.gpu)
        self._cluster.retire(gpu)
        for slot in gpu.slots:
            self._placer.recall(slot)
            self._placer.standing.recall(slot)
        gpu.draining = True
        self.leave_if_drained(gpu)

    def leave_if_drained(self, gpu: Gpu) -> None:
        if gpu.draining and not any(slot.leases for slot in gpu.slots):
            self._cluster.remove(gpu)

    def lose(self, event: GpuLost, now: float, out: list[Action]) -> None:
        """A GPU is gone: its local queues wait for any GPU; leased requests fail or wait again."""
        gpu = self.gpu(event.gpu)
        self._cluster.retire(gpu)
        for slot in gpu.slots:
            self._placer.recall(slot)
            for lease in list(slot.leases.values()):
                reason = f"GPU {event.gpu} was lost"
                self._lifecycle.cut_off(lease, event.running, reason, out)
                self._placer.end(lease, now)
        self._cluster.remove(gpu)

    def suspend(self, event: NodeSilent, now: float, out: list[Action]) -> None:
        """Offer the node's GPUs no more for now; models and leases stay as they are.

        Requests in their local queues wait for any GPU again, at their old places, even if no other
        GPU is there: another GPU may serve them sooner than a node that may be dead, and the others
        lose nothing by waiting in the global queue, from where the policy places them again.
        """
        for gpu in self._cluster.gpus_of.get(event.node, ()):
            gpu.silent = True
            self._cluster.retire(gpu)
            for slot in gpu.slots:
                self._placer.recall(slot)

    def resume(self, event: NodeHeard, now: float, out: list[Action]) -> None:
        """Offer a silent node's GPUs again, except those that drain."""
        for gpu in self._cluster.gpus_of.get(event.node, ()):
            if gpu.silent:
                gpu.silent = False
                if not gpu.draining:
                    self._offer(gpu)

    def _offer(self, gpu: Gpu) -> None:
        self._time_without_gpus_ends()
        self._cluster.offer(gpu)

    def _time_without_gpus_ends(self) -> None:
        """If no GPU was offered, nothing could be placed, and that is not the pace of a GPU."""
        if not self._cluster.active_slots:
            self._placer.pace.pause()
            self._placer.tenancy.owners.pause()

    def reconcile(self, event: NodeSnapshot, now: float, out: list[Action]) -> None:
        _check(event, self._cluster, self._placer.leases)
        reported = {snapshot.gpu.id for snapshot in event.gpus}
        for gpu in list(self._cluster.gpus_of.get(event.node, ())):
            if gpu.spec.id not in reported:
                self.lose(GpuLost(gpu.spec.id, event.lost_leases), now, out)
        self.resume(NodeHeard(event.node), now, out)
        stored = dict(event.stored)
        self._cluster.index.replace_tiers(event.node, stored)
        self._placer.exits.node_reports(event.node, stored, now)
        for snapshot in event.gpus:
            joined = self._cluster.gpus.get(snapshot.gpu.id)
            if joined is not None:  # what contexts need is measured, and changes
                joined.spec = replace(joined.spec, context_bytes=snapshot.gpu.context_bytes)
            if joined is not None and joined.spec != snapshot.gpu:  # for example repartitioned
                self.lose(GpuLost(snapshot.gpu.id, event.lost_leases), now, out)
                joined = None
            if joined is None:
                self.join(GpuJoined(snapshot.gpu), now, out)
            elif joined.draining and not snapshot.draining:
                joined.draining = False
                self._offer(joined)
            self._reconcile_gpu(snapshot, event.lost_leases, now, out)
            if snapshot.draining:
                self.drain(GpuDraining(snapshot.gpu.id), now, out)

    def _reconcile_gpu(
        self, snapshot: GpuSnapshot, lost: AfterLoss, now: float, out: list[Action]
    ) -> None:
        gpu = self.gpu(snapshot.gpu.id)
        live = {lease.lease for lease in snapshot.leases}
        for slot in gpu.slots:
            for lease in list(slot.leases.values()):
                if lease.id not in live:
                    reason = "its GPU manager no longer has the lease"
                    self._lifecycle.cut_off(lease, lost, reason, out)
                    self._placer.end(lease, now)
        self._reconcile_residents(gpu, snapshot, now, out)
        self._reconcile_loads(gpu, snapshot, now)
        for reported in snapshot.leases:
            slot = self._cluster.slots[reported.slot]
            if reported.lease not in slot.leases:
                self._lifecycle.adopt(reported, slot, now, out)

    def _reconcile_residents(
        self, gpu: Gpu, snapshot: GpuSnapshot, now: float, out: list[Action]
    ) -> None:
        index, cache = self._cluster.index, gpu.cache
        index.withhold(cache, -cache.withheld_bytes)
        reported = dict(snapshot.residents)
        for model in [model for model in cache.residents if model not in reported]:
            self._cluster.evict(gpu, model)
        gpu.called_off.clear()
        left_s = {model: context.since_s for model, context in cache.contexts.items()}
        for model in left_s:
            index.drop_context(cache, model)
        self._count_residents(gpu, snapshot, now, out)
        for model, size_bytes in snapshot.residents:
            if self._cluster.profiles.report_memory(model, size_bytes):
                self._remeasured(model, now, out)
        for model, size_bytes in snapshot.contexts:
            self._keep_context(gpu, model, size_bytes, left_s.get(model, now), out)
        if snapshot.shared or cache.shared:
            self._set_apart(gpu, snapshot.shared, now, out)
        gpu_shares = dict(snapshot.gpu_shares)
        for model, resident in cache.residents.items():
            resident.gpu_share = gpu_shares.get(model, 1.0)

    def _count_residents(
        self, gpu: Gpu, snapshot: GpuSnapshot, now: float, out: list[Action]
    ) -> None:
        """Shrunk models first, to free memory."""
        index, cache = self._cluster.index, gpu.cache
        for model, size_bytes in snapshot.residents:
            if model in cache.residents and size_bytes < cache.residents[model].bytes:
                index.resize(cache, model, size_bytes)
        for model, size_bytes in snapshot.residents:
            if model in cache.residents:
                index.resize(cache, model, size_bytes)
            elif not _was_demoted(gpu, model, out):
                self._take_over(gpu, model, size_bytes, now, out)

    def _reconcile_loads(self, gpu: Gpu, snapshot: GpuSnapshot, now: float) -> None:
        """The copy engine is busy with what its manager loads, and nothing else."""
        index, profiles = self._cluster.index, self._cluster.profiles
        for model in [model for model in gpu.loads if model not in snapshot.loading]:
            self._cluster.load_ended(gpu, model)
            for slot in gpu.slots:  # the report of its load was lost
                for lease in slot.leases.values():
                    self._placer.loaded(lease, model, now)
        for model in snapshot.loading:
            if model in gpu.cache.residents and model not in gpu.loads:
                tier = index.tier(gpu.spec.node, model)
                gpu.loads[model] = now + profiles.load_s(model, tier)
        if snapshot.stuck or gpu.stuck:
            self._reconcile_stuck(gpu, snapshot, now)

    def _reconcile_stuck(self, gpu: Gpu, snapshot: GpuSnapshot, now: float) -> None:
        """Loads without progress take nothing from calls of what the GPU has, and get no requests.

        What a load was ordered for stands beside the slot's runs, as if it had been from the start.
        """
        since_s = {model: now - idle_s for model, idle_s in snapshot.stuck if model in gpu.loads}
        fresh = since_s.keys() - gpu.stuck.keys()
        self._cluster.stick(gpu, since_s)
        for slot in gpu.slots if fresh else ():
            for lease in slot.leases.values():
                awaited = {model: gpu.loads[model] for model in lease.models if model in fresh}
                if awaited and not lease.more:  # one of several slots keeps them
                    lease.loading |= awaited  # it may be a hit on what another lease loads
                    self._placer.stand_aside(lease, now)
            self._placer.recall(slot)  # what waits here may wait for it

    # -- what managers measure ------------------------------------------------------------------

    def run_finished(self, event: RunFinished, now: float, out: list[Action]) -> None:
        slot = self._cluster.slots.get(event.slot)
        if slot is None:
            raise BadEvent("slot", event.slot)
        gpu = slot.gpu
        profiles, gpu_type, given = self._cluster.profiles, gpu.spec.gpu_type, event.configuration
        together = event.together
        if given is not None:
            ran = given._replace(batch=event.batch * together)
            profiles.report_configured(event.model, ran, gpu_type, event.run_s * together)
        if given is None or given.vgpus == 1:
            alone = self._side_by_side.is_alone(slot, event, now)
            report = profiles.report_run if alone else profiles.report_beside
            report(event.model, event.batch, gpu_type, event.run_s, together)
        if event.peak_bytes is not None:
            self._measured(gpu, event.model, event.peak_bytes, now, out)

    def model_registered(self, event: ModelRegistered, now: float, out: list[Action]) -> None:
        self._cluster.profiles.declare(event.model)
        self._remeasured(event.model.id, now, out)
        self._lifecycle.refuse_what_cannot_fit(out)

    def model_loaded(self, event: ModelLoaded, now: float, out: list[Action]) -> None:
        """Learn from the load, and correct when its slot will be free."""
        gpu = self.gpu(event.gpu)
        self._cluster.profiles.report_load(event.model, event.source, event.load_s)
        self._cluster.load_ended(gpu, event.model)
        self._placer.disturbed |= self._cluster.loadable.running  # the copy engine may be free
        for slot in gpu.slots:
            for lease in slot.leases.values():
                self._placer.loaded(lease, event.model, now)
        if event.model not in gpu.cache.residents and event.model not in gpu.called_off:
            self._take_over(gpu, event.model, event.memory_bytes, now, out)
        gpu.called_off.discard(event.model)
        resident = gpu.cache.residents.get(event.model)
        if resident is not None:
            resident.gpu_share = event.gpu_share
        if event.shares:
            self._cluster.index.share(gpu.cache, event.model)
        if event.memory_bytes is not None:
            self._measured(gpu, event.model, event.memory_bytes, now, out)

    def _measured(
        self, gpu: Gpu, model: ModelId, peak_bytes: int, now: float, out: list[Action]
    ) -> None:
        """A model needs more (or, measured for the first time, less) than was estimated.

        A copy that its node had reported is counted by that report, and may have grown since to
        what is known from other GPUs.
        """
        resident = gpu.cache.residents.get(model)
        grown = resident is not None and resident.bytes < peak_bytes
        if not self._cluster.profiles.report_memory(model, peak_bytes) and not grown:
            return
        self._remeasured(model, now, out)
        self._lifecycle.refuse_what_cannot_fit(out)

    def load_failed(self, event: LoadFailed, now: float, out: list[Action]) -> None:
        """A load failed: the requests that waited for it fail or wait again."""
        gpu = self.gpu(event.gpu)
        withdrawn = event.lease is not None and event.lease not in self._placer.leases
        if withdrawn and not self._counted_on(gpu, event.model):
            return
        reason = f"loading {event.model} failed: {event.reason}"
        for slot in gpu.slots:
            for lease in slot.leases.values():
                if event.model in lease.models:
                    self._lifecycle.cut_off(lease, event.waiting, reason, out)
                    out.append(EndLease(slot.id, lease.id, reason))
        if event.model in gpu.cache.residents:
            self._cluster.evict(gpu, event.model)
        gpu.called_off.discard(event.model)

    def model_demoted(self, event: ModelDemoted, now: float, out: list[Action]) -> None:
        if event.gpu is not None:
            gpu = self.gpu(event.gpu)
            if self._counted_on(gpu, event.model):  # else the model had left before
                self._cluster.evict(gpu, event.model)
                gpu.called_off.discard(event.model)
            elif event.model in gpu.cache.contexts:
                self._cluster.index.drop_context(gpu.cache, event.model)
        if event.tier is not Tier.GPU:
            self._cluster.index.set_tier(event.node, event.model, event.tier)
            self._placer.exits.stored(event.node, event.model, event.tier, now)

    def _counted_on(self, gpu: Gpu, model: ModelId) -> bool:
        """Whether a GPU should hold a model, with no order under way that would load it again."""
        leases = [lease for slot in gpu.slots for lease in slot.leases.values()]
        on_its_way = any(
            model in lease.loading and not (lease.dispatch and lease.dispatch.hit)
            for lease in leases
        )
        return model in gpu.cache.residents and not on_its_way

    # -- memory that lacks, and orders of administrators -----------------------------------------

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

    def memory_pressure(self, event: MemoryPressure, now: float, out: list[Action]) -> None:
        """A GPU lacks memory that the core counted on: free that much and withhold it from use.

        Of what is only withheld, free what was not free. What cannot be freed now is left to the
        next report; a snapshot of the node ends the shortage.
        """
        gpu, withheld_bytes = self.gpu(event.gpu), event.withheld_bytes
        cache, short_bytes = gpu.cache, event.short_bytes
        self._free(gpu, short_bytes + max(0, withheld_bytes - cache.free_bytes), now, out)
        self._cluster.index.withhold(cache, min(short_bytes + withheld_bytes, cache.free_bytes))
        self._free_what_waits(gpu)

    def _set_apart(
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

    def _take_over(
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
        if self._placer.exits.active:
            self._placer.exits.found(gpu, model)

    def _keep_context(
        self, gpu: Gpu, model: ModelId, size_bytes: int, since_s: float, out: list[Action]
    ) -> None:
        """A manager keeps an empty process that a model left: count it, if there is room."""
        if model in gpu.cache.residents:
            return  # it is on its way into that process
        if size_bytes > gpu.cache.free_bytes:
            out.append(EndContext(gpu.spec.id, model, "it has no room"))
            return
        self._cluster.index.keep_context(gpu.cache, model, size_bytes, since_s)
        self._placer.exits.found(gpu, model)

    def _remeasured(self, model: ModelId, now: float, out: list[Action]) -> None:
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


def _was_demoted(gpu: Gpu, model: ModelId, out: Sequence[Action]) -> bool:
    """Whether the model has to leave since this report is read, which still has it.

    Models of this GPU that are larger than they were counted need room, and so do the same models
    on other GPUs, whose turn may come before this one's.
    """
    return any(
        isinstance(action, Demote) and action.gpu == gpu.spec.id and action.model == model
        for action in out
    )


def _check(
    event: NodeSnapshot, cluster: ClusterState, leases: Mapping[LeaseId, ActiveLease]
) -> None:
    """Refuse the whole report if it contradicts itself or what other GPUs hold.

    A node may report only its own GPUs; else two nodes would take over one GPU in turn.
    """
    for snapshot in event.gpus:
        gpu = cluster.gpus.get(snapshot.gpu.id)
        if event.node != snapshot.gpu.node or (gpu and gpu.spec.node != event.node):
            raise BadEvent(f"GPU of node {event.node!r} alone", snapshot.gpu.id)
    owners = {slot.id: slot.gpu.spec.id for slot in cluster.slots.values()}
    for snapshot in event.gpus:
        named: set[SlotId] = set()
        for spec in snapshot.gpu.slot_specs():
            if spec.id in named or owners.setdefault(spec.id, snapshot.gpu.id) != snapshot.gpu.id:
                raise BadEvent("slot of one GPU alone", spec.id)
            named.add(spec.id)
        for live in snapshot.leases:
            if live.slot not in named:
                raise BadEvent("slot", live.slot)
            slots_of = (live.slot, *live.more_slots)
            for other in live.more_slots:
                if other not in named:
                    raise BadEvent("slot", other)
            if len(set(slots_of)) < len(slots_of):
                raise BadEvent("lease of distinct slots", live.lease)
            lease = leases.get(live.lease)
            if lease is not None and (lease.slot.id, *lease.more_ids) != slots_of:
                raise BadEvent("other lease of id", live.lease)
