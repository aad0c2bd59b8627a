"""SAGE's experiments as simulations: its systems under one setting, at peak, and call by call."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from random import Random
from statistics import fmean

from cache_manager.model.ids import Tier
from research.sage.gpu_functions import Assumptions, GpuFunction, copies, ten_functions
from research.sage.gpu_systems import (
    DGSF,
    FIXED_GSL,
    FIXED_GSL_F,
    SAGE,
    CallTimes,
    GpuSystem,
    NodeRun,
    run_node,
)
from research.sage.node_figures import SystemFigures, figures
from scheduler.sim.workload import CARRIED, MINUTE_S, Window, apportion, most_used, read

# The function that makes 63 % of all calls of the trace; nine others beside it would be noise.
_WITHOUT_TOP = 1


@dataclass(frozen=True, slots=True)
class TraceLoad:
    """The most used functions of a window, scaled to so many calls a second of all together.

    With `even`, each function has as many calls as every other, when its row has them; without,
    they differ as the rows do, the first function being called most; `turned` moves so many rows
    from the front to the back.
    """

    calls_a_second: float
    functions: int = 10
    minutes: int = 120
    start_minute: int = 0
    even: bool = True
    turned: int = 0

    @property
    def period_s(self) -> float:
        return self.minutes * MINUTE_S

    def times(self, seed: int = 1) -> CallTimes:
        """When which function is called, in order; at random within each minute."""
        random = Random(seed)
        window = Window(self.start_minute, self.minutes, self.functions, _WITHOUT_TOP)
        used = most_used(read(CARRIED), window)
        rows = used[self.turned :] + used[: self.turned]
        total = round(self.calls_a_second * self.period_s)
        weights = [1.0 if self.even else float(sum(row)) for row in rows]
        found = [
            ((minute + random.random()) * MINUTE_S, number)
            for number, (row, calls) in enumerate(zip(rows, apportion(weights, total), strict=True))
            for minute, many in enumerate(apportion([float(count) for count in row], calls))
            for _ in range(many)
        ]
        return sorted(found)


def poisson_times(calls_a_second: float, seconds: float, seed: int = 1) -> CallTimes:
    """Calls of one function, open loop."""
    random = Random(seed)
    now, found = random.expovariate(calls_a_second), []
    while now < seconds:
        found.append((now, 0))
        now += random.expovariate(calls_a_second)
    return found


THE_FOUR = (FIXED_GSL, FIXED_GSL_F, DGSF, SAGE)
_PEAK_PERIOD_S = 60.0
_PEAK_STEPS_OF_THEORY = 64
# A system keeps up when this share of the calls has ended by the end of the period.
_KEEPS_UP = 0.97
# One call in each stage of the exit, 30 s a stage, from cold to cold again: Table 4's columns.
STATES = {
    "cold": Tier.ABSENT,
    "stage 1": Tier.GPU,
    "stage 2": Tier.CONTEXT,
    "stage 3": Tier.HOST,
    "stage 4": Tier.DISK,
}
_CALLS_OF_TABLE4_S = (0.0, 15.0, 60.0, 140.0, 250.0)


@dataclass(frozen=True, slots=True)
class SageSetting:
    """All that SAGE leaves open.

    `load` is the calls' computing over what the GPU's cores can compute: at 1 they are never idle.
    """

    load: float
    assumed: Assumptions = field(default_factory=Assumptions)
    even: bool = True
    turned: int = 0
    minutes: int = 120
    seed: int = 1
    copies: int = 1
    gpus: int = 1

    def functions(self) -> tuple[GpuFunction, ...]:
        ten = ten_functions(self.assumed)
        return copies(ten, self.copies) if self.copies > 1 else ten

    def trace(self) -> TraceLoad:
        """The calls of all nodes together."""
        functions = self.functions()
        rate = self.gpus * self.load / fmean(each.compute_s for each in functions)
        return TraceLoad(rate, len(functions), self.minutes, 0, even=self.even, turned=self.turned)


# Nearest to SAGE's printed figures among the settings that the page lists.
CHOSEN = SageSetting(load=1.0, assumed=Assumptions(request_ms=34.0, contention=0.16))


def compare(
    setting: SageSetting, systems: Sequence[GpuSystem] = THE_FOUR
) -> Mapping[str, SystemFigures]:
    """These systems with the same calls, each node's at random among the calls."""
    functions, trace = setting.functions(), setting.trace()
    by_node = _dispatched(trace.times(setting.seed), setting)
    return {
        system.name: figures(
            [run_node(system, functions, t, setting.assumed, trace.period_s) for t in by_node],
            trace.period_s,
        )
        for system in systems
    }


