"""What Prometheus is told of calls: counted in plain dicts, made into text when it is asked for."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    UnknownMetricFamily,
)
from prometheus_client.registry import Collector

_OURS = "gpufaas_gateway"
_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Load(NamedTuple):
    """How busy a function is at the moment."""

    function: str
    replicas: int
    inflight: int
    waiting: int


class Times:
    """A histogram of seconds."""

    __slots__ = ("buckets", "sum_s")

    def __init__(self) -> None:
        self.buckets = [0] * (len(_BOUNDS_S) + 1)
        self.sum_s = 0.0

    def add(self, seconds: float) -> None:
        """One more."""
        self.buckets[bisect_left(_BOUNDS_S, seconds)] += 1
        self.sum_s += seconds

    def shown(self) -> list[tuple[str, float]]:
        """Cumulated, as Prometheus wants them."""
        total, shown = 0, []
        for bound, count in zip((*map(str, _BOUNDS_S), "+Inf"), self.buckets, strict=True):
            total += count
            shown.append((bound, float(total)))
        return shown


class Meters(Collector):
    """Counts of the gateway. `loads` is asked at every scrape for the functions of the moment."""

    def __init__(self, loads: Callable[[], Iterable[Load]] = tuple) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self.loads = loads
        self._started: Counter[str] = Counter()
        self._ended: dict[tuple[str, int], Times] = {}
        self._leases: dict[str, Times] = {}
        self._refused: Counter[int] = Counter()
        self._retries: Counter[str] = Counter()
        self._cut: Counter[tuple[str, str]] = Counter()

    def started(self, function: str) -> None:
        """A call of a known function has come."""
        self._started[function] += 1

    def ended(self, function: str, code: int, seconds: float) -> None:
        """It was answered so, or left by its caller (499)."""
        times = self._ended.get((function, code))
        if times is None:
            times = self._ended[function, code] = Times()
        times.add(seconds)

    def refused(self, code: int) -> None:
        """A call that is of no known function."""
        self._refused[code] += 1

    def lease(self, result: str, seconds: float) -> None:
        """The scheduler answered so after so long."""
        self._leases.setdefault(result, Times()).add(seconds)

    def retried(self, function: str) -> None:
        """A call was tried once more."""
        self._retries[function] += 1

    def cut(self, function: str, why: str) -> None:
        """An answer ended before its end: its status had been sent already."""
        self._cut[function, why] += 1

    def invocations_of(self, function: str) -> int:
        """How many calls of a function were answered."""
        return sum(sum(t.buckets) for (name, _), t in self._ended.items() if name == function)

    def text(self) -> bytes:
        """Everything in Prometheus's text format."""
        return generate_latest(self.registry)

    def describe(self) -> Iterator[Metric]:
        """Nothing: no name is taken before the first scrape."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """The families of now: first those that dashboards for OpenFaaS read, then ours."""
        yield from self._as_openfaas()
        yield from self._ours()
        yield from _loads(list(self.loads()))

    def _as_openfaas(self) -> Iterator[Metric]:
        labels = ("function_name", "code")
        total = CounterMetricFamily(
            "gateway_function_invocation", "Function invocations", labels=labels
        )
        seconds = HistogramMetricFamily(
            "gateway_functions_seconds", "Seconds that functions took", labels=labels
        )
        for (function, code), times in sorted(self._ended.items()):
            total.add_metric((function, str(code)), sum(times.buckets))
            seconds.add_metric((function, str(code)), times.shown(), times.sum_s)
        # A counter, but OpenFaaS's name for it has no `_total`.
        started = UnknownMetricFamily(
            "gateway_function_invocation_started", "Invocations begun", labels=("function_name",)
        )
        for function, count in sorted(self._started.items()):
            started.add_metric((function,), count)
        yield from (total, seconds, started)

    def _ours(self) -> Iterator[Metric]:
        leases = HistogramMetricFamily(
            f"{_OURS}_lease_seconds", "Waiting for a lease, by result", labels=("result",)
        )
        for result, times in sorted(self._leases.items()):
            leases.add_metric((result,), times.shown(), times.sum_s)
        refused = CounterMetricFamily(
            f"{_OURS}_refused_calls", "Calls that name no function", labels=("code",)
        )
        for code, count in sorted(self._refused.items()):
            refused.add_metric((str(code),), count)
        retries = CounterMetricFamily(
            f"{_OURS}_retries", "Calls tried once more", labels=("function_name",)
        )
        for function, count in sorted(self._retries.items()):
            retries.add_metric((function,), count)
        cut = CounterMetricFamily(
            f"{_OURS}_cut_answers", "Answers broken off", labels=("function_name", "why")
        )
        for (function, why), count in sorted(self._cut.items()):
            cut.add_metric((function, why), count)
        yield from (leases, refused, retries, cut)


def _loads(loads: list[Load]) -> Iterator[Metric]:
    replicas = _gauge("gateway_service_count", "Ready replicas")
    inflight = _gauge(f"{_OURS}_calls_in_flight", "Calls that instances have")
    waiting = _gauge(f"{_OURS}_calls_waiting", "Calls that wait for an instance")
    for load in loads:
        replicas.add_metric((load.function,), load.replicas)
        inflight.add_metric((load.function,), load.inflight)
        waiting.add_metric((load.function,), load.waiting)
    yield from (replicas, inflight, waiting)


def _gauge(name: str, says: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, says, labels=("function_name",))
