"""What a scheduler counts for Prometheus, in plain dicts, from the start of its process on."""

import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

from scheduler.actions import Dispatch
from scheduler.exposition import Family, Histogram, Names, Times, Values
from scheduler.model import LeaseId
from scheduler.service import declared
from scheduler.service.history import Happened, Listener

MOST_NAMES = 1_000
# GPUs, models and functions that were not met for so long (up to twice) make room for others.
_FORGET_S = 86_400.0


class Meters(Listener):
    """Counters and histograms.

    At most so many GPUs, models and functions have numbers of their own; others are `other`.
    """

    def __init__(self, most_names: int = MOST_NAMES) -> None:
        self.gpus = Names(most_names)
        self.models = Names(most_names)
        self.functions = Names(most_names)
        self._names = {"gpu": self.gpus, "model": self.models, "function": self.functions}
        self._swept_s = time.monotonic()
        self.started_unix_s = time.time()
        self.answered: Counter[tuple[str, int]] = Counter()
        self.terms = Values(declared.TERMS)
        self.loads = Values(declared.LOADS)
        self.gpu_loads = Values(declared.GPU_LOADS)
        self.gpu_load = Values(declared.GPU_LOAD)
        self.model_loads = Values(declared.MODEL_LOADS)
        self.model_load = Values(declared.MODEL_LOAD)
        self.load_failures = Values(declared.LOAD_FAILURES)
        self.run_failures = Values(declared.RUN_FAILURES)
        self.gpu_evictions = Values(declared.GPU_EVICTIONS)
        self.model_evictions = Values(declared.MODEL_EVICTIONS)
        self.fleet_events = Values(declared.FLEET_EVENTS)
        self.pressure = Values(declared.PRESSURE)
        self._leases = Values(declared.LEASES)
        self._policy_placements = Values(declared.POLICY_PLACEMENTS)
        self._gpu_placements = Values(declared.GPU_PLACEMENTS)
        self._model_placements = Values(declared.MODEL_PLACEMENTS)
        self._function_placements = Values(declared.FUNCTION_PLACEMENTS)
        self._gpu_waited = Values(declared.GPU_WAITED)
        self._model_waited = Values(declared.MODEL_WAITED)
        self._function_waited = Values(declared.FUNCTION_WAITED)
        self._gpu_held = Values(declared.GPU_HELD)
        self._model_held = Values(declared.MODEL_HELD)
        self._function_held = Values(declared.FUNCTION_HELD)
        self._model_estimated = Values(declared.MODEL_ESTIMATED)
        self._model_measured = Values(declared.MODEL_MEASURED)
        self._policy_waited = Histogram(declared.POLICY_WAITED)
        self._held = Histogram(declared.HELD)
        self._load = Histogram(declared.LOAD)
        self._decided = Histogram(declared.DECIDED)
        self._late = Histogram(declared.ESTIMATE_ERROR)
        self._ratio = Histogram(declared.ESTIMATE_RATIO)
        self._of_lease: dict[LeaseId, Sequence[str]] = {}

        for event in ("joined", "lost", "draining", "silent", "heard"):
            self.fleet_events.put((event,), 0.0)

    def met(self, gpu: str) -> None:
        """A GPU is there: an increase is only seen of what was there before."""
        labels = (self.gpus.of(gpu),)
        for each in (self.load_failures, self.pressure, self.gpu_loads, self.gpu_load):
            each.add(labels, 0.0)
        self._gpu_held.add(labels, 0.0)
        for reason in ("room", "pressure", "asked"):
            self.gpu_evictions.add((*labels, reason), 0.0)

    # -- what was decided -----------------------------------------------------------------------

    def decisions(self, policy: str) -> Times:
        """How long the core takes under this policy; to be added to with every event."""
        return self._decided.of((policy,))

    def placed(
        self,
        policy: str,
        gpu: str,
        models: Sequence[str],
        function: str,
        result: str,
        waited_s: float | None,
    ) -> None:
        """A request was given a lease; its first one, if it is said how long it has waited."""
        self._policy_placements.add((policy, result))
        self._gpu_placements.add((gpu, result))
        self._function_placements.add((function, result))
        for model in models:
            self._model_placements.add((model, result))
        if waited_s is None:
            return
        self._policy_waited.add((policy,), waited_s)
        self._gpu_waited.add((gpu,), waited_s)
        self._function_waited.add((function,), waited_s)
        for model in models:
            self._model_waited.add((model,), waited_s)

    def leased(self, lease: LeaseId, functions: Sequence[str]) -> None:
        """This lease is in force, for requests of these functions."""
        self._leases.add(())
        self._of_lease[lease] = functions

    def forget_leases(self, alive: Collection[LeaseId]) -> None:
        """Leases that went with their GPU are never reported as freed."""
        for lease in [lease for lease in self._of_lease if lease not in alive]:
            del self._of_lease[lease]

    def compared(self, what: str, model: str, estimated_s: float, measured_s: float) -> None:
        """What was expected of a model's load or run, and what came."""
        if measured_s > 0.0:
            self._ratio.add((what,), estimated_s / measured_s)
        self._model_estimated.add((model,), estimated_s)
        self._model_measured.add((model,), measured_s)

    # -- what the history notices ---------------------------------------------------------------

    def loaded(self, load_s: float) -> None:
        self._load.add((), load_s)

    def freed(self, dispatch: Dispatch, happened: Happened) -> None:
        functions = self._of_lease.pop(dispatch.lease, ())
        models = [self.models.of(model) for model in dispatch.models]
        if happened.freed_s is not None:
            held_s = happened.freed_s - happened.dispatched_s
            self._held.add((), held_s)
            self._gpu_held.add((self.gpus.of(dispatch.gpu),), held_s)
            for model in models:
                self._model_held.add((model,), held_s)
            for function in functions:
                self._function_held.add((function,), held_s / len(functions))
        if happened.runs:
            measured_s = happened.load_s + happened.run_s
            self._late.add((), abs(measured_s - dispatch.estimate.total_s))

    # -- what is shown --------------------------------------------------------------------------

    def gpu_seconds(self) -> Mapping[str, float]:
        """What each function's leases that have ended took of GPUs."""
        return {function: held_s for (function,), held_s in self._function_held.values.items()}

    def placements(self) -> Counter[str]:
        """How many requests were given a lease, by result: hit, miss, false_miss."""
        found: Counter[str] = Counter()
        for (_, result), count in self._policy_placements.values.items():
            found[result] += int(count)
        return found

    def families(self) -> Iterator[Family]:
        """Everything that was counted."""
        if time.monotonic() - self._swept_s > _FORGET_S:
            self.sweep()
        yield from self._counted()
        yield self._policy_waited.pooled(declared.WAITED)
        answered = Values(declared.HTTP_REQUESTS)
        for (route, status), count in self.answered.items():
            answered.put((route, str(status)), count)
        yield answered

    def sweep(self) -> None:
        """Let go of what was not met since this was last called."""
        self._swept_s = time.monotonic()
        for label, names in self._names.items():
            for name in names.sweep():
                for family in self._counted():
                    if label in family.metric.labels:
                        family.forget(label, name)

    def _counted(self) -> list[Values | Histogram]:
        return [each for each in vars(self).values() if isinstance(each, Values | Histogram)]
