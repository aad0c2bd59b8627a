"""The measurements: cost of a placement by size, memory of a waiting request, simulated speed."""

import gc
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter

from bench.steady import Size, Steady
from scheduler.core import make_core
from scheduler.sim import workload
from scheduler.sim.engine import Engine, Hardware
from scheduler.sim.workload import Arrivals, Pattern

SIZES = (
    Size(12, 100, 35),
    Size(100, 1_000, 100),
    Size(1_000, 10_000, 500),
    Size(1_000, 100_000, 2_000),
    Size(10_000, 1_000_000, 5_000),
)
_PLACEMENTS = 20_000
_REPEATS = 3


@dataclass(frozen=True, slots=True)
class Cost:
    """What one placement costs at one size."""

    policy: str
    size: Size
    median_us: float
    p99_us: float
    placements: int


def placement_costs(sizes: tuple[Size, ...], names: tuple[str, ...]) -> Iterator[Cost]:
    """Every policy at every size, each in a process of its own, the median of several runs."""
    for name in names:
        for size in sizes:
            yield _in_own_process(name, size)


def _in_own_process(name: str, size: Size) -> Cost:
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(_cost, (name, size))


def _cost(name: str, size: Size) -> Cost:
    steady = Steady(name, size)
    gc.collect()
    gc.freeze()
    runs = []
    for _ in range(_REPEATS):
        steady.samples_ns.clear()
        steady.run(steady.placements + _PLACEMENTS)
        runs.append((median(steady.samples_ns), quantiles(steady.samples_ns, n=100)[98]))
    return Cost(
        name,
        size,
        median(run[0] for run in runs) / 1000,
        median(run[1] for run in runs) / 1000,
        _REPEATS * _PLACEMENTS,
    )


def bytes_a_waiting_request(name: str, waiting: int) -> float:
    """Memory that grows with each waiting request, everything the core keeps for it included."""
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(_bytes, (name, waiting))


def _bytes(name: str, waiting: int) -> float:
    """The process's growth beside that of an empty queue; tracemalloc would count less."""
    Steady(name, Size(1_000, 1_000, 5_000))
    before = _resident_bytes()
    steady = Steady(name, Size(1_000, waiting, 5_000))
    return (_resident_bytes() - before) / len(steady.core.requests)


def _resident_bytes() -> int:
    gc.collect()
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * resource.getpagesize()


def simulated_requests_a_second(name: str, minutes: int = 60) -> float:
    """How fast the simulator runs one policy at 12 GPUs; the best of several runs."""
    load = workload.thesis(35, 325, minutes, Pattern(Arrivals.POISSON), seed=1)
    best_s = float("inf")
    for _ in range(_REPEATS):
        engine = Engine(make_core(name), Hardware(), load)
        began_s = perf_counter()
        engine.run()
        best_s = min(best_s, perf_counter() - began_s)
    return len(load.arrivals) / best_s
