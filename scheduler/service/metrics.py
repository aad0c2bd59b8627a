"""What Prometheus is told: counts of the driver as they are, times as they were measured."""

from collections import Counter
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from scheduler.actions import Dispatch
from scheduler.service.history import Happened, Listener
from scheduler.status import GpuStatus, Status

_NAMESPACE = "gpufaas_scheduler"
_SHORT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_ERRORS_S = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class Meters(Listener):
    """Times of requests and leases, and how often each route was answered in which way."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.answered: Counter[tuple[str, int]] = Counter()
        self._waited = self._histogram("wait_seconds", "From arrival to the first lease", _SHORT_S)
        self._held = self._histogram("lease_seconds", "From dispatch to the slot's end", _SHORT_S)
        self._load = self._histogram("load_seconds", "One model's measured load", _SHORT_S)
        self._late = self._histogram(
            "estimate_error_seconds",
            "Between the estimated and the measured load and run of a lease",
            _ERRORS_S,
        )

    def granted(self, waited_s: float) -> None:
        self._waited.observe(waited_s)

    def loaded(self, load_s: float) -> None:
        self._load.observe(load_s)

    def freed(self, dispatch: Dispatch, happened: Happened) -> None:
        freed_s = happened.freed_s
        if freed_s is not None:
            self._held.observe(freed_s - happened.dispatched_s)
        if happened.runs:
            measured_s = happened.load_s + happened.run_s
            self._late.observe(abs(measured_s - dispatch.estimate.total_s))

    def text(self) -> bytes:
        """Everything in Prometheus's text format."""
        return generate_latest(self.registry)

    def _histogram(self, name: str, says: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, says, namespace=_NAMESPACE, buckets=buckets, registry=self.registry)


class Facts(Collector):
    """What is asked for at every scrape; a standby has only what it knows of itself."""

    def __init__(
        self,
        meters: Meters,
        status: Callable[[], Status | None],
        own: Callable[[], dict[str, tuple[str, float]]],
    ) -> None:
        self._meters = meters
        self._status = status
        self._own = own
        meters.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """The families of now."""
        for name, (says, value) in self._own().items():
            yield GaugeMetricFamily(f"{_NAMESPACE}_{name}", says, value)
        answered = _counter("http_requests", "Answers by route and status", "route", "status")
        for (route, code), count in sorted(self._meters.answered.items()):
            answered.add_metric([route, str(code)], count)
        yield answered
        status = self._status()
        if status is not None:
            yield from _counts(status)
            yield from _queues(status)
            yield from _gpus(status)

    def describe(self) -> Iterator[Metric]:
        """Nothing: no name is taken before the first scrape."""
        return iter(())


def _counts(status: Status) -> Iterator[Metric]:
    counts = status.counts
    placements = _counter("placements", "Requests that were given a lease", "result")
    placements.add_metric(["hit"], counts.hits)
    placements.add_metric(["miss"], counts.misses)
    yield placements
    ended = _counter("requests_ended", "Requests by how they ended", "outcome")
    for outcome, count in counts.finished.items():
        ended.add_metric([outcome], count)
    yield ended
    for name, says, value in (
        ("evictions", "Models that had to leave a GPU", counts.evictions),
        ("prefetches", "Models that were loaded ahead", counts.prefetches),
        ("refusals", "Events that were not obeyed", counts.refusals),
    ):
        yield CounterMetricFamily(f"{_NAMESPACE}_{name}", says, value)


def _queues(status: Status) -> Iterator[Metric]:
    waiting = _gauge("waiting_requests", "Requests that wait, by queue", "queue")
    waiting.add_metric(["global"], status.waiting)
    waiting.add_metric(["local"], status.waiting_locally)
    yield waiting
    policy = _gauge("policy_info", "The policy in force", "policy")
    policy.add_metric([status.policy], 1)
    yield policy
    yield GaugeMetricFamily(f"{_NAMESPACE}_nodes", "Nodes that are attached", len(status.nodes))


def _gpus(status: Status) -> Iterator[Metric]:
    memory = _gauge("gpu_memory_bytes", "A GPU's memory, by what it is for", "gpu", "kind")
    models = _gauge("gpu_models", "Models that a GPU holds", "gpu")
    leases = _gauge("gpu_leases", "Leases in force on a GPU", "gpu")
    waiting = _gauge("gpu_waiting_requests", "Requests in a GPU's local queues", "gpu")
    for gpu in status.gpus:
        memory.add_metric([gpu.id, "total"], gpu.memory_bytes)
        memory.add_metric([gpu.id, "used"], gpu.used_bytes)
        memory.add_metric([gpu.id, "withheld"], gpu.withheld_bytes)
        models.add_metric([gpu.id], len(gpu.residents))
        leases.add_metric([gpu.id], _leases(gpu))
        waiting.add_metric([gpu.id], sum(len(slot.queue) for slot in gpu.slots))
    yield from (memory, models, leases, waiting)


def _leases(gpu: GpuStatus) -> int:
    return sum(len(slot.leases) for slot in gpu.slots)


def _counter(name: str, says: str, *labels: str) -> CounterMetricFamily:
    return CounterMetricFamily(f"{_NAMESPACE}_{name}", says, labels=labels)


def _gauge(name: str, says: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"{_NAMESPACE}_{name}", says, labels=labels)
