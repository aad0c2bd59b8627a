"""Counts what one core decides and what happens to it, by policy, GPU, model and function."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from cache_manager.model.ids import GpuId, ModelId
from common.telemetry.metrics import BoundedNames, Histogram, Metric, MetricFamily, Values
from scheduler.core.core import Core
from scheduler.model import events
from scheduler.model.actions import Action, Demote, Dispatch, Prepare, Refuse, Taken
from scheduler.model.values import LeaseId, Request, SlotId
from scheduler.service.history.history import Happened
from scheduler.service.metrics import declared

# The reason of an eviction, by the event that led to it.
_REASONS: Mapping[type, str] = {
    events.EvictAsked: "asked",
    events.MemoryPressure: "pressure",
    events.ModelLoaded: "measured",
    events.ModelRegistered: "measured",
    events.NodeSnapshot: "measured",
    events.RunFinished: "measured",
    events.StageDue: "idle",
}
_FLEET: Mapping[type, str] = {
    events.GpuDraining: "draining",
    events.GpuJoined: "joined",
    events.GpuLost: "lost",
    events.NodeHeard: "heard",
    events.NodeSilent: "silent",
}


MOST_NAMES = 1_000
# GPUs, models and functions that were unused for this long (at most twice) make room for others.
_FORGET_S = 86_400.0


class SchedulerCounters:
    """Counters and histograms, by their metrics.

    At most `most_names` GPUs, models and functions have numbers of their own; others are `other`.
    """

    def __init__(self, most_names: int = MOST_NAMES, more: Iterable[Metric] = ()) -> None:
        """`more` counters are those of features."""
        self.gpus = BoundedNames(most_names)
        self.models = BoundedNames(most_names)
        self.functions = BoundedNames(most_names)
        self._names = {"gpu": self.gpus, "model": self.models, "function": self.functions}
        self._swept_s = time.monotonic()
        self.started_unix_s = time.time()
        self.answered: Counter[tuple[str, int]] = Counter()
        self.values: dict[Metric, Values] = {m: Values(m) for m in (*declared.COUNTERS, *more)}
        self.times: dict[Metric, Histogram] = {m: Histogram(m) for m in declared.HISTOGRAMS}
        for event in ("joined", "lost", "draining", "silent", "heard"):
            self.values[declared.FLEET_EVENTS].put((event,), 0.0)

    def met(self, gpu: str) -> None:
        """A GPU joined: Prometheus sees an increase only of a value that existed before."""
        name = self.gpus.of(gpu)
        for metric in declared.FROM_THE_START:
            self.values[metric].add((name,), 0.0)
        for reason in ("room", "pressure", "asked"):
            self.values[declared.GPU_EVICTIONS].add((name, reason), 0.0)

    def families(self) -> Iterator[MetricFamily]:
        if time.monotonic() - self._swept_s > _FORGET_S:
            self.sweep()
        yield from self.values.values()
        yield from self.times.values()
        yield self.times[declared.POLICY_WAITED].pooled(declared.WAITED)
        answered = Values(declared.HTTP_REQUESTS)
        for (route, status), count in self.answered.items():
            answered.put((route, str(status)), count)
        yield answered

    def sweep(self) -> None:
        """Drop names that were unused since the last call."""
        self._swept_s = time.monotonic()
        families: list[Values | Histogram] = [*self.values.values(), *self.times.values()]
        for label, names in self._names.items():
            for name in names.sweep():
                for family in families:
                    if label in family.metric.labels:
                        family.forget(label, name)


class DecisionCounting:
    """An observer of one driver; what it counts outlives its core, in `meters`."""

    def __init__(self, core: Core, meters: SchedulerCounters, now_s: Callable[[], float]) -> None:
        self._core = core
        self._meters = meters
        self._counts = meters.values
        self._now_s = now_s
        self._latest = LeaseId(0)
        self._gpus: frozenset[str] = frozenset()
        self._expected = ExpectedTimes()
        self._happens: Mapping[type, Callable[[Any], None]] = {
            events.ModelLoaded: self._loaded,
            events.LoadFailed: self._load_failed,
            events.RunFinished: self._run_finished,
            events.RunFailed: self._run_failed,
            events.MemoryPressure: self._pressure,
            events.NodeSnapshot: self._fleet_changed,
            **dict.fromkeys(_FLEET, self._fleet),
        }

    def __call__(self, now: float, event: events.Event, actions: Sequence[Action]) -> None:
        """One event was handled, which began at `now`; these actions follow from it."""
        decided = self._meters.times[declared.DECIDED]
        decided.add((self._core.placer.policy_name,), self._now_s() - now)
        happens = self._happens.get(type(event))
        if happens is not None and not (actions and isinstance(actions[0], Refuse)):
            happens(event)
        for action in actions:
            if type(action) is Dispatch:
                self._dispatched(action, now)
            elif type(action) is Taken:
                request, began_s = action.request, action.began_s
                arrived_s = began_s if request.arrived_s is None else request.arrived_s
                self._placed(action.dispatch, request, "hit", began_s - arrived_s)
            elif type(action) is Prepare:
                self._prepared(action)
            elif type(action) is Demote:
                self._evicted(action.gpu, action.model, _REASONS.get(type(event), "other"))

    # -- what was decided -----------------------------------------------------------------------

    def _dispatched(self, action: Dispatch, now: float) -> None:
        if action.lease <= self._latest:
            return  # repeated for a caller that asked again
        self._latest = action.lease
        result = "hit" if action.hit else "false_miss" if action.held_elsewhere else "miss"
        for request in action.requests:
            pending = self._core.requests.get(request)
            if pending is not None:  # else the request ended in the same step
                waited_s = None if pending.gave_back else now - pending.arrived_s
                self._placed(action, pending.request, result, waited_s)
        self._counts[declared.LEASES].add(())
        self._expected.dispatched(action)

    def _placed(
        self, dispatch: Dispatch, request: Request, result: str, waited_s: float | None
    ) -> None:
        """A request was given a lease; with `waited_s` if it is the request's first lease."""
        meters, counts, policy = self._meters, self._counts, self._core.placer.policy_name
        gpu = meters.gpus.of(dispatch.gpu)
        function = meters.functions.of(request.function)
        models = [meters.models.of(model) for model in dispatch.models]
        counts[declared.POLICY_PLACEMENTS].add((policy, result))
        counts[declared.GPU_PLACEMENTS].add((gpu, result))
        counts[declared.FUNCTION_PLACEMENTS].add((function, result))
        for model in models:
            counts[declared.MODEL_PLACEMENTS].add((model, result))
        if waited_s is None:
            return
        meters.times[declared.POLICY_WAITED].add((policy,), waited_s)
        counts[declared.GPU_WAITED].add((gpu,), waited_s)
        counts[declared.FUNCTION_WAITED].add((function,), waited_s)
        for model in models:
            counts[declared.MODEL_WAITED].add((model,), waited_s)

    def _prepared(self, action: Prepare) -> None:
        self._expected.prepared(action)
        reason = "prefetch" if action.prefetch else "room"
        for model in action.victims:
            self._evicted(action.gpu, model, reason)

    def _evicted(self, gpu: str, model: ModelId, reason: str) -> None:
        self._counts[declared.GPU_EVICTIONS].add((self._meters.gpus.of(gpu), reason))
        self._counts[declared.MODEL_EVICTIONS].add((self._meters.models.of(model),))

    # -- what happened --------------------------------------------------------------------------

    def freed(self, dispatch: Dispatch, happened: Happened, freed_s: float) -> None:
        """A lease has ended."""
        held_s = freed_s - happened.dispatched_s
        self._meters.times[declared.HELD].add((), held_s)
        self._counts[declared.GPU_HELD].add((self._meters.gpus.of(dispatch.gpu),), held_s)
        for model in dispatch.models:
            self._counts[declared.MODEL_HELD].add((self._meters.models.of(model),), held_s)
        if happened.runs:
            late_s = abs(happened.load_s + happened.run_s - dispatch.estimate.total_s)
            self._meters.times[declared.ESTIMATE_ERROR].add((), late_s)

    def _loaded(self, event: events.ModelLoaded) -> None:
        counts, load_s = self._counts, event.load_s
        gpu, model = (self._meters.gpus.of(event.gpu),), (self._meters.models.of(event.model),)
        self._meters.times[declared.LOAD].add((), load_s)
        counts[declared.LOADS].add((event.source.name.lower(),))
        counts[declared.GPU_LOADS].add(gpu)
        counts[declared.GPU_LOAD].add(gpu, load_s)
        counts[declared.MODEL_LOADS].add(model)
        counts[declared.MODEL_LOAD].add(model, load_s)
        self._compare("load", event.model, self._expected.load_s(event.gpu, event.model), load_s)

    def _load_failed(self, event: events.LoadFailed) -> None:
        self._expected.load_s(event.gpu, event.model)
        self._counts[declared.LOAD_FAILURES].add((self._meters.gpus.of(event.gpu),))

    def _run_finished(self, event: events.RunFinished) -> None:
        expected_s = self._expected.run_s(event.slot, event.model)
        self._compare("run", event.model, expected_s, event.run_s)

    def _compare(
        self, what: str, model: ModelId, expected_s: float | None, measured_s: float
    ) -> None:
        if expected_s is None:
            return
        if measured_s > 0.0:
            self._meters.times[declared.ESTIMATE_RATIO].add((what,), expected_s / measured_s)
        labels = (self._meters.models.of(model),)
        self._counts[declared.MODEL_ESTIMATED].add(labels, expected_s)
        self._counts[declared.MODEL_MEASURED].add(labels, measured_s)

    def _run_failed(self, event: events.RunFailed) -> None:
        if event.lease in self._core.leases:
            self._counts[declared.RUN_FAILURES].add(())

    def _pressure(self, event: events.MemoryPressure) -> None:
        self._counts[declared.PRESSURE].add((self._meters.gpus.of(event.gpu),))

    def _fleet(self, event: events.Event) -> None:
        if type(event) not in {events.GpuJoined, events.GpuLost}:  # the comparison finds these
            self._counts[declared.FLEET_EVENTS].add((_FLEET[type(event)],))
        self._fleet_changed(event)

    def _fleet_changed(self, _event: events.Event) -> None:
        """Nodes join and leave with a snapshot, which may be the same as before."""
        gpus: frozenset[str] = frozenset(self._core.cluster.gpus)
        for gpu in gpus - self._gpus:
            self._meters.met(gpu)
        fleet_events = self._counts[declared.FLEET_EVENTS]
        fleet_events.add(("joined",), len(gpus - self._gpus))
        fleet_events.add(("lost",), len(self._gpus - gpus))
        self._gpus = gpus
        self._expected.forget()


# Runs are reported after their lease has ended: the slot may serve other models by then.
_MODELS_OF_SLOT = 8


class ExpectedTimes:
    """Estimates of leases of one model: with several models an error belongs to none of them."""

    def __init__(self) -> None:
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

    def load_s(self, gpu: GpuId, model: ModelId) -> float | None:
        """What was expected of a load that has ended now."""
        return self._loads.pop((gpu, model), None)

    def run_s(self, slot: SlotId, model: ModelId) -> float | None:
        return self._runs.get(slot, _NOTHING).get(model)

    def forget(self) -> None:
        """Drop all estimates: after GPUs joined or left, their reports may never arrive."""
        self._loads.clear()
        self._runs.clear()


_NOTHING: dict[ModelId, float] = {}
