"""The metrics page of a scheduler: its counters, and gauges of its present state."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from common.telemetry.metrics import BoundedNames, Labels, Metric, MetricFamily, Values, gauge, page
from common.telemetry.traces import NO_COUNTS, Sink
from scheduler.service.metrics import declared
from scheduler.service.metrics.counters import SchedulerCounters
from scheduler.service.terms import OwnerRow
from scheduler.wire.cluster_status import GpuStatus, Status

Own = Callable[[], Mapping[str, float]]


class MetricsPage:
    """Answers a scrape; a standby shows only the metrics of its own process.

    `own` has the values of metrics without labels, by name, `owners` as many owners as may have
    metrics of their own.
    """

    def __init__(
        self,
        meters: SchedulerCounters,
        status: Callable[[], Status | None],
        own: Own,
        owners: Callable[[], Sequence[OwnerRow]],
        sink: Sink | None = None,
    ) -> None:
        self._sink = sink
        self._owners = owners
        self._meters = meters
        self._status = status
        self._own = own

    def text(self) -> bytes:
        return page(self._families())

    def _families(self) -> Iterator[MetricFamily]:
        own = self._own()
        for metric in _OWN:
            yield gauge(metric, [((), own[metric.name])])
        yield gauge(declared.STARTED, [((), self._meters.started_unix_s)])
        span_counts = NO_COUNTS if self._sink is None else self._sink.counts()
        yield gauge(declared.TRACE_SPANS, [((name,), count) for name, count in span_counts.items()])
        yield from self._meters.families()
        status = self._status()
        if status is not None:
            yield from _counts(status)
            yield from _cluster(status)
            yield from _gpus(status)
            yield from _copies(status, self._meters.models)
            yield from owner_families(self._owners())


_OWN = (
    declared.LEADING,
    declared.TERM,
    declared.CONFIRMED,
    declared.STORE_BEHIND,
    declared.STORE_HEALTHY,
    declared.STORE_UNWRITTEN,
)


def _counts(status: Status) -> Iterator[Values]:
    counts = status.counts
    results: list[tuple[Labels, float]] = [(("hit",), counts.hits), (("miss",), counts.misses)]
    yield gauge(declared.PLACEMENTS, results)
    finished = counts.finished.items()
    yield gauge(declared.ENDED, [((outcome,), count) for outcome, count in finished])
    yield gauge(declared.EVICTIONS, [((), counts.evictions)])
    yield gauge(declared.PREFETCHES, [((), counts.prefetches)])
    yield gauge(declared.REFUSALS, [((), counts.refusals)])


def _cluster(status: Status) -> Iterator[Values]:
    waiting: list[tuple[Labels, float]] = [
        (("global",), status.waiting),
        (("local",), status.waiting_locally),
    ]
    yield gauge(declared.WAITING, waiting)
    yield gauge(declared.POLICY, [((status.policy,), 1)])
    yield gauge(declared.NODES, [((), len(status.nodes))])
    yield gauge(declared.GPUS, [((), len(status.gpus))])


def _gpus(status: Status) -> Iterator[Values]:
    yield gauge(declared.MEMORY, [value for gpu in status.gpus for value in _memory(gpu)])
    ages = [((gpu.id,), status.now_s - gpu.residents[0].used_s) for gpu in _holding(status)]
    yield gauge(declared.LRU_AGE, ages)
    for metric, number in _NUMBERS.items():
        yield gauge(metric, [((gpu.id,), number(gpu)) for gpu in status.gpus])


def _memory(gpu: GpuStatus) -> list[tuple[Labels, float]]:
    return [
        ((gpu.id, "total"), gpu.memory_bytes),
        ((gpu.id, "used"), gpu.used_bytes),
        ((gpu.id, "withheld"), gpu.withheld_bytes),
    ]


def _holding(status: Status) -> list[GpuStatus]:
    return [gpu for gpu in status.gpus if gpu.residents]


_NUMBERS: Mapping[Metric, Callable[[GpuStatus], float]] = {
    declared.RESIDENTS: lambda gpu: len(gpu.residents),
    declared.GPU_SLOTS: lambda gpu: sum(slot.capacity for slot in gpu.slots),
    declared.GPU_LEASES: lambda gpu: sum(len(slot.leases) for slot in gpu.slots),
    declared.GPU_WAITING: lambda gpu: sum(len(slot.queue) for slot in gpu.slots),
    declared.SILENT: lambda gpu: float(gpu.silent),
    declared.DRAINING: lambda gpu: float(gpu.draining),
}


def _copies(status: Status, names: BoundedNames) -> Iterator[Values]:
    """On how many GPUs each model is; a copy beyond the first is a duplicate."""
    copies: dict[str, int] = {}
    duplicates = duplicate_bytes = 0
    for gpu in status.gpus:
        for resident in gpu.residents:
            copies[resident.model] = copies.get(resident.model, 0) + 1
            if copies[resident.model] > 1:
                duplicates += 1
                duplicate_bytes += resident.memory_bytes
    yield gauge(declared.COPIES, [((names.of(model),), n) for model, n in copies.items()])
    yield gauge(declared.DUPLICATES, [((), duplicates)])
    yield gauge(declared.DUPLICATE_BYTES, [((), duplicate_bytes)])


def owner_families(owners: Sequence[OwnerRow]) -> Iterator[Values]:
    used, limits, refused = [], [], []
    for row in owners:
        for quota, (term, amount) in _quotas(row).items():
            used.append(((row.owner, quota), amount))
            if term is not None:
                limits.append(((row.owner, quota), float(term)))
        refused += [((row.owner, quota), float(n)) for quota, n in row.use.refused.items()]
    yield gauge(declared.OWNER_USED, used)
    yield gauge(declared.OWNER_LIMIT, limits)
    yield gauge(declared.OWNER_REFUSED, refused)
    weights = [((row.owner,), row.terms.weight) for row in owners]
    yield gauge(declared.OWNER_WEIGHT, weights)
    held_back = [((row.owner,), row.use.held_back) for row in owners]
    yield gauge(declared.OWNER_HELD_BACK, held_back)


def _quotas(row: OwnerRow) -> Mapping[str, tuple[float | None, float]]:
    """The limit and the use of each quota."""
    terms, use = row.terms, row.use
    return {
        "gpu_seconds": (terms.gpu_s, use.gpu_s),
        "resident_bytes": (terms.resident_bytes, use.resident_bytes),
        "leases": (terms.leases, use.leases),
        "waiting": (terms.waiting, use.waiting),
    }
