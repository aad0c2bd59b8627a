"""A GPU manager's counters for Prometheus, and the gauges computed when Prometheus reads."""

import time
from collections.abc import Iterable, Iterator

from common.telemetry.metrics import BoundedNames, Histogram, Labels, MetricFamily, Values, gauge
from gpu_manager import metrics
from gpu_manager.node.leases import EndReason
from gpu_manager.node.residents import HostGpu
from gpu_manager.runtimes.runtime import LoadPhases, MergedSums, hidden_s
from gpu_manager.weights.store import StoreStatus

MOST_NAMES = 1_000
# The metrics of models that did not run for one to two of these periods are removed.
_FORGET_S = 86_400.0


class NodeMeters:
    """Counters of one node; at most `most_names` models have separate metrics."""

    def __init__(self, gpus: Iterable[str] = (), most_names: int = MOST_NAMES) -> None:
        self._models = BoundedNames(most_names)
        self._swept_s = time.monotonic()
        self._started = gauge(metrics.STARTED, [((), time.time())])
        self._leases_ended = Values(metrics.LEASES_ENDED)
        self._health = Values(metrics.HEALTH)
        self._pressure = Values(metrics.PRESSURE)
        self._load = Histogram(metrics.LOAD)
        self._phases = Values(metrics.LOAD_PHASES)
        self._hidden = Values(metrics.LOAD_HIDDEN)
        self._load_failures = Values(metrics.LOAD_FAILURES)
        self._runs = Values(metrics.RUNS)
        self._run = Values(metrics.RUN)
        self._model_runs = Values(metrics.MODEL_RUNS)
        self._model_run = Values(metrics.MODEL_RUN)
        self._merged_groups = Values(metrics.MERGED_GROUPS)
        self._merged = Values(metrics.MERGED_CALLS)
        self._compared = Values(metrics.COMPARED_CALLS)
        self._singly = Values(metrics.SINGLE_CALLS)
        self._died = Values(metrics.WORKERS_DIED)
        for gpu in gpus:  # Prometheus detects an increase only of a series that exists
            for each in (
                *(self._pressure, self._load_failures, self._died, self._runs, self._run),
                *(self._merged_groups, self._merged, self._compared),
            ):
                each.put((gpu,), 0.0)
            for fatal in (True, False):
                self._health.put((gpu, str(fatal).lower()), 0.0)

    def ran(self, gpu: str, model: str, calls: int, run_s: float) -> None:
        """Count calls that have ended, which took `run_s` each."""
        self._runs.add((gpu,), calls)
        self._run.add((gpu,), calls * run_s)
        name = (self._models.of(model),)
        self._model_runs.add(name, calls)
        self._model_run.add(name, calls * run_s)

    def merged(self, gpu: str, added: MergedSums) -> None:
        """Count calls that waited together, and what became of them."""
        self._merged_groups.add((gpu,), added.groups)
        self._merged.add((gpu,), added.calls)
        self._compared.add((gpu,), added.compared)
        for reason, calls in added.singly.items():
            self._singly.add((gpu, reason), calls)

    def loaded(self, source: str, load_s: float, phases: LoadPhases) -> None:
        self._load.add((source,), load_s)
        for phase, phase_s in phases.took_s().items():
            self._phases.add((phase,), phase_s)
        self._hidden.add((), hidden_s(phases.spans))

    def load_failed(self, gpu: str) -> None:
        self._load_failures.add((gpu,))

    def lease_ended(self, why: EndReason | None) -> None:
        self._leases_ended.add(("unknown" if why is None else why.name.lower(),))

    def memory_pressure(self, gpu: str) -> None:
        self._pressure.add((gpu,))

    def died(self, gpu: str) -> None:
        self._died.add((gpu,))

    def health_event(self, gpu: str, *, fatal: bool) -> None:
        self._health.add((gpu, str(fatal).lower()))

    def families(self) -> Iterator[MetricFamily]:
        if time.monotonic() - self._swept_s > _FORGET_S:
            self.sweep()
        yield from (sums for sums in vars(self).values() if isinstance(sums, Values | Histogram))

    def sweep(self) -> None:
        """Remove the metrics of models that did not run since the last call."""
        self._swept_s = time.monotonic()
        for model in self._models.sweep():
            self._model_runs.forget("model", model)
            self._model_run.forget("model", model)


def of_gpus(gpus: Iterable[HostGpu]) -> Iterator[MetricFamily]:
    """Yield gauges of the GPUs' memory and health; NVML's are missing for emulated GPUs."""
    gpus = list(gpus)
    yield gauge(metrics.MEMORY, [value for gpu in gpus for value in _ledger(gpu)])
    yield gauge(metrics.MODELS, [((gpu.id,), len(gpu.residents)) for gpu in gpus])
    stuck = [((gpu.id,), float(len(gpu.stuck_loads()))) for gpu in gpus]
    yield gauge(metrics.STUCK_LOADS, stuck)
    yield gauge(metrics.LOST, [((gpu.id,), float(gpu.lost)) for gpu in gpus])
    device, used, drift, busy = (
        Values(metric)
        for metric in (
            metrics.DEVICE_MEMORY,
            metrics.DEVICE_USED,
            metrics.DRIFT,
            metrics.UTILISATION,
        )
    )
    for gpu in gpus:
        used_bytes, utilisation = gpu.device.used_bytes(), gpu.device.utilisation()
        device.put((gpu.id,), gpu.device.device_bytes)
        if used_bytes is not None:
            used.put((gpu.id,), used_bytes)
            drift.put((gpu.id,), used_bytes - gpu.ledger.granted_bytes)
        if utilisation is not None:
            busy.put((gpu.id,), utilisation)
    yield from (device, used, drift, busy)
    yield gauge(metrics.WORKER_MEMORY, [value for gpu in gpus for value in _workers(gpu)])
    yield from _transfers(gpus)


def _transfers(gpus: Iterable[HostGpu]) -> tuple[Values, Values]:
    moved, waited = Values(metrics.TRANSFERRED), Values(metrics.TRANSFER_WAIT)
    for gpu in gpus:
        if gpu.paths.gates is None:
            continue
        for direction, rank, sums in gpu.paths.moved():
            labels = (gpu.id, direction.value, rank.name.lower())
            moved.put(labels, sums.size_bytes)
            waited.put(labels, sums.waited_s)
    return moved, waited


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
    yield gauge(metrics.WEIGHTS_EVICTED, [((), status.counts.evicted)])
