"""Staged exit: models that nobody uses step down by time, as their exit rules say."""

from typing import NamedTuple

from cache_manager.model.idle_gaps import IdleGaps
from cache_manager.model.ids import GpuId, ModelId, NodeId, Stage, Tier
from scheduler.core.placer import Placer
from scheduler.core.state.cluster_state import ClusterState
from scheduler.core.state.slots import Gpu
from scheduler.model.actions import Action, Demote, DemoteStored, EndContext, SetTimer
from scheduler.model.events import ContextKept, StageDue

# A model that may not leave when its time is over is looked at again after this long at least; so
# is one in a store, whose node may refuse to move it.
_LEAST_AGAIN_S = 1.0


class _Place(NamedTuple):
    """A GPU's memory, or without one the store of a node."""

    node: NodeId
    gpu: GpuId | None
    model: ModelId


class _Idle:
    """One idle model, as its exit rule sees it."""

    def __init__(
        self, cluster: ClusterState, gpu: Gpu | None, model: ModelId, gaps: IdleGaps
    ) -> None:
        self.gaps = gaps
        self._cluster = cluster
        self._gpu = gpu
        self._model = model

    def held_bytes(self, stage: Stage) -> int:
        """With the context's memory in the stages on a GPU, without it below."""
        context_bytes = 0
        if self._gpu is not None:
            kept = self._gpu.cache.contexts.get(self._model)
            context_bytes = self._gpu.spec.context_bytes if kept is None else kept.bytes
        if stage is Stage.CONTEXT:
            return context_bytes
        whole_bytes = self._cluster.profiles.memory_bytes(self._model)
        return whole_bytes if stage is Stage.GPU else max(0, whole_bytes - context_bytes)

    def reload_s(self, stage: Stage) -> float:
        """As loads from there were measured."""
        source = _SOURCES.get(stage)
        return 0.0 if source is None else self._cluster.profiles.load_s(self._model, source)


_SOURCES = {
    Stage.CONTEXT: Tier.CONTEXT,
    Stage.HOST: Tier.HOST,
    Stage.DISK: Tier.DISK,
    Stage.GONE: Tier.ABSENT,
}


class StagedExit:
    """Orders idle models down a stage when their time is over.

    A timer is set for each place with an idle model, not for each of its uses: one that finds the
    model used meanwhile is set anew.
    """

    def __init__(self, cluster: ClusterState, placer: Placer) -> None:
        self._cluster = cluster
        self._placer = placer
        self._idle = placer.idle
        self._timers: dict[_Place, float] = {}

    def watch(self, now: float, out: list[Action]) -> None:
        """Set timers for the models that have come to rest."""
        for gpu, model in self._idle.fell_idle:
            self._look(_Place(gpu.spec.node, gpu.spec.id, model), now, out)
        for node, model in self._idle.came_to_rest:
            self._look(_Place(node, None, model), now, out)
        self._idle.fell_idle.clear()
        self._idle.came_to_rest.clear()

    def stage_due(self, event: StageDue, now: float, out: list[Action]) -> None:
        """Step down, unless the model was used, moved or pinned since the timer was set."""
        place = _Place(event.node, event.gpu, event.model)
        if self._timers.get(place) != event.due_s:
            return
        del self._timers[place]
        due_s = self.due_s(*place)
        if due_s is None:
            return
        if due_s > now:
            self._set(place, due_s, out)
        elif event.gpu is None:
            self._leave_store(place, now, out)
        else:
            self._leave_gpu(self._cluster.gpus[event.gpu], place, now, out)

    def context_kept(self, event: ContextKept, _now: float, out: list[Action]) -> None:
        """An empty process was measured: it stays if there is room for it."""
        gpu = self._cluster.gpus.get(event.gpu)
        if gpu is None or event.model not in gpu.cache.contexts:
            return  # it was taken, or ended, while its node measured it
        index = self._cluster.index
        if not index.resize_context(gpu.cache, event.model, event.memory_bytes):
            index.drop_context(gpu.cache, event.model)
            out.append(EndContext(event.gpu, event.model, "it has no room"))

    def due_s(self, node: NodeId, gpu: GpuId | None, model: ModelId) -> float | None:
        """When an idle model at this place may step down; None: it is not there, or stays."""
        found = self._resting(node, gpu, model)
        if found is None:
            return None
        stage, since_s = found
        stays_s = self._stays_s(stage, gpu, model)
        return None if stays_s is None else since_s + stays_s

    # -- inside -----------------------------------------------------------------------------------

    def _resting(
        self, node: NodeId, gpu_id: GpuId | None, model: ModelId
    ) -> tuple[Stage, float] | None:
        """The stage that a model is in at this place, and since when, if nobody uses it there."""
        if gpu_id is None:
            stored = self._idle.stored_since(node, model)
            if stored is None or self._cluster.index.is_near(node, model):
                return None
            tier, since_s = stored
            return (Stage.HOST if tier is Tier.HOST else Stage.DISK), since_s
        gpu = self._cluster.gpus.get(gpu_id)
        if gpu is None:
            return None
        context = gpu.cache.contexts.get(model)
        if context is not None:
            return Stage.CONTEXT, context.since_s
        resident = gpu.cache.residents.get(model)
        return None if resident is None or resident.users else (Stage.GPU, resident.idle_s)

    def _stays_s(self, stage: Stage, gpu_id: GpuId | None, model: ModelId) -> float | None:
        gpu = None if gpu_id is None else self._cluster.gpus.get(gpu_id)
        idle = _Idle(self._cluster, gpu, model, self._idle.gaps(model))
        stays_s = self._idle.rule(model).stays_s(stage, idle)
        if stays_s is not None and gpu_id is None:
            return max(stays_s, _LEAST_AGAIN_S)
        return stays_s

    def _look(self, place: _Place, now: float, out: list[Action]) -> None:
        due_s = self.due_s(*place)
        if due_s is not None:
            self._set(place, max(due_s, now), out)

    def _set(self, place: _Place, due_s: float, out: list[Action]) -> None:
        pending_s = self._timers.get(place)
        if pending_s is not None and pending_s <= due_s:
            return  # it looks when the model is due then
        self._timers[place] = due_s
        out.append(SetTimer(due_s, StageDue(place.node, place.gpu, place.model, due_s)))

    def _leave_gpu(self, gpu: Gpu, place: _Place, now: float, out: list[Action]) -> None:
        model, cache, index = place.model, gpu.cache, self._cluster.index
        if model in cache.contexts:
            index.drop_context(cache, model)
            out.append(EndContext(gpu.spec.id, model, "it was idle"))
            return
        resident = cache.residents[model]
        if resident.kept or gpu.draining:
            self._set(place, now + _LEAST_AGAIN_S, out)
            return
        keeps_s = self._stays_s(Stage.CONTEXT, gpu.spec.id, model)
        keeps = keeps_s is None or keeps_s > 0.0
        size_bytes = min(resident.bytes, gpu.spec.context_bytes)
        self._cluster.evict(gpu, model)
        if keeps:
            index.keep_context(cache, model, size_bytes, now)
        out.append(Demote(gpu.spec.id, model, "it was idle", keeps_context=keeps))
        if keeps:
            self._look(place, now, out)

    def _leave_store(self, place: _Place, now: float, out: list[Action]) -> None:
        tier, _ = self._idle.stored_since(place.node, place.model) or (Tier.ABSENT, now)
        lower = Tier.DISK if tier is Tier.HOST else Tier.ABSENT
        out.append(DemoteStored(place.node, place.model, lower, "it was idle"))
