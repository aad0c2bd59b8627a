"""A GPU manager's counters for Prometheus, and the gauges computed when Prometheus reads."""

import time
from collections.abc import Iterable, Iterator

from common.telemetry.metrics import (
    BoundedNames,
    Histogram,
    Labels,
    Metric,
    MetricFamily,
    Values,
    gauge,
)
from gpu_manager import metrics
from gpu_manager.node.residents import HostGpu
from gpu_manager.runtimes.runtime import LoadPhases, MergedSums, hidden_s
from gpu_manager.weights.store import StoreStatus

_MOST_NAMES = 1_000
# The metrics of models that did not run for one to two of these periods are removed.
_FORGET_S = 86_400.0


class NodeMeters:
    """Counters of one node; a bounded number of models have separate metrics."""

    def __init__(self, gpus: Iterable[str] = ()) -> None:
        self._models = BoundedNames(_MOST_NAMES)
        self._swept_s = time.monotonic()
        self._started = gauge(metrics.STARTED, [((), time.time())])
        self._values = {metric: Values(metric) for metric in metrics.COUNTERS}
        self._load = Histogram(metrics.LOAD)
        for gpu in gpus:  # Prometheus detects an increase only of a series that exists
            for metric in metrics.COUNTERS:
                if metric.labels == ("gpu",):
                    self.count(metric, gpu, by=0.0)
            for fatal in ("true", "false"):
                self.count(metrics.HEALTH, gpu, fatal, by=0.0)

    def count(self, metric: Metric, *labels: str, by: float = 1.0) -> None:
        self._values[metric].add(labels, by)

    def ran(self, gpu: str, model: str, calls: int, run_s: float) -> None:
        """Count calls that have ended, which took `run_s` each."""
        self.count(metrics.RUNS, gpu, by=calls)
        self.count(metrics.RUN, gpu, by=calls * run_s)
        name = self._models.of(model)
        self.count(metrics.MODEL_RUNS, name, by=calls)
        self.count(metrics.MODEL_RUN, name, by=calls * run_s)

    def merged(self, gpu: str, added: MergedSums) -> None:
        """Count calls that waited together, and what became of them."""
        self.count(metrics.MERGED_GROUPS, gpu, by=added.groups)
        self.count(metrics.MERGED_CALLS, gpu, by=added.calls)
        self.count(metrics.COMPARED_CALLS, gpu, by=added.compared)
        for reason, calls in added.singly.items():
            self.count(metrics.SINGLE_CALLS, gpu, reason, by=calls)

    def loaded(self, source: str, load_s: float, phases: LoadPhases) -> None:
        self._load.add((source,), load_s)
        for phase, phase_s in phases.took_s().items():
            self.count(metrics.LOAD_PHASES, phase, by=phase_s)
        self.count(metrics.LOAD_HIDDEN, by=hidden_s(phases.spans))

    def families(self) -> Iterator[MetricFamily]:
        if time.monotonic() - self._swept_s > _FORGET_S:
            self.sweep()
        yield self._started
        yield from self._values.values()
        yield self._load

    def sweep(self) -> None:
        """Remove the metrics of models that did not run since the last call."""
        self._swept_s = time.monotonic()
        for model in self._models.sweep():
            for metric in (metrics.MODEL_RUNS, metrics.MODEL_RUN):
                self._values[metric].forget("model", model)


def of_gpus(gpus: Iterable[HostGpu]) -> Iterator[MetricFamily]:
    """Yield gauges of the GPUs' memory and health; NVML's are missing for emulated GPUs."""
    gpus = list(gpus)
    yield gauge(metrics.MEMORY, [value for gpu in gpus for value in _ledger(gpu)])
    yield gauge(metrics.MODELS, [((gpu.id,), len(gpu.residents)) for gpu in gpus])
    stuck = [((gpu.id,), float(len(gpu.stuck_loads()))) for gpu in gpus]
    yield gauge(metrics.STUCK_LOADS, stuck)
    yield gauge(metrics.LOST, [((gpu.id,), float(gpu.lost)) for gpu in gpus])
    yield gauge(metrics.DEVICE_MEMORY, [((gpu.id,), gpu.device.device_bytes) for gpu in gpus])
    used, drift, busy = map(Values, (metrics.DEVICE_USED, metrics.DRIFT, metrics.UTILISATION))
    for gpu in gpus:
        used_bytes, utilisation = gpu.device.used_bytes(), gpu.device.utilisation()
        if used_bytes is not None:
            used.put((gpu.id,), used_bytes)
            drift.put((gpu.id,), used_bytes - gpu.ledger.granted_bytes)
        if utilisation is not None:
            busy.put((gpu.id,), utilisation)
    yield from (used, drift, busy)
    yield gauge(metrics.WORKER_MEMORY, [value for gpu in gpus for value in _workers(gpu)])


def _workers(gpu: HostGpu) -> list[tuple[Labels, float]]:
    uses = gpu.uses
    if uses is None:
        return []
    return [
        ((gpu.id, "measured"), sum(use.measured_bytes for use in uses)),
        ((gpu.id, "granted"), sum(use.granted_bytes for use in uses)),
        ((gpu.id, "over"), sum(use.over_bytes for use in uses)),
    ]


def _ledger(gpu: HostGpu) -> list[tuple[Labels, float]]:
    ledger = gpu.ledger
    withheld_bytes = ledger.capacity_bytes - ledger.granted_bytes - ledger.free_bytes
    return [
        ((gpu.id, "capacity"), ledger.capacity_bytes),
        ((gpu.id, "granted"), ledger.granted_bytes),
        ((gpu.id, "withheld"), withheld_bytes),
        ((gpu.id, "free"), ledger.free_bytes),
    ]


def of_weights(status: StoreStatus) -> Iterator[MetricFamily]:
    kinds: list[tuple[Labels, float]] = [
        (("memory",), status.kept_bytes),
        (("lingering",), status.lingering_bytes),
        (("reserved",), status.reserved_bytes),
        (("disk",), status.disk_bytes),
    ]
    yield gauge(metrics.WEIGHTS, kinds)
    yield gauge(metrics.WEIGHTS_BUDGET, [((), status.budget_bytes)])
    yield gauge(metrics.WEIGHTS_EVICTED, [((), status.evicted)])
