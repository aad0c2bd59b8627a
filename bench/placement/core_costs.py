"""The measurements: cost of a placement by size, memory of a waiting request, simulated speed."""

import gc
import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter
from typing import TypeVar

from bench.placement.full_cluster import ClusterSize, SteadyOverload
from scheduler.composition import make_core
from scheduler.sim import workload
from scheduler.sim.engine import Engine
from scheduler.sim.model_catalogue import Hardware
from scheduler.sim.workload import Arrivals, Pattern
from tests.kit.cores.naive_scheduler import NaiveScheduler

SIZES = (
    ClusterSize(12, 100, 35),
    ClusterSize(100, 1_000, 100),
    ClusterSize(1_000, 10_000, 500),
    ClusterSize(1_000, 100_000, 2_000),
    ClusterSize(10_000, 1_000_000, 5_000),
)
NAIVE_SIZES = SIZES[:3]
REPEATS = 3
_PLACEMENTS = 20_000
_NAIVE_PLACEMENTS = 300

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one placement at one size: the median run's median and 99th percentile."""

    policy: str
    size: ClusterSize
    median_us: float
    p99_us: float


def placement_costs(names: tuple[str, ...], sizes: tuple[ClusterSize, ...]) -> Iterator[Cost]:
    """Every policy at every size, each in a process of its own."""
    for name in names:
        for size in sizes:
            yield _apart(partial(_cost, name, size))


def naive_costs(names: tuple[str, ...], sizes: tuple[ClusterSize, ...]) -> Iterator[Cost]:
    """The same for the naive version that the tests hold the core against."""
    for name in names:
        for size in sizes:
            yield _apart(partial(_naive_cost, name, size))


def bytes_a_waiting_request(name: str, waiting: int) -> float:
    """The memory by which the process grows with each waiting request."""
    return _apart(partial(_bytes, name, waiting))


def simulated_requests_a_second(name: str) -> float:
    """The simulator's speed with one policy, for an hour of the thesis's workload on 12 GPUs."""
    return _apart(partial(_simulated, name))


def _apart(measurement: Callable[[], Answer]) -> Answer:
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(measurement)


def _cost(name: str, size: ClusterSize) -> Cost:
    return _timed(SteadyOverload(make_core(name), size), name, size, _PLACEMENTS)


def _naive_cost(name: str, size: ClusterSize) -> Cost:
    return _timed(SteadyOverload(NaiveScheduler(name), size), name, size, _NAIVE_PLACEMENTS)


def _timed(steady: SteadyOverload, name: str, size: ClusterSize, placements: int) -> Cost:
    gc.collect()
    gc.freeze()
    runs = []
    for _ in range(REPEATS):
        steady.samples_ns.clear()
        steady.run(steady.placements + placements)
        runs.append((median(steady.samples_ns), quantiles(steady.samples_ns, n=100)[98]))
    medians, p99s = zip(*runs, strict=True)
    return Cost(name, size, median(medians) / 1000, median(p99s) / 1000)


def _bytes(name: str, waiting: int) -> float:
    SteadyOverload(make_core(name), ClusterSize(1_000, 1_000, 5_000))
    before = _resident_bytes()
    core = make_core(name)
    SteadyOverload(core, ClusterSize(1_000, waiting, 5_000))
    return (_resident_bytes() - before) / len(core.requests)


def _resident_bytes() -> int:
    gc.collect()
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * resource.getpagesize()


def _simulated(name: str) -> float:
    load = workload.thesis(35, 325, 60, Pattern(Arrivals.POISSON), seed=1)
    runs = []
    for _ in range(REPEATS):
        engine = Engine(make_core(name), Hardware(), load)
        began_s = perf_counter()
        engine.run()
        runs.append(len(load.arrivals) / (perf_counter() - began_s))
    return median(runs)
