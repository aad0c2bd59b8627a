"""GPUs that join, drain, are lost or report; what their models need; orders of administrators."""

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from cache_manager.model.ids import GpuId, ModelId, Tier
from cache_manager.residency import idle_contexts
from scheduler.cluster.slots import ActiveLease, Gpu, Slot
from scheduler.cluster.state import ClusterState
from scheduler.core.lifecycle import Lifecycle
from scheduler.core.placer import Placer
from scheduler.model import events
from scheduler.model.actions import Action, Demote, EndContext, EndLease, Refuse
from scheduler.model.errors import BadEvent
from scheduler.model.values import AfterLoss, LeaseId, SlotId


class Fleet:
    """Keeps GPUs in step with their managers' reports and administrators' orders."""

    def __init__(self, lifecycle: Lifecycle, placer: Placer) -> None:
        self._cluster = lifecycle.cluster
        self._lifecycle = lifecycle
        self._placer = placer

    def gpu(self, gpu: GpuId) -> Gpu:
        """BadEvent if this GPU has not joined."""
        joined = self._cluster.gpus.get(gpu)
        if joined is None:
            raise BadEvent("GPU", gpu)
        return joined

    def join(self, event: events.GpuJoined) -> None:
        spec = event.gpu
        if spec.id in self._cluster.gpus:
            self._cluster.out.append(Refuse(event, f"GPU {spec.id} has joined already"))
        elif any(slot.id in self._cluster.slots for slot in spec.slot_specs()):
            self._cluster.out.append(Refuse(event, f"a slot of GPU {spec.id} has joined already"))
        elif len({slot.id for slot in spec.slot_specs()}) < len(spec.slot_specs()):
            self._cluster.out.append(Refuse(event, f"GPU {spec.id} names a slot twice"))
        else:
            self._time_without_gpus_ends()
            self._cluster.join(spec)
            self._lifecycle.refuse_what_cannot_fit()

    def drain(self, event: events.GpuDraining) -> None:
        """Offer the GPU no more; requests in its local queues wait for any GPU again."""
        gpu = self.gpu(event.gpu)
        self._cluster.retire(gpu)
        for slot in gpu.slots:
            self._lifecycle.recall(slot)
            self._lifecycle.needs(slot)
        gpu.draining = True
        self.leave_if_drained(gpu)

    def leave_if_drained(self, gpu: Gpu) -> None:
        if gpu.draining and not gpu.leases:
            self._cluster.remove(gpu)

    def lose(self, event: events.GpuLost) -> None:
        """A GPU is gone: its local queues wait for any GPU; leased requests fail or wait again."""
        gpu = self.gpu(event.gpu)
        self._cluster.retire(gpu)
        for slot in gpu.slots:
            self._lifecycle.recall(slot)
            for lease in list(slot.leases.values()):
                reason = f"GPU {event.gpu} was lost"
                self._lifecycle.cut_off(lease, event.running, reason)
                self._lifecycle.end(lease)
        self._cluster.remove(gpu)

    def suspend(self, event: events.NodeSilent) -> None:
        """Offer the node's GPUs no more for now; models and leases stay as they are.

        Requests in their local queues wait for any GPU again, at their old places, even if no other
        GPU is there: another GPU may serve them sooner than a node that may be dead, and the others
        lose nothing by waiting in the global queue, from where the policy places them again.
        """
        for gpu in self._cluster.gpus_of.get(event.node, ()):
            gpu.silent = True
            self._cluster.retire(gpu)
            for slot in gpu.slots:
                self._lifecycle.recall(slot)

    def resume(self, event: events.NodeHeard) -> None:
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
            self._cluster.pace.pause()
            for layer in self._lifecycle.hooks["gpus_return"]:
                layer.gpus_return()

    def reconcile(self, event: events.NodeSnapshot) -> None:
        _check(event, self._cluster, self._cluster.leases)
        reported = {snapshot.gpu.id for snapshot in event.gpus}
        for gpu in list(self._cluster.gpus_of.get(event.node, ())):
            if gpu.spec.id not in reported:
                self.lose(events.GpuLost(gpu.spec.id, event.lost_leases))
        self.resume(events.NodeHeard(event.node))
        stored = dict(event.stored)
        self._cluster.index.replace_tiers(event.node, stored)
        for layer in self._lifecycle.hooks["store_reported"]:
            layer.store_reported(event.node, stored)
        for snapshot in event.gpus:
            joined = self._cluster.gpus.get(snapshot.gpu.id)
            if joined is not None:  # what contexts need is measured, and changes
                joined.spec = replace(joined.spec, context_bytes=snapshot.gpu.context_bytes)
            if joined is not None and joined.spec != snapshot.gpu:  # for example repartitioned
                self.lose(events.GpuLost(snapshot.gpu.id, event.lost_leases))
                joined = None
            if joined is None:
                self.join(events.GpuJoined(snapshot.gpu))
            elif joined.draining and not snapshot.draining:
                joined.draining = False
                self._offer(joined)
            self._reconcile_gpu(snapshot, event.lost_leases)
            if snapshot.draining:
                self.drain(events.GpuDraining(snapshot.gpu.id))

    def _reconcile_gpu(self, snapshot: events.GpuSnapshot, lost: AfterLoss) -> None:
        gpu = self.gpu(snapshot.gpu.id)
        live = {lease.lease for lease in snapshot.leases}
        for lease in gpu.leases:
            if lease.id not in live:
                reason = "its GPU manager no longer has the lease"
                self._lifecycle.cut_off(lease, lost, reason)
                self._lifecycle.end(lease)
        self._reconcile_residents(gpu, snapshot)
        self._reconcile_loads(gpu, snapshot)
        for reported in snapshot.leases:
            slot = self._cluster.slots[reported.slot]
            if reported.lease not in slot.leases:
                self._lifecycle.adopt(reported, slot)

    def _reconcile_residents(self, gpu: Gpu, snapshot: events.GpuSnapshot) -> None:
        index, cache = self._cluster.index, gpu.cache
        index.withhold(cache, -cache.withheld_bytes)
        reported = dict(snapshot.residents)
        for model in [model for model in cache.residents if model not in reported]:
            self._cluster.evict(gpu, model)
        gpu.called_off.clear()
        left_s = {model: context.since_s for model, context in cache.contexts.items()}
        for model in left_s:
            index.drop_context(cache, model)
        self._count_residents(gpu, snapshot)
        for model, size_bytes in snapshot.residents:
            if self._cluster.profiles.report_memory(model, size_bytes):
                self._remeasured(model)
        for model, size_bytes in snapshot.contexts:
            self._keep_context(gpu, model, size_bytes, left_s.get(model, self._cluster.now))
        if snapshot.shared or cache.shared:
            self._set_apart(gpu, snapshot.shared)
        gpu_shares = dict(snapshot.gpu_shares)
        for model, resident in cache.residents.items():
            resident.gpu_share = gpu_shares.get(model, 1.0)

    def _count_residents(self, gpu: Gpu, snapshot: events.GpuSnapshot) -> None:
        """Shrunk models first, to free memory."""
        index, cache = self._cluster.index, gpu.cache
        for model, size_bytes in snapshot.residents:
            if model in cache.residents and size_bytes < cache.residents[model].bytes:
                index.resize(cache, model, size_bytes)
        for model, size_bytes in snapshot.residents:
            if model in cache.residents:
                index.resize(cache, model, size_bytes)
            elif not _was_demoted(gpu, model, self._cluster.out):
                self._take_over(gpu, model, size_bytes)

    def _reconcile_loads(self, gpu: Gpu, snapshot: events.GpuSnapshot) -> None:
        """The copy engine is busy with what its manager loads, and nothing else."""
        index, profiles = self._cluster.index, self._cluster.profiles
        for model in [model for model in gpu.loads if model not in snapshot.loading]:
            self._cluster.load_ended(gpu, model)
            for lease in gpu.leases:  # the report of its load was lost
                self._lifecycle.loaded(lease, model)
        for model in snapshot.loading:
            if model in gpu.cache.residents and model not in gpu.loads:
                tier = index.tier(gpu.spec.node, model)
                gpu.loads[model] = self._cluster.now + profiles.load_s(model, tier)
        if snapshot.stuck or gpu.stuck:
            self._reconcile_stuck(gpu, snapshot)

    def _reconcile_stuck(self, gpu: Gpu, snapshot: events.GpuSnapshot) -> None:
        """Loads without progress take nothing from calls of what the GPU has, and get no requests.

        What a load was ordered for stands beside the slot's runs, as if it had been from the start.
        """
        now = self._cluster.now
        since_s = {model: now - idle_s for model, idle_s in snapshot.stuck if model in gpu.loads}
        fresh = since_s.keys() - gpu.stuck.keys()
        self._cluster.stick(gpu, since_s)
        for slot in gpu.slots if fresh else ():
            for lease in slot.leases.values():
                awaited = {model: gpu.loads[model] for model in lease.models if model in fresh}
                if awaited and not lease.more:  # one of several slots keeps them
                    lease.loading |= awaited  # it may be a hit on what another lease loads
                    self._lifecycle.stand_aside(lease)
            self._lifecycle.recall(slot)  # what waits here may wait for it

    # -- what managers measure ------------------------------------------------------------------

    def run_finished(self, event: events.RunFinished) -> None:
        slot = self._cluster.slots.get(event.slot)
        if slot is None:
            raise BadEvent("slot", event.slot)
        gpu = slot.gpu
        profiles, gpu_type, given = self._cluster.profiles, gpu.spec.gpu_type, event.configuration
        together = event.together
        if min(event.batch, together) < 1:  # policies weigh what was measured
            raise BadEvent("run of a batch of", event.batch * together)
        if given is not None:
            if min(given) < 1:
                raise BadEvent("configuration", tuple(given))
            ran = given._replace(batch=event.batch * together)
            profiles.report_configured(event.model, ran, gpu_type, event.run_s * together)
        if given is None or given.vgpus == 1:
            layers = self._lifecycle.hooks["ran_alone"]
            alone = all(layer.ran_alone(slot, event) for layer in layers)
            report = profiles.report_run if alone else profiles.report_beside
            report(event.model, event.batch, gpu_type, event.run_s, together)
        if event.peak_bytes is not None:
            self._measured(gpu, event.model, event.peak_bytes)

    def model_registered(self, event: events.ModelRegistered) -> None:
        self._cluster.profiles.declare(event.model)
        self._remeasured(event.model.id)
        self._lifecycle.refuse_what_cannot_fit()

    def model_loaded(self, event: events.ModelLoaded) -> None:
        """Learn from the load, and correct when its slot will be free."""
        gpu = self.gpu(event.gpu)
        self._cluster.profiles.report_load(event.model, event.source, event.load_s)
        self._cluster.load_ended(gpu, event.model)
        self._cluster.disturbed |= self._cluster.loadable is not None  # the copy engine may be free
        for lease in gpu.leases:
            self._lifecycle.loaded(lease, event.model)
        if event.model not in gpu.cache.residents and event.model not in gpu.called_off:
            self._take_over(gpu, event.model, event.memory_bytes)
        gpu.called_off.discard(event.model)
        resident = gpu.cache.residents.get(event.model)
        if resident is not None:
            resident.gpu_share = event.gpu_share
        if event.shares:
            self._cluster.index.share(gpu.cache, event.model)
        if event.memory_bytes is not None:
            self._measured(gpu, event.model, event.memory_bytes)

    def _measured(self, gpu: Gpu, model: ModelId, peak_bytes: int) -> None:
        """A model needs more (or, measured for the first time, less) than was estimated.

        A copy that its node had reported is counted by that report, and may have grown since to
        what is known from other GPUs.
        """
        resident = gpu.cache.residents.get(model)
        grown = resident is not None and resident.bytes < peak_bytes
        if not self._cluster.profiles.report_memory(model, peak_bytes) and not grown:
            return
        self._remeasured(model)
        self._lifecycle.refuse_what_cannot_fit()

    def load_failed(self, event: events.LoadFailed) -> None:
        """A load failed: the requests that waited for it fail or wait again."""
        gpu = self.gpu(event.gpu)
        withdrawn = event.lease is not None and event.lease not in self._cluster.leases
        if withdrawn and not self._counted_on(gpu, event.model):
            return
        reason = f"loading {event.model} failed: {event.reason}"
        for lease in gpu.leases:
            if event.model in lease.models:
                self._lifecycle.cut_off(lease, event.waiting, reason)
                self._cluster.out.append(EndLease(lease.slot.id, lease.id, reason))
        if event.model in gpu.cache.residents:
            self._cluster.evict(gpu, event.model)
        gpu.called_off.discard(event.model)

    def model_demoted(self, event: events.ModelDemoted) -> None:
        if event.gpu is not None:
            gpu = self.gpu(event.gpu)
            if self._counted_on(gpu, event.model):  # else the model had left before
                self._cluster.evict(gpu, event.model)
                gpu.called_off.discard(event.model)
            elif event.model in gpu.cache.contexts:
                self._cluster.index.drop_context(gpu.cache, event.model)
        if event.tier is not Tier.GPU:
            self._cluster.index.set_tier(event.node, event.model, event.tier)
            for layer in self._lifecycle.hooks["stored"]:
                layer.stored(event.node, event.model, event.tier)

    def _counted_on(self, gpu: Gpu, model: ModelId) -> bool:
        """Whether a GPU should hold a model, with no order under way that would load it again."""
        on_its_way = any(
            model in lease.loading and not (lease.dispatch and lease.dispatch.hit)
            for lease in gpu.leases
        )
        return model in gpu.cache.residents and not on_its_way

    # -- memory that lacks, and orders of administrators -----------------------------------------

    def obey(
        self,
        event: events.PinAsked | events.UnpinAsked | events.PrefetchAsked | events.EvictAsked,
    ) -> None:
        if event.gpu is not None and event.gpu not in self._cluster.gpus:
            self._cluster.out.append(Refuse(event, f"no GPU {event.gpu!r}"))
            return
        if isinstance(event, events.PinAsked):
            reason = self._pin(event.model, event.gpu)
        elif isinstance(event, events.UnpinAsked):
            reason = self._unpin(event.model, event.gpu)
        elif isinstance(event, events.PrefetchAsked):
            reason = self._prefetch(event.model, event.gpu)
        else:
            reason = self._evict(event.model, event.gpu)
        if reason:
            self._cluster.out.append(Refuse(event, reason))

    def memory_pressure(self, event: events.MemoryPressure) -> None:
        """A GPU lacks memory that the core counted on: free that much and withhold it from use.

        Of what is only withheld, free what was not free. What cannot be freed now is left to the
        next report; a snapshot of the node ends the shortage.
        """
        gpu, withheld_bytes = self.gpu(event.gpu), event.withheld_bytes
        cache, short_bytes = gpu.cache, event.short_bytes
        self._free(gpu, short_bytes + max(0, withheld_bytes - cache.free_bytes))
        self._cluster.index.withhold(cache, min(short_bytes + withheld_bytes, cache.free_bytes))
        self._free_what_waits(gpu)

    def _set_apart(
        self,
        gpu: Gpu,
        processes: Sequence[tuple[int, Sequence[ModelId]]],
    ) -> None:
        """Withhold memory that processes with several models take, until the next snapshot."""
        index, cache = self._cluster.index, gpu.cache
        self._free(gpu, sum(size for size, _ in processes) - cache.free_bytes)
        counted = []
        for size_bytes, models in processes:
            withheld_bytes = min(size_bytes, cache.free_bytes)
            index.withhold(cache, withheld_bytes)
            counted.append((withheld_bytes, models))
        index.replace_shared(cache, counted)
        self._free_what_waits(gpu)

    def _free(self, gpu: Gpu, short_bytes: int) -> None:
        """Free less where no more can be freed now."""
        reason = "memory pressure"
        if not self._make_room(gpu, short_bytes, reason):
            for resident in list(gpu.cache.residents.values()):
                if not resident.kept:
                    self._demote(gpu, resident.model, reason)

    def _make_room(
        self, gpu: Gpu, short_bytes: int, reason: str, keep: Sequence[ModelId] = ()
    ) -> bool:
        """End empty processes, and then evict; False if that cannot free so much now."""
        index, cache = self._cluster.index, gpu.cache
        wanted_bytes = cache.free_bytes + short_bytes
        for left in idle_contexts(cache, short_bytes):
            index.drop_context(cache, left)
            self._cluster.out.append(EndContext(gpu.spec.id, left, reason))
        lacking_bytes = wanted_bytes - cache.free_bytes
        if lacking_bytes <= 0:
            return True
        victims = index.victims(cache, lacking_bytes, self._cluster.now, keep)
        for victim in victims or ():
            self._demote(gpu, victim, reason)
        return victims is not None

    def _take_over(self, gpu: Gpu, model: ModelId, size_bytes: int | None) -> None:
        """A manager holds a model that the core did not count there: count it, and free memory."""
        profiles, index, cache = self._cluster.profiles, self._cluster.index, gpu.cache
        needed = profiles.known[model].memory_bytes if size_bytes is None else size_bytes
        self._make_room(gpu, needed - cache.free_bytes, f"{model} is there unexpectedly")
        times = profiles.times_s(model, index.tier(gpu.spec.node, model))
        self._cluster.admit(gpu, model, min(needed, cache.free_bytes), times)
        self._found(gpu, model)

    def _keep_context(self, gpu: Gpu, model: ModelId, size_bytes: int, since_s: float) -> None:
        """A manager keeps an empty process that a model left: count it, if there is room."""
        if model in gpu.cache.residents:
            return  # it is on its way into that process
        if size_bytes > gpu.cache.free_bytes:
            self._cluster.out.append(EndContext(gpu.spec.id, model, "it has no room"))
            return
        self._cluster.index.keep_context(gpu.cache, model, size_bytes, since_s)
        self._found(gpu, model)

    def _found(self, gpu: Gpu, model: ModelId) -> None:
        for layer in self._lifecycle.hooks["found"]:
            layer.found(gpu, model)

    def _remeasured(self, model: ModelId) -> None:
        """A model was measured or declared again: correct its size on every GPU that holds it."""
        self._cluster.remeasure(model)
        needed = self._cluster.profiles.known[model].memory_bytes
        for gpu_id in list(self._cluster.index.holders(model)):
            self._resize(self._cluster.gpus[gpu_id], model, needed)

    def _resize(self, gpu: Gpu, model: ModelId, needed: int) -> None:
        """Free memory for the new size; where that is impossible, evict an idle copy."""
        index, cache = self._cluster.index, gpu.cache
        resident = cache.residents[model]
        short_bytes = needed - resident.bytes - cache.free_bytes
        has_room = self._make_room(gpu, short_bytes, f"{model} is larger than estimated", (model,))
        if has_room or resident.kept:
            index.resize(cache, model, needed)
        else:
            self._demote(gpu, model, "its measured size does not fit this GPU")

    # -- one order each: the reason of a refusal, or "" ------------------------------------------

    def _pin(self, model: ModelId, gpu_id: GpuId | None) -> str:
        holders = list(self._cluster.index.holders(model).values())
        if gpu_id is None:
            for cache in holders:
                self._cluster.index.pin(cache, model, pinned=True)
                self._free_what_waits(self._cluster.gpus[cache.id])
            return "" if holders else "no GPU holds it; name a GPU to load it there"
        gpu = self._cluster.gpus[gpu_id]
        if model not in gpu.cache.residents:
            reason = self._prefetch(model, gpu_id)
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

    def _prefetch(self, model: ModelId, gpu_id: GpuId | None) -> str:
        slot = self._idle_slot_for(model, gpu_id)
        if slot is None:
            return "no idle GPU has room for it" if gpu_id is None else "that GPU is not idle"
        if slot.holds((model,)):
            return "it is resident there already"
        done = self._placer.prefetch(model, slot)
        return "" if done else "it does not fit beside the models in use there"

    def _idle_slot_for(self, model: ModelId, gpu_id: GpuId | None) -> Slot | None:
        bundle = self._cluster.bundle((model,))
        if gpu_id is not None:
            return next((s for s in self._cluster.gpus[gpu_id].slots if s.idle), None)
        fitting = [
            slot
            for slot in self._cluster.slots.values()
            if slot.idle and not slot.holds((model,)) and slot.gpu.cache.fits(bundle.needs)
        ]
        return min(fitting, key=lambda slot: (slot.frequency, slot.id), default=None)

    def _evict(self, model: ModelId, gpu_id: GpuId | None) -> str:
        holders = list(self._cluster.index.holders(model))
        chosen = [self._cluster.gpus[gpu] for gpu in holders if gpu_id in (None, gpu)]
        if not chosen:
            return "it is not resident there"
        kept = [gpu for gpu in chosen if gpu.cache.residents[model].kept]
        for gpu in chosen:
            if gpu not in kept:
                self._demote(gpu, model, "asked for")
        in_use = ", ".join(gpu.spec.id for gpu in kept)
        return f"in use, waited for or pinned on {in_use}" if kept else ""

    def _demote(self, gpu: Gpu, model: ModelId, reason: str) -> None:
        self._cluster.evict(gpu, model)
        self._cluster.out.append(Demote(gpu.spec.id, model, reason))

    def _free_what_waits(self, gpu: Gpu) -> None:
        """After a pin or a shortage: requests that no longer fit here wait for any GPU again."""
        for slot in gpu.slots:
            self._lifecycle.recall_what_cannot_fit(slot)


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
    event: events.NodeSnapshot, cluster: ClusterState, leases: Mapping[LeaseId, ActiveLease]
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
