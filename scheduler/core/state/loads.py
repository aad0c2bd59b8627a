"""Orders loads: evicts the victims, reserves memory, and notes what each GPU's copy engine does."""

from cache_manager.model.ids import ModelId, Tier
from cache_manager.residency.cache_index import LoadPlan
from scheduler.core.state.cluster_state import ClusterState
from scheduler.core.state.idle_models import IdleModels
from scheduler.core.state.slots import ActiveLease, Slot
from scheduler.model.actions import Action, Prepare
from scheduler.model.values import ModelLoad


class Loads:
    """Carries out the plans of loads, one lease each."""

    def __init__(self, cluster: ClusterState, idle: IdleModels) -> None:
        self._cluster = cluster
        self._idle = idle

    def order(
        self,
        lease: ActiveLease,
        plan: LoadPlan,
        now: float,
        out: list[Action],
        *,
        prefetch: bool = False,
    ) -> float:
        """Evict the victims and reserve memory; returns the expected seconds of the load."""
        cluster, gpu = self._cluster, lease.slot.gpu
        node = gpu.spec.node
        for victim in plan.victims:
            cluster.evict(gpu, victim)
        for ended in (*plan.ends, *plan.emptied.values()):
            cluster.index.drop_context(gpu.cache, ended)
        total_s = 0.0
        loads = []
        for model, size_bytes in plan.loads:
            source, left = cluster.index.tier(node, model), plan.emptied.get(model)
            if left is not None:
                if source is Tier.HOST:
                    source = Tier.CONTEXT
                if left != model:
                    self._idle.stored(node, left, cluster.index.tier(node, left), now)
            load_s = cluster.profiles.load_s(model, source)
            total_s += load_s
            gpu.loads[model] = lease.loading[model] = now + total_s
            if lease.beside:
                gpu.arriving.add(model)
            cluster.admit(gpu, model, size_bytes, now, load_s)
            loads.append(ModelLoad(model, size_bytes, source, left))
        out.append(
            Prepare(
                lease.slot.id,
                gpu.spec.id,
                lease.id,
                plan.victims,
                tuple(loads),
                prefetch,
                plan.ends,
                lease.beside,
                lease.more_ids,
                lease.configuration,
            )
        )
        return total_s

    def under_way_s(self, slot: Slot, models: tuple[ModelId, ...], now: float) -> float:
        """Seconds until models that another lease on this GPU is loading will be resident."""
        ends = [
            ends_s
            for other in slot.gpu.slots
            for lease in other.leases.values()
            for model, ends_s in lease.loading.items()
            if model in models
        ]
        return max(0.0, max(ends) - now) if ends else 0.0
