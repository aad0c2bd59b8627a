"""Staged exit: models that nobody uses step down by time, as their exit rules say."""

from collections.abc import Mapping
from math import inf
from typing import NamedTuple

from cache_manager import exits
from cache_manager.exits.exit_rule import ExitRule
from cache_manager.model.ids import GpuId, ModelId, NodeId, Tier
from cache_manager.model.request_rates import IdleGaps
from scheduler.cluster.request_queue import Pending
from scheduler.cluster.slots import ActiveLease, Gpu
from scheduler.cluster.state import ClusterState
from scheduler.core.layer import Handler, Layer
from scheduler.core.lifecycle import Lifecycle
from scheduler.model.actions import Demote, DemoteStored, EndContext, SetTimer
from scheduler.model.events import ContextKept, Event, StageDue
from scheduler.model.values import CoreSettings

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

    def __init__(self, cluster: ClusterState, gpu: Gpu | None, model: ModelId) -> None:
        self._cluster = cluster
        self._gpu = gpu
        self._model = model

    @property
    def gaps(self) -> IdleGaps:
        profile = self._cluster.profiles.known.get(self._model)
        return IdleGaps() if profile is None else profile.gaps

    def held_bytes(self, stage: Tier) -> int:
        """With the context's memory in the stages on a GPU, without it below."""
        context_bytes = 0
        if self._gpu is not None:
            kept = self._gpu.cache.contexts.get(self._model)
            context_bytes = self._gpu.spec.context_bytes if kept is None else kept.bytes
        if stage is Tier.CONTEXT:
            return context_bytes
        whole_bytes = self._cluster.profiles.known[self._model].memory_bytes
        return whole_bytes if stage is Tier.GPU else max(0, whole_bytes - context_bytes)

    def reload_s(self, stage: Tier) -> float:
        """As loads from there were measured."""
        return 0.0 if stage is Tier.GPU else self._cluster.profiles.load_s(self._model, stage)


_NEVER = "never"
# What it hears while no model leaves by time: which rules come, and what stores have since when.
_ALWAYS = ("accepted", "forgotten", "stored", "store_reported")


