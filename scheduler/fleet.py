"""GPUs that come, drain, are lost, or report what they really hold."""

from cache_manager.model import GpuId
from scheduler.actions import Action, Refuse
from scheduler.admin import Administration
from scheduler.cluster import Cluster
from scheduler.errors import BadEvent
from scheduler.events import GpuDraining, GpuJoined, GpuLost, GpuSnapshot, NodeSnapshot
from scheduler.lifecycle import Lifecycle
from scheduler.model import AfterLoss
from scheduler.placement import Placer
from scheduler.slots import Gpu


class Fleet:
    """Keeps the cluster's GPUs in step with what their managers say."""

    def __init__(
        self, cluster: Cluster, placer: Placer, lifecycle: Lifecycle, admin: Administration
    ) -> None:
        self._cluster = cluster
        self._placer = placer
        self._lifecycle = lifecycle
        self._admin = admin
        self._draining: set[GpuId] = set()

    def gpu(self, gpu: GpuId) -> Gpu:
        """The GPU of this id, which an event names."""
        found = self._cluster.gpus.get(gpu)
        if found is None:
            raise BadEvent("GPU", gpu)
        return found

    def join(self, event: GpuJoined, now: float, out: list[Action]) -> None:
        """A GPU is there, empty."""
        spec = event.gpu
        if spec.id in self._cluster.gpus:
            out.append(Refuse(event, f"GPU {spec.id} is here already"))
        elif any(slot.id in self._cluster.slots for slot in spec.slot_specs()):
            out.append(Refuse(event, f"a slot of GPU {spec.id} is here already"))
        else:
            self._cluster.join(spec)
            self._lifecycle.refuse_what_cannot_fit(out)

    def drain(self, event: GpuDraining, now: float, out: list[Action]) -> None:
        """Offer the GPU no more; what waits for it waits for any GPU again."""
        gpu = self.gpu(event.gpu)
        self._cluster.retire(gpu)
        for slot in gpu.slots:
            self._placer.recall(slot)
        self._draining.add(gpu.spec.id)
        self.leave_if_drained(gpu)

    def leave_if_drained(self, gpu: Gpu) -> None:
        """A draining GPU whose last lease has ended is forgotten."""
        if gpu.spec.id in self._draining and not any(slot.leases for slot in gpu.slots):
            self._draining.discard(gpu.spec.id)
            self._cluster.remove(gpu)

    def lose(self, event: GpuLost, now: float, out: list[Action]) -> None:
        """A GPU is gone: its queue waits elsewhere, what ran there fails or waits again."""
        gpu = self.gpu(event.gpu)
        self._cluster.retire(gpu)
        for slot in gpu.slots:
            self._placer.recall(slot)
            for lease in list(slot.leases.values()):
                reason = f"GPU {event.gpu} was lost"
                self._lifecycle.cut_off(lease, event.running, reason, out)
                self._placer.end(lease, now)
        self._draining.discard(gpu.spec.id)
        self._cluster.remove(gpu)

    def reconcile(self, event: NodeSnapshot, now: float, out: list[Action]) -> None:
        """Take over a node's report: GPUs, residents, tiers and leases are as it says."""
        _check(event)
        reported = {snapshot.gpu.id for snapshot in event.gpus}
        for gpu in list(self._cluster.gpus.values()):
            if gpu.spec.node == event.node and gpu.spec.id not in reported:
                self.lose(GpuLost(gpu.spec.id, event.lost_leases), now, out)
        for model, tier in event.stored:
            self._cluster.index.set_tier(event.node, model, tier)
        for snapshot in event.gpus:
            known = self._cluster.gpus.get(snapshot.gpu.id)
            if known is not None and known.spec != snapshot.gpu:  # another partition, say
                self.lose(GpuLost(snapshot.gpu.id, event.lost_leases), now, out)
                known = None
            if known is None:
                self.join(GpuJoined(snapshot.gpu), now, out)
            self._reconcile_gpu(snapshot, event.lost_leases, now, out)

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
        for found in snapshot.leases:
            if found.lease not in self._placer.leases:
                slot = self._cluster.slots[found.slot]
                self._placer.adopt(found.lease, slot, found.models, now)
        self.leave_if_drained(gpu)

    def _reconcile_residents(
        self, gpu: Gpu, snapshot: GpuSnapshot, now: float, out: list[Action]
    ) -> None:
        index, cache = self._cluster.index, gpu.cache
        reported = dict(snapshot.residents)
        for model in [model for model in cache.residents if model not in reported]:
            self._cluster.evict(gpu, model)
        for model, size_bytes in snapshot.residents:
            if self._cluster.profiles.report_memory(model, size_bytes):
                self._admin.resize(model, now, out)
            if model not in cache.residents:
                load_s = self._cluster.profiles.load_s(model, index.tier(gpu.spec.node, model))
                room = min(size_bytes, cache.free_bytes)
                self._cluster.admit(gpu, model, room, now, load_s)


def _check(event: NodeSnapshot) -> None:
    """Nothing of a report is taken over if it contradicts itself."""
    for snapshot in event.gpus:
        slots = {spec.id for spec in snapshot.gpu.slot_specs()}
        for lease in snapshot.leases:
            if lease.slot not in slots:
                raise BadEvent("slot", lease.slot)
