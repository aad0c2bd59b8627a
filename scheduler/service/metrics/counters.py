"""What a scheduler counts for Prometheus, in plain dicts, from the start of its process on."""

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from common.telemetry.metrics import (
    BoundedNames,
    BucketCounts,
    Histogram,
    MetricFamily,
    Values,
    counted_in,
)
from scheduler.model.actions import Dispatch
from scheduler.service.history.history import Happened
from scheduler.service.metrics import declared

MOST_NAMES = 1_000
# GPUs, models and functions that were unused for this long (at most twice) make room for others.
_FORGET_S = 86_400.0
# The stages of a model whose bytes are a GPU's.
_ON_GPUS = frozenset({"used", "idle", "context"})


class SchedulerCounters:
    """Counters and histograms.

    At most `most_names` GPUs, models and functions have numbers of their own; others are `other`.
    """

    def __init__(self, most_names: int = MOST_NAMES) -> None:
        self.gpus = BoundedNames(most_names)
        self.models = BoundedNames(most_names)
        self.functions = BoundedNames(most_names)
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
        self.leases = Values(declared.LEASES)
        self._policy_placements = Values(declared.POLICY_PLACEMENTS)
        self._gpu_placements = Values(declared.GPU_PLACEMENTS)
        self._model_placements = Values(declared.MODEL_PLACEMENTS)
        self._function_placements = Values(declared.FUNCTION_PLACEMENTS)
        self._gpu_waited = Values(declared.GPU_WAITED)
        self._model_waited = Values(declared.MODEL_WAITED)
        self._function_waited = Values(declared.FUNCTION_WAITED)
        self._gpu_held = Values(declared.GPU_HELD)
        self._model_held = Values(declared.MODEL_HELD)
        self._model_estimated = Values(declared.MODEL_ESTIMATED)
        self._model_measured = Values(declared.MODEL_MEASURED)
        self._policy_waited = Histogram(declared.POLICY_WAITED)
        self._held = Histogram(declared.HELD)
        self._load = Histogram(declared.LOAD)
        self._decided = Histogram(declared.DECIDED)
        self._late = Histogram(declared.ESTIMATE_ERROR)
        self._ratio = Histogram(declared.ESTIMATE_RATIO)
        self.function_gpu = Values(declared.FUNCTION_GPU)
        self.billed_gpu = Values(declared.BILLED_GPU)
        self.billed_bytes = Values(declared.BILLED_BYTES)
        self.billed_cost = Values(declared.BILLED_COST)
        self.idle_gpu = Values(declared.IDLE_GPU)
        self.unused_memory = Values(declared.UNUSED_MEMORY)

        for event in ("joined", "lost", "draining", "silent", "heard"):
            self.fleet_events.put((event,), 0.0)

    def met(self, gpu: str) -> None:
        """A GPU joined: Prometheus sees an increase only of a value that existed before."""
        labels = (self.gpus.of(gpu),)
        for metric in (self.load_failures, self.pressure, self.gpu_loads, self.gpu_load):
            metric.add(labels, 0.0)
        self._gpu_held.add(labels, 0.0)
        for reason in ("room", "pressure", "asked"):
            self.gpu_evictions.add((*labels, reason), 0.0)

    # -- what was decided -----------------------------------------------------------------------

    def decisions(self, policy: str) -> BucketCounts:
        """The histogram of decision times under this policy; add to it with every event."""
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
        """A request was given a lease; with `waited_s` if it is the request's first lease."""
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

    def compared(self, what: str, model: str, estimated_s: float, measured_s: float) -> None:
        if measured_s > 0.0:
            self._ratio.add((what,), estimated_s / measured_s)
        self._model_estimated.add((model,), estimated_s)
        self._model_measured.add((model,), measured_s)

    def loaded(self, load_s: float) -> None:
        self._load.add((), load_s)

    def freed(self, dispatch: Dispatch, happened: Happened, freed_s: float) -> None:
        """The history: a lease has ended."""
        models = [self.models.of(model) for model in dispatch.models]
        held_s = freed_s - happened.dispatched_s
        self._held.add((), held_s)
        self._gpu_held.add((self.gpus.of(dispatch.gpu),), held_s)
        for model in models:
            self._model_held.add((model,), held_s)
        if happened.runs:
            measured_s = happened.load_s + happened.run_s
            self._late.add((), abs(measured_s - dispatch.estimate.total_s))

    # -- what is shown --------------------------------------------------------------------------

    def gpu_seconds(self) -> Mapping[str, float]:
        """The seconds in which each function's models were loaded or computed."""
        return {function: used_s for (function,), used_s in self.function_gpu.values.items()}

    def billed(self) -> Mapping[str, tuple[float, float]]:
        """The byte-seconds on GPUs that each function pays for, and what everything costs it."""
        costs = self.billed_cost.values
        bills = {function: (0.0, cost) for (function,), cost in costs.items()}
        for (function, stage), byte_s in self.billed_bytes.values.items():
            if stage in _ON_GPUS:
                before_s, cost = bills.get(function, (0.0, 0.0))
                bills[function] = before_s + byte_s, cost
        return bills

    def placements(self) -> Counter[str]:
        """How many requests were given a lease, by result: hit, miss, false_miss."""
        counts: Counter[str] = Counter()
        for (_, result), count in self._policy_placements.values.items():
            counts[result] += int(count)
        return counts

    def families(self) -> Iterator[MetricFamily]:
        if time.monotonic() - self._swept_s > _FORGET_S:
            self.sweep()
        yield from counted_in(self)
        yield self._policy_waited.pooled(declared.WAITED)
        answered = Values(declared.HTTP_REQUESTS)
        for (route, status), count in self.answered.items():
            answered.put((route, str(status)), count)
        yield answered

    def sweep(self) -> None:
        """Drop names that were unused since the last call."""
        self._swept_s = time.monotonic()
        for label, names in self._names.items():
            for name in names.sweep():
                for family in counted_in(self):
                    if label in family.metric.labels:
                        family.forget(label, name)
