"""What a scheduler counts for Prometheus, in plain dicts, from the start of its process on."""

import time
from collections import Counter
from collections.abc import Iterator, Mapping

from common.telemetry.metrics import BoundedNames, Histogram, Metric, MetricFamily, Values
from scheduler.service.metrics import declared

MOST_NAMES = 1_000
# GPUs, models and functions that were unused for this long (at most twice) make room for others.
_FORGET_S = 86_400.0
# The stages of a model whose bytes are a GPU's.
_ON_GPUS = frozenset({"used", "idle", "context"})


class SchedulerCounters:
    """Counters and histograms, by their metrics.

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
        self.values: dict[Metric, Values] = {m: Values(m) for m in declared.COUNTERS}
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

    def gpu_seconds(self) -> Mapping[str, float]:
        """The seconds in which each function's models were loaded or computed."""
        used = self.values[declared.FUNCTION_GPU].values
        return {function: used_s for (function,), used_s in used.items()}

    def billed(self) -> Mapping[str, tuple[float, float]]:
        """The byte-seconds on GPUs that each function pays for, and what everything costs it."""
        costs = self.values[declared.BILLED_COST].values
        bills = {function: (0.0, cost) for (function,), cost in costs.items()}
        for (function, stage), byte_s in self.values[declared.BILLED_BYTES].values.items():
            if stage in _ON_GPUS:
                before_s, cost = bills.get(function, (0.0, 0.0))
                bills[function] = before_s + byte_s, cost
        return bills

    def placements(self) -> Counter[str]:
        """How many requests were given a lease, by result: hit, miss, false_miss."""
        counts: Counter[str] = Counter()
        for (_, result), count in self.values[declared.POLICY_PLACEMENTS].values.items():
            counts[result] += int(count)
        return counts

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
