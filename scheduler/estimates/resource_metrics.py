"""What a model uses of a GPU while it runs alone: the 13 metrics of Kim and Kim (2020)."""

from collections.abc import Mapping, Sequence
from math import isfinite

# Their names in a profile's features, in the paper's order (its Table III).
METRICS = (
    "gpu_utilization",  # share of the time that any kernel runs
    "sm_efficiency",  # share of the time that a multiprocessor has a warp
    "warp_efficiency",  # share of a warp's threads that are active
    "ipc",  # instructions a cycle
    "occupancy",  # active warps over those that fit
    "memory_used_max",  # bytes
    "memory_used_average",  # bytes
    "memory_utilization",  # share of the time that memory is read or written
    "device_to_host",  # bytes a second
    "host_to_device",  # bytes a second
    "global_load",  # bytes a second through the caches
    "global_store",  # bytes a second through the caches
    "execution_time",  # seconds
)

Metrics = tuple[float, ...]  # one number for each of METRICS


def metrics_of(features: Mapping[str, float]) -> Metrics | None:
    """A profile's metrics in their order; None unless all are there, finite and not negative."""
    metrics = tuple([features.get(name, -1.0) for name in METRICS])
    return metrics if all(isfinite(value) and value >= 0 for value in metrics) else None


def scaled(metrics: Metrics, part: float) -> Metrics:
    """The metrics of what runs for a part of the time."""
    return tuple([part * value for value in metrics])


def mean_of(several: Sequence[Metrics]) -> Metrics:
    """The metrics of models that run one after the other, each as long."""
    if len(several) == 1:
        return several[0]
    return tuple([sum(values) / len(several) for values in zip(*several, strict=True)])
