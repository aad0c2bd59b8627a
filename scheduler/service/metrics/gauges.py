"""The metrics page of a scheduler: its counters, and gauges of its present state."""

from collections.abc import Callable, Iterable, Iterator, Mapping

from common.telemetry.metrics import BoundedNames, Labels, Metric, MetricFamily, Values, gauge, page
from scheduler.service.metrics import declared
from scheduler.service.metrics.counting import SchedulerCounters
from scheduler.wire.cluster_status import GpuStatus, Status


def metrics_page(
    own: Mapping[Metric, float],
    spans: Mapping[str, int],
    meters: SchedulerCounters,
    status: Status | None,
    of_features: Iterable[MetricFamily],
) -> bytes:
    """The answer to a scrape; a standby, without a status, shows only its own process.

    `own` has the values of metrics without labels.
    """
    families: list[MetricFamily] = [
        *_plain(own),
        gauge(declared.TRACE_SPANS, [((name,), count) for name, count in spans.items()]),
        *meters.families(),
    ]
    if status is not None:
        families += _decisions(status)
        families += _gpus(status)
        families += _copies(status, meters.models)
        families += of_features
    return page(families)


def _plain(values: Mapping[Metric, float]) -> Iterator[Values]:
    return (gauge(metric, [((), value)]) for metric, value in values.items())


def _decisions(status: Status) -> Iterator[Values]:
    counts = status.counts
    labelled: Mapping[Metric, Mapping[str, float]] = {
        declared.PLACEMENTS: {"hit": counts.hits, "miss": counts.misses},
        declared.ENDED: {outcome.value: count for outcome, count in counts.finished.items()},
        declared.WAITING: {"global": status.waiting, "local": status.waiting_locally},
        declared.POLICY: {status.policy: 1},
    }
    for metric, values in labelled.items():
        yield gauge(metric, [((label,), value) for label, value in values.items()])
    yield from _plain(
        {
            declared.EVICTIONS: counts.evictions,
            declared.PREFETCHES: counts.prefetches,
            declared.REFUSALS: counts.refusals,
            declared.NODES: len(status.nodes),
            declared.GPUS: len(status.gpus),
        }
    )


def _gpus(status: Status) -> Iterator[Values]:
    memory: list[tuple[Labels, float]] = []
    for gpu in status.gpus:
        memory.append(((gpu.id, "total"), gpu.memory_bytes))
        memory.append(((gpu.id, "used"), gpu.used_bytes))
        memory.append(((gpu.id, "withheld"), gpu.withheld_bytes))
    yield gauge(declared.MEMORY, memory)
    holding = [gpu for gpu in status.gpus if gpu.residents]
    ages = [((gpu.id,), status.now_s - gpu.residents[0].used_s) for gpu in holding]
    yield gauge(declared.LRU_AGE, ages)
    for metric, number in _NUMBERS.items():
        yield gauge(metric, [((gpu.id,), number(gpu)) for gpu in status.gpus])


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
    yield from _plain({declared.DUPLICATES: duplicates, declared.DUPLICATE_BYTES: duplicate_bytes})
