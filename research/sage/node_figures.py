"""Figures of runs: latencies by function, throughput and memory, and their ratios to SAGE's."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from cache_manager.model.ids import Tier
from research.sage.gpu_systems import NodeRun


@dataclass(frozen=True, slots=True)
class FunctionLatency:
    """One function's latencies in one run."""

    mean_s: float
    p99_s: float


@dataclass(frozen=True, slots=True)
class SystemFigures:
    """One system under one load; of its calls, those that ended within the period.

    `cold_share`: of the calls, those that found neither context nor weights on the GPU.
    """

    latencies: dict[str, FunctionLatency]
    of_calls: FunctionLatency
    throughput: float
    arrived: float
    memory_mb: float
    cold_share: float

    @property
    def mean_s(self) -> float:
        return fmean(each.mean_s for each in self.latencies.values())


@dataclass(frozen=True, slots=True)
class RatiosToSage:
    """How often SAGE's figure goes into a system's (latency), or it into SAGE's (throughput)."""

    mean: float
    least: float
    p99: float
    throughput: float
    memory_percent: float


def figures(runs: Sequence[NodeRun], period_s: float) -> SystemFigures:
    """The figures of all nodes together."""
    by_function: dict[str, list[float]] = defaultdict(list)
    cold = 0
    for call in (call for run in runs for call in run.ended):
        by_function[call.function.name].append(call.ended_s - call.arrived_s)
        cold += call.found >= Tier.HOST
    ended = sum(len(run.ended) for run in runs)
    return SystemFigures(
        {name: _latency(found) for name, found in sorted(by_function.items())},
        _latency([each for found in by_function.values() for each in found]),
        throughput=ended / period_s,
        arrived=sum(run.arrived for run in runs) / period_s,
        memory_mb=fmean(run.memory_mb for run in runs),
        cold_share=cold / ended if ended else 0.0,
    )


def ratios(other: SystemFigures, sage: SystemFigures) -> RatiosToSage:
    """SAGE beside another system, function by function, as its section 7 does it."""
    both = [name for name in sage.latencies if name in other.latencies]
    means = [other.latencies[name].mean_s / sage.latencies[name].mean_s for name in both]
    return RatiosToSage(
        mean=fmean(means),
        least=min(means),
        p99=fmean(other.latencies[name].p99_s / sage.latencies[name].p99_s for name in both),
        throughput=sage.throughput / other.throughput,
        memory_percent=100.0 * sage.memory_mb / other.memory_mb,
    )


def _latency(found: list[float]) -> FunctionLatency:
    found.sort()
    return FunctionLatency(fmean(found), found[min(len(found) - 1, int(0.99 * len(found)))])
