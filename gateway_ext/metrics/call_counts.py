"""Metrics of calls: counted in plain dicts, rendered when Prometheus scrapes them."""

import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from http import HTTPStatus
from operator import add
from typing import NamedTuple

from common.telemetry.metrics import (
    BoundedNames,
    Histogram,
    MetricFamily,
    Values,
    counted_in,
    gauge,
    page,
)
from gateway_ext.metrics import gateway_metrics

MOST_NAMES = 1_000
_CODES = {status.value: str(status.value) for status in HTTPStatus} | {499: "499"}
_HUNDRED = 100
_FAILED = "5"
BOUNDS_S = gateway_metrics.SECONDS.bounds

Source = Callable[[], Iterable[MetricFamily]]


class FunctionLoad(NamedTuple):
    """How busy a function is at the moment."""

    function: str
    replicas: int
    inflight: int
    waiting: int
    expected_wait_s: float = 0.0


class GatewayMeters:
    """Counts of the gateway; `loads` is called at every scrape for the present functions.

    At most `most_names` functions have numbers of their own, the rest are `other`; the numbers of a
    removed function vanish.
    """

    def __init__(
        self,
        loads: Callable[[], Iterable[FunctionLoad]] | None = None,
        most_names: int = MOST_NAMES,
    ) -> None:
        self._loads = loads
        self.functions = BoundedNames(most_names)
        self._sources: list[Source] = []
        self._answered: Counter[str] = Counter()
        self._instances: dict[str, frozenset[str]] = {}
        self._invocations = Values(gateway_metrics.INVOCATIONS)
        self._seconds = Histogram(gateway_metrics.SECONDS)
        self._begun = Values(gateway_metrics.STARTED_CALLS)
        self._leases = Histogram(gateway_metrics.LEASES)
        self._refused = Values(gateway_metrics.REFUSED)
        self._retries = Values(gateway_metrics.RETRIES)
        self._batched = Values(gateway_metrics.BATCHED)
        self._batches = Values(gateway_metrics.BATCHES)
        self._cut = Values(gateway_metrics.CUT)
        self._instances_started = Values(gateway_metrics.INSTANCES_STARTED)
        self._started = gauge(gateway_metrics.STARTED, [((), time.time())])

    def add(self, source: Source) -> None:
        """Show the metrics of this source too; it is called at every scrape."""
        self._sources.append(source)

    def started(self, function: str) -> None:
        """Count a call of a known function that has arrived."""
        self._begun.add((self.functions.of(function),))

    def ended(self, function: str, code: int, seconds: float) -> None:
        """Count an answered call, or one that its caller left (499)."""
        labels = (_CODES.get(code) or _class(code), self.functions.of(function))
        self._answered[function] += 1
        self._invocations.add(labels)
        self._seconds.add(labels, seconds)

    def busy(self, function: str) -> None:
        """Count a call that was refused at once; its time would make the function look fast."""
        label = self.functions.of(function)
        self._answered[function] += 1
        self._begun.add((label,))
        self._invocations.add((_CODES[HTTPStatus.TOO_MANY_REQUESTS], label))

    def refused(self, code: int) -> None:
        """Count a call that names no known function."""
        self._refused.add((str(code),))

    def lease(self, result: str, seconds: float) -> None:
        """Count an answer of the scheduler, and the wait for it."""
        self._leases.add((result,), seconds)

    def retried(self, function: str) -> None:
        """Count a repeated attempt of a call."""
        self._retries.add((self.functions.of(function),))

    def batched(self, function: str, together: int) -> None:
        """Count a call that its handler was given in a list of so many."""
        labels = (self.functions.of(function),)
        self._batched.add(labels)
        self._batches.add(labels, 1 / together)

    def cut(self, function: str, why: str) -> None:
        """Count an answer that broke off after its status had been sent."""
        self._cut.add((self.functions.of(function), why))

    def serves(self, function: str, instances: Sequence[str]) -> None:
        """Note the instances that take a function's calls from now on."""
        now = frozenset(instances)
        new = now - self._instances.get(function, frozenset())
        self._instances[function] = now
        if new:
            self._instances_started.add((self.functions.of(function),), len(new))

    def gone(self, function: str) -> None:
        """Note that a function was removed."""
        self._forget(function)
        if self._loads is not None:
            self._forget_all_but({load.function for load in self._loads()})

    def invocations_of(self, function: str) -> int:
        """How many calls of a function were answered."""
        return self._answered[function]

    def failures(self) -> Counter[str]:
        """How many calls of each function were answered with a 5xx."""
        found: Counter[str] = Counter()
        for (code, function), count in self._invocations.values.items():
            if code.startswith(_FAILED):
                found[function] += int(count)
        return found

    def seconds(self, functions: Container[str]) -> dict[str, list[int]]:
        """For each function, how many answers took up to each bound of `BOUNDS_S`, or longer."""
        found: dict[str, list[int]] = {}
        for (_, function), counts in self._seconds.counts():
            if function not in functions:
                continue
            before = found.get(function)
            found[function] = list(counts) if before is None else list(map(add, before, counts))
        return found

    def text(self) -> bytes:
        """All metrics in Prometheus's text format."""
        return page(self._families())

    def _families(self) -> Iterator[MetricFamily]:
        """The gauges first: they determine which functions are gone."""
        yield from self._of_the_moment()
        yield from counted_in(self)
        for source in self._sources:
            yield from source()

    def _of_the_moment(self) -> Iterator[MetricFamily]:
        if self._loads is None:
            return
        loads = [(load, (self.functions.of(load.function),)) for load in self._loads()]
        self._forget_all_but({load.function for load, _ in loads})
        yield gauge(gateway_metrics.FUNCTIONS, [((), len(loads))])
        yield gauge(gateway_metrics.REPLICAS, [(labels, load.replicas) for load, labels in loads])
        yield gauge(gateway_metrics.IN_FLIGHT, [(labels, load.inflight) for load, labels in loads])
        yield gauge(gateway_metrics.WAITING, [(labels, load.waiting) for load, labels in loads])
        waits = [(labels, load.expected_wait_s) for load, labels in loads]
        yield gauge(gateway_metrics.EXPECTED_WAIT, waits)

    def _forget_all_but(self, known: Container[str]) -> None:
        """Calls that outlive their function are counted after it was removed."""
        for function in {*self.functions, *self._answered}:
            if function not in known:
                self._forget(function)

    def _forget(self, function: str) -> None:
        self.functions.forget(function)
        self._answered.pop(function, None)
        self._instances.pop(function, None)
        for family in counted_in(self):
            if gateway_metrics.FUNCTION in family.metric.labels:
                family.forget(gateway_metrics.FUNCTION, function)


def _class(code: int) -> str:
    """The label of a status: functions may return any, so unknown ones count by first digit."""
    return f"{code // _HUNDRED}xx"