class StagedExit(Layer):
    """Orders idle models down a stage when their time is over; notes little while all may stay.

    A timer is set for each place with an idle model, not for each of its uses: one that finds the
    model used meanwhile is set anew. It is `active` while some model leaves by time.
    """

    def __init__(self, lifecycle: Lifecycle, settings: CoreSettings) -> None:
        self._cluster = lifecycle.cluster
        self._lifecycle = lifecycle
        self._rule = exits.make(settings.exit_rule)
        self._own: dict[ModelId, str] = {}
        self.active = False
        # Models that are idle on a GPU since the last look, those that a node reported in its
        # store, and those that leave by another rule from now on.
        self._fell_idle: list[tuple[Gpu, ModelId]] = []
        self._came_to_rest: list[tuple[NodeId, ModelId]] = []
        self._other_rule: set[ModelId] = set()
        self._idle_s: dict[ModelId, float] = {}
        self._stored: dict[tuple[NodeId, ModelId], tuple[Tier, float]] = {}
        self._timers: dict[_Place, tuple[float, Tier]] = {}
        self._due: dict[_Place, tuple[Tier, float, float]] = {}
        lifecycle.switch_on(self, _ALWAYS)
        if settings.exit_rule != _NEVER:
            self._begin()

    def _begin(self) -> None:
        """Some model leaves by time from now on."""
        if not self.active:
            self.active = True
            self._lifecycle.switch_on(self)

    def handlers(self) -> dict[type[Event], Handler]:
        return {ContextKept: (self._context_kept, True), StageDue: (self._stage_due, True)}

    # -- stages ----------------------------------------------------------------------------------

    @property
    def remembered(self) -> int:
        """How many places something is remembered of: none of these outlives its timer."""
        return len(self._timers.keys() | self._due.keys())

    def after_event(self) -> None:
        """Set timers for the models that have come to rest."""
        if not (self._fell_idle or self._came_to_rest):
            return
        places = [_Place(gpu.spec.node, gpu.spec.id, model) for gpu, model in self._fell_idle]
        places += [_Place(node, None, model) for node, model in self._came_to_rest]
        for place in places:
            self._look(place)
        self._fell_idle.clear()
        self._came_to_rest.clear()

    def _stage_due(self, event: StageDue) -> None:
        """Step down, unless the model was used, moved or pinned since the timer was set."""
        place = _Place(event.node, event.gpu, event.model)
        due_s, _ = self._timers.get(place, (None, None))
        if due_s != event.due_s:
            return
        del self._timers[place]
        due_s = self.leaves_s(*place)
        if due_s is None:
            return
        if due_s > self._cluster.now:
            self._set(place, due_s)
            return
        del self._due[place]
        if event.gpu is None:
            self._leave_store(place)
        else:
            self._leave_gpu(self._cluster.gpus[event.gpu], place)

    def _context_kept(self, event: ContextKept) -> None:
        """An empty process was measured: it stays if there is room for it."""
        gpu = self._cluster.gpus.get(event.gpu)
        if gpu is None or event.model not in gpu.cache.contexts:
            return  # it was taken, or ended, while its node measured it
        index = self._cluster.index
        if not index.resize_context(gpu.cache, event.model, event.memory_bytes):
            index.drop_context(gpu.cache, event.model)
            self._cluster.out.append(EndContext(event.gpu, event.model, "it has no room"))

    def leaves_s(self, node: NodeId, gpu: GpuId | None, model: ModelId) -> float | None:
        """When an idle model at this place may step down; None: it is not there, or stays.

        Its rule is asked once for each time that it is idle in a stage.
        """
        place = _Place(node, gpu, model)
        rest = self._resting(node, gpu, model)
        due = self._due.pop(place, None)
        if rest is None:
            return None
        stage, since_s = rest
        if due is None or due[0] is not stage or due[1] != since_s:
            stays_s = self._stays_s(stage, gpu, model)
            if stays_s is None:
                return None
            due = (stage, since_s, since_s + stays_s)
        self._due[place] = due
        return due[2]

    # -- rules ------------------------------------------------------------------------------------

    def _rule_of(self, model: ModelId) -> ExitRule:
        own = self._own.get(model)
        return self._rule if own is None else exits.make(own)

    def accepted(self, pending: Pending) -> None:
        """Its function may name a rule of its own, or an empty one: that of the cluster."""
        exit_rule = pending.request.exit_rule
        if exit_rule is None or not (exit_rule or self._own):
            return
        for model in pending.models:
            if self._own.get(model, "") == exit_rule:
                continue
            self._other_rule.add(model)
            if exit_rule:
                self._own[model] = exit_rule
                self._begin()
            else:
                del self._own[model]

    def forgotten(self, model: ModelId) -> None:
        self._own.pop(model, None)
        self._other_rule.discard(model)
        self._idle_s.pop(model, None)

    # -- on GPUs ----------------------------------------------------------------------------------

    def granted(self, lease: ActiveLease) -> None:
        for model in lease.models:
            idle_s = self._idle_s.pop(model, None)
            if idle_s is not None:
                self._cluster.profiles.known[model].gaps.saw(self._cluster.now - idle_s)

    def ended(self, lease: ActiveLease) -> None:
        gpu = lease.slot.gpu
        for model in lease.models:
            resident = gpu.cache.residents.get(model)
            if resident is not None and not resident.users:
                resident.idle_s = self._idle_s[model] = self._cluster.now
                self._fell_idle.append((gpu, model))

    def found(self, gpu: Gpu, model: ModelId) -> None:
        self._fell_idle.append((gpu, model))

    # -- in the stores of nodes -------------------------------------------------------------------

    def stored(self, node: NodeId, model: ModelId, tier: Tier) -> None:
        self._note_stored(node, model, tier, self._cluster.now)

    def _note_stored(self, node: NodeId, model: ModelId, tier: Tier, since_s: float) -> None:
        if tier is Tier.ABSENT:
            self._stored.pop((node, model), None)
            return
        self._stored[node, model] = (tier, since_s)
        if self.active:
            self._came_to_rest.append((node, model))

    def store_reported(self, node: NodeId, stored: Mapping[ModelId, Tier]) -> None:
        """What the node keeps where it was stays in its stage."""
        now = self._cluster.now
        before = {key[1]: since for key, since in self._stored.items() if key[0] == node}
        for model in before:
            del self._stored[node, model]
        for model, tier in stored.items():
            known_tier, since_s = before.get(model, (tier, now))
            self._note_stored(node, model, tier, since_s if known_tier is tier else now)

    # -- inside -----------------------------------------------------------------------------------

    def _resting(
        self, node: NodeId, gpu_id: GpuId | None, model: ModelId
    ) -> tuple[Tier, float] | None:
        """The stage that a model is in at this place, and since when, if nobody uses it there."""
        if gpu_id is None:
            stored = self._stored.get((node, model))
            return None if self._cluster.index.is_near(node, model) else stored
        gpu = self._cluster.gpus.get(gpu_id)
        if gpu is None:
            return None
        context = gpu.cache.contexts.get(model)
        if context is not None:
            return Tier.CONTEXT, context.since_s
        resident = gpu.cache.residents.get(model)
        return None if resident is None or resident.users else (Tier.GPU, resident.idle_s)

    def _stays_s(self, stage: Tier, gpu_id: GpuId | None, model: ModelId) -> float | None:
        gpu = None if gpu_id is None else self._cluster.gpus.get(gpu_id)
        idle = _Idle(self._cluster, gpu, model)
        stays_s = self._rule_of(model).stays_s(stage, idle)
        if stays_s is not None and gpu_id is None:
            return max(stays_s, _LEAST_AGAIN_S)
        return stays_s

    def _look(self, place: _Place) -> None:
        rest = self._resting(*place)
        if rest is None:
            return
        _, pending_stage = self._timers.get(place, (0.0, None))
        if pending_stage is rest[0] and place.model not in self._other_rule:
            return  # its timer finds how long the model has been idle then
        self._other_rule.discard(place.model)
        due_s = self.leaves_s(*place)
        if due_s is not None:
            self._set(place, max(due_s, self._cluster.now))

    def _set(self, place: _Place, due_s: float) -> None:
        pending_s, _ = self._timers.get(place, (inf, None))
        rest = self._resting(*place)
        if rest is None or pending_s <= due_s:
            return
        self._timers[place] = (due_s, rest[0])
        self._cluster.out.append(
            SetTimer(due_s, StageDue(place.node, place.gpu, place.model, due_s))
        )

    def _leave_gpu(self, gpu: Gpu, place: _Place) -> None:
        model, cache, index = place.model, gpu.cache, self._cluster.index
        if model in cache.contexts:
            index.drop_context(cache, model)
            self._cluster.out.append(EndContext(gpu.spec.id, model, "it was idle"))
            return
        resident = cache.residents[model]
        if resident.kept or gpu.draining:
            self._set(place, self._cluster.now + _LEAST_AGAIN_S)
            return
        keeps_s = self._stays_s(Tier.CONTEXT, gpu.spec.id, model)
        keeps = keeps_s is None or keeps_s > 0.0
        size_bytes = min(resident.bytes, gpu.spec.context_bytes)
        self._cluster.evict(gpu, model)
        if keeps:
            index.keep_context(cache, model, size_bytes, self._cluster.now)
        self._cluster.out.append(Demote(gpu.spec.id, model, "it was idle", keeps_context=keeps))
        if keeps:
            self._look(place)

    def _leave_store(self, place: _Place) -> None:
        tier, _ = self._stored.get((place.node, place.model)) or (Tier.ABSENT, 0.0)
        lower = Tier.DISK if tier is Tier.HOST else Tier.ABSENT
        self._cluster.out.append(DemoteStored(place.node, place.model, lower, "it was idle"))
