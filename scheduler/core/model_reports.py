"""Reports of GPU managers about models: measured sizes and times, loads done, failed, undone."""

from cache_manager.model.ids import ModelId, Tier
from cache_manager.residency.gpu_cache import join
from scheduler.core.admin import AdminHandler
from scheduler.core.fleet import Fleet
from scheduler.core.lifecycle import Lifecycle
from scheduler.core.placer import Placer
from scheduler.core.state.cluster_state import ClusterState
from scheduler.core.state.side_by_side import SideBySide
from scheduler.core.state.slots import Gpu
from scheduler.model.actions import Action, EndLease
from scheduler.model.errors import BadEvent
from scheduler.model.events import (
    LoadFailed,
    ModelDemoted,
    ModelLoaded,
    ModelRegistered,
    RunFinished,
)


class ModelReports:
    """Corrects profiles, residency and finish times by the managers' measurements."""

    def __init__(
        self,
        cluster: ClusterState,
        placer: Placer,
        lifecycle: Lifecycle,
        fleet: Fleet,
        admin: AdminHandler,
    ) -> None:
        self._cluster = cluster
        self._placer = placer
        self._lifecycle = lifecycle
        self._fleet = fleet
        self._admin = admin
        self._side_by_side = SideBySide(cluster)

    def run_finished(self, event: RunFinished, now: float, out: list[Action]) -> None:
        """Learn from one measured inference."""
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

    # -- models ---------------------------------------------------------------------------------

    def model_registered(self, event: ModelRegistered, now: float, out: list[Action]) -> None:
        """Take a model's declaration over."""
        self._cluster.profiles.declare(event.model)
        self._admin.resize(event.model.id, now, out)
        self._lifecycle.refuse_what_cannot_fit(out)

    def model_loaded(self, event: ModelLoaded, now: float, out: list[Action]) -> None:
        """Learn from one measured load, and correct when its slot will be free."""
        gpu = self._fleet.gpu(event.gpu)
        self._cluster.profiles.report_load(event.model, event.source, event.load_s)
        self._cluster.load_ended(gpu, event.model)
        self._placer.disturbed |= self._cluster.loadable.running  # the copy engine may be free
        for slot in gpu.slots:
            for lease in slot.leases.values():
                self._placer.loaded(lease, event.model, now)
        if event.model not in gpu.cache.residents and event.model not in gpu.called_off:
            self._admin.take_over(gpu, event.model, event.memory_bytes, now, out)
        gpu.called_off.discard(event.model)
        resident = gpu.cache.residents.get(event.model)
        if resident is not None:
            resident.gpu_share = event.gpu_share
        if event.shares:
            join(gpu.cache, event.model, self._cluster.index.changes)
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
        self._admin.resize(model, now, out)
        self._lifecycle.refuse_what_cannot_fit(out)

    def load_failed(self, event: LoadFailed, now: float, out: list[Action]) -> None:
        """A load failed: the requests that waited for it fail or wait again."""
        gpu = self._fleet.gpu(event.gpu)
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
        """Record in which tier a node keeps a model now."""
        if event.gpu is not None:
            gpu = self._fleet.gpu(event.gpu)
            if self._counted_on(gpu, event.model):  # else the model had left before
                self._cluster.evict(gpu, event.model)
                gpu.called_off.discard(event.model)
            elif event.model in gpu.cache.contexts:
                self._cluster.index.drop_context(gpu.cache, event.model)
        if event.tier is not Tier.GPU:
            self._cluster.index.set_tier(event.node, event.model, event.tier)
            self._placer.idle.stored(event.node, event.model, event.tier, now)

    def _counted_on(self, gpu: Gpu, model: ModelId) -> bool:
        """Whether a GPU should hold a model, with no order under way that would load it again."""
        leases = [lease for slot in gpu.slots for lease in slot.leases.values()]
        on_its_way = any(
            model in lease.loading and not (lease.dispatch and lease.dispatch.hit)
            for lease in leases
        )
        return model in gpu.cache.residents and not on_its_way
