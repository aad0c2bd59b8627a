"""Counts what one core decides and what happens to it, by policy, GPU, model and function."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cache_manager.model.ids import GpuId, ModelId
from scheduler.core.core import Core
from scheduler.model.actions import Action, Demote, Dispatch, Prepare, Refuse, Taken
from scheduler.model.events import (
    Event,
    EvictAsked,
    GpuDraining,
    GpuJoined,
    GpuLost,
    LoadFailed,
    MemoryPressure,
    ModelLoaded,
    ModelRegistered,
    NodeHeard,
    NodeSilent,
    NodeSnapshot,
    RunFailed,
    RunFinished,
    StageDue,
)
from scheduler.model.values import LeaseId, SlotId
from scheduler.service.metrics.counters import SchedulerCounters

_HIT, _MISS, _FALSE_MISS = "hit", "miss", "false_miss"
# The reason of an eviction, by the event that led to it.
_REASONS: Mapping[type, str] = {
    EvictAsked: "asked",
    MemoryPressure: "pressure",
    ModelLoaded: "measured",
    ModelRegistered: "measured",
    NodeSnapshot: "measured",
    RunFinished: "measured",
    StageDue: "idle",
}
_FLEET: Mapping[type, str] = {
    GpuDraining: "draining",
    GpuJoined: "joined",
    GpuLost: "lost",
    NodeHeard: "heard",
    NodeSilent: "silent",
}


class DecisionCounting:
    """An observer of one driver; what it counts outlives its core, in `meters`."""

    def __init__(self, core: Core, meters: SchedulerCounters, now_s: Callable[[], float]) -> None:
        self._core = core
        self._meters = meters
        self._now_s = now_s
        self._policy = core.placer.policy_name
        self._decisions = meters.decisions(self._policy)
        self._latest = LeaseId(0)
        self._gpus: frozenset[str] = frozenset()
        self._expected = ExpectedTimes(meters)
        self._happens: Mapping[type, Callable[[Any], None]] = {
            ModelLoaded: self._loaded,
            LoadFailed: self._load_failed,
            RunFinished: self._expected.ran,
            RunFailed: self._run_failed,
            MemoryPressure: self._pressure,
            NodeSnapshot: self._fleet_changed,
            **dict.fromkeys(_FLEET, self._fleet),
        }

    def __call__(self, now: float, event: Event, actions: Sequence[Action]) -> None:
        """One event was handled, which began at `now`; these actions follow from it."""
        policy = self._core.placer.policy_name
        if policy != self._policy:
            self._policy, self._decisions = policy, self._meters.decisions(policy)
        self._decisions.add(self._now_s() - now)
        happens = self._happens.get(type(event))
        if happens is not None and not (actions and isinstance(actions[0], Refuse)):
            happens(event)
        for action in actions:
            if type(action) is Dispatch:
                self._dispatched(action, now)
            elif type(action) is Taken:
                self._taken(action)
            elif type(action) is Prepare:
                self._prepared(action)
            elif type(action) is Demote:
                self._evicted(action.gpu, action.model, _REASONS.get(type(event), "other"))

    # -- what was decided -----------------------------------------------------------------------

    def _dispatched(self, action: Dispatch, now: float) -> None:
        if action.lease <= self._latest:
            return  # repeated for a caller that asked again
        self._latest = action.lease
        meters, requests = self._meters, self._core.requests
        policy = self._core.placer.policy_name
        result = _HIT if action.hit else _FALSE_MISS if action.held_elsewhere else _MISS
        gpu = meters.gpus.of(action.gpu)
        models = [meters.models.of(model) for model in action.models]
        for request in action.requests:
            pending = requests.get(request)
            if pending is None:  # the request ended in the same step
                continue
            function = meters.functions.of(pending.request.function)
            first = not pending.gave_back
            waited_s = now - pending.arrived_s if first else None
            meters.placed(policy, gpu, models, function, result, waited_s)
        meters.leases.add(())
        self._expected.dispatched(action)

    def _taken(self, action: Taken) -> None:
        meters, request, dispatch = self._meters, action.request, action.dispatch
        gpu = meters.gpus.of(dispatch.gpu)
        models = [meters.models.of(model) for model in dispatch.models]
        function = meters.functions.of(request.function)
        arrived_s = action.began_s if request.arrived_s is None else request.arrived_s
        policy, waited_s = self._core.placer.policy_name, action.began_s - arrived_s
        meters.placed(policy, gpu, models, function, _HIT, waited_s)

    def _prepared(self, action: Prepare) -> None:
        self._expected.prepared(action)
        reason = "prefetch" if action.prefetch else "room"
        for model in action.victims:
            self._evicted(action.gpu, model, reason)

    def _evicted(self, gpu: str, model: ModelId, reason: str) -> None:
        self._meters.gpu_evictions.add((self._meters.gpus.of(gpu), reason))
        self._meters.model_evictions.add((self._meters.models.of(model),))

    # -- what happened --------------------------------------------------------------------------

    def _loaded(self, event: ModelLoaded) -> None:
        meters = self._meters
        self._expected.loaded(event)
        gpu, model = (meters.gpus.of(event.gpu),), (meters.models.of(event.model),)
        meters.loaded(event.load_s)
        meters.loads.add((event.source.name.lower(),))
        meters.gpu_loads.add(gpu)
        meters.gpu_load.add(gpu, event.load_s)
        meters.model_loads.add(model)
        meters.model_load.add(model, event.load_s)

    def _load_failed(self, event: LoadFailed) -> None:
        self._expected.failed(event)
        self._meters.load_failures.add((self._meters.gpus.of(event.gpu),))

    def _run_failed(self, event: RunFailed) -> None:
        if event.lease in self._core.placer.leases:
            self._meters.run_failures.add(())

    def _pressure(self, event: MemoryPressure) -> None:
        self._meters.pressure.add((self._meters.gpus.of(event.gpu),))

    def _fleet(self, event: Event) -> None:
        if not isinstance(event, GpuJoined | GpuLost):  # the comparison below finds these
            self._meters.fleet_events.add((_FLEET[type(event)],))
        self._fleet_changed(event)

    def _fleet_changed(self, event: Event) -> None:
        """Nodes join and leave with a snapshot, which may be the same as before."""
        del event
        gpus: frozenset[str] = frozenset(self._core.cluster.gpus)
        for gpu in gpus - self._gpus:
            self._meters.met(gpu)
        self._meters.fleet_events.add(("joined",), len(gpus - self._gpus))
        self._meters.fleet_events.add(("lost",), len(self._gpus - gpus))
        self._gpus = gpus
        self._expected.forget()


# Runs are reported after their lease has ended: the slot may serve other models by then.
_MODELS_OF_SLOT = 8


class ExpectedTimes:
    """Estimates of leases of one model: with several models an error belongs to none of them."""

    def __init__(self, meters: SchedulerCounters) -> None:
        self._meters = meters
        self._loads: dict[tuple[GpuId, ModelId], float] = {}
        self._runs: dict[SlotId, dict[ModelId, float]] = {}
        self._loading = False

    def prepared(self, action: Prepare) -> None:
        """Note the loads of a lease, whose dispatch follows at once."""
        self._loading = not action.prefetch

    def dispatched(self, action: Dispatch) -> None:
        loading, self._loading = self._loading, False
        if len(action.models) != 1:
            return
        (model,) = action.models
        if loading:
            self._loads[action.gpu, model] = action.estimate.load_s
        runs = self._runs.setdefault(action.slot, {})
        runs.pop(model, None)
        runs[model] = action.estimate.run_s
        if len(runs) > _MODELS_OF_SLOT:
            del runs[next(iter(runs))]

    def loaded(self, event: ModelLoaded) -> None:
        expected_s = self._loads.pop((event.gpu, event.model), None)
        if expected_s is not None:
            model = self._meters.models.of(event.model)
            self._meters.compared("load", model, expected_s, event.load_s)

    def failed(self, event: LoadFailed) -> None:
        self._loads.pop((event.gpu, event.model), None)

    def ran(self, event: RunFinished) -> None:
        expected_s = self._runs.get(event.slot, _NOTHING).get(event.model)
        if expected_s is not None:
            model = self._meters.models.of(event.model)
            self._meters.compared("run", model, expected_s, event.run_s)

    def forget(self) -> None:
        """Drop all estimates: after GPUs joined or left, their reports may never arrive."""
        self._loads.clear()
        self._runs.clear()


_NOTHING: dict[ModelId, float] = {}