@dataclass(frozen=True, slots=True)
class PeakFigures:
    """One function alone, called more and more often, until a system no longer keeps up.

    `of_theory`: the most calls that it keeps up with, over those that the cores could compute.
    `setup`: the set-up of these over that of a call alone under FixedGSL. `loading`: the time on
    the data paths over that of a call alone, when calls come as often as the cores could compute.
    """

    name: str
    of_theory: float
    setup: float
    loading: float


def peaks(system: GpuSystem, assumed: Assumptions) -> list[PeakFigures]:
    """Section 3.2.2 and 7.3: each of the ten functions at peak."""
    return [_peak(system, each, assumed) for each in ten_functions(assumed)]


def calls_of_table4(name: str = "resnet50") -> Mapping[str, float]:
    """The seconds from arrival to result of one call in each state of Table 4, simulated."""
    assumed = Assumptions()
    (function,) = (each for each in ten_functions(assumed) if each.name == name)
    alone = run_node(FIXED_GSL, [function], [(0.0, 0)], assumed)
    times = [(at_s, 0) for at_s in _CALLS_OF_TABLE4_S]
    staged = {
        call.found: call.ended_s - call.arrived_s
        for call in run_node(SAGE, [function], times, assumed).ended
    }
    baseline = {"baseline": alone.ended[0].ended_s}
    return baseline | {state: staged[stage] for state, stage in STATES.items()}


def parallel_setup_saves(assumed: Assumptions) -> float:
    """Section 7.5: the share of a cold set-up that SAGE saves, on average over the functions."""
    ten = ten_functions(assumed)
    return fmean(1.0 - each.parallel_setup_s / each.serial_setup_s for each in ten)


def _peak(system: GpuSystem, function: GpuFunction, assumed: Assumptions) -> PeakFigures:
    shares = [step / _PEAK_STEPS_OF_THEORY for step in range(1, _PEAK_STEPS_OF_THEORY + 1)]
    low, high = 0, len(shares)
    while low < high:
        middle = (low + high) // 2
        run = _at_share(system, function, assumed, shares[middle])
        if len(run.ended) >= _KEEPS_UP * run.arrived:
            low = middle + 1
        else:
            high = middle
    kept_up = shares[max(low - 1, 0)]
    at_peak = _at_share(system, function, assumed, kept_up).ended
    overloaded = _at_share(system, function, assumed, 1.0).ended
    return PeakFigures(
        function.name,
        kept_up if low else 0.0,
        _mean(call.computes_s - call.began_s for call in at_peak) / function.serial_setup_s,
        _mean(call.loading_s / call.solo_loading_s for call in overloaded),
    )


def _at_share(
    system: GpuSystem, function: GpuFunction, assumed: Assumptions, share: float
) -> NodeRun:
    times = poisson_times(share / function.compute_s, _PEAK_PERIOD_S)
    return run_node(system, [function], times, assumed, _PEAK_PERIOD_S)


def _mean(found: Iterable[float]) -> float:
    """The mean; infinite where nothing came to an end."""
    values = list(found)
    return fmean(values) if values else inf


def _dispatched(times: CallTimes, setting: SageSetting) -> list[CallTimes]:
    if setting.gpus == 1:
        return [times]
    random = Random(setting.seed)
    nodes: list[list[tuple[float, int]]] = [[] for _ in range(setting.gpus)]
    for call in times:
        nodes[random.randrange(setting.gpus)].append(call)
    return [list(node) for node in nodes]
