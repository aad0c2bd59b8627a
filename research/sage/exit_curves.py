"""Fixed against adaptive exit over windows of the trace: whole curves, and equal points."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import exp, log

from cache_manager import exits
from research.sage.gpu_functions import GpuFunction
from research.sage.idle_walk import (
    IdleCosts,
    IdleTimes,
    TraceWindow,
    costs_of,
    hindsight,
)

FIXED_S = (5.0, 10.0, 20.0, 30.0, 45.0, 60.0, 90.0, 120.0, 240.0)
WORTHS_GIB_S = (25.0, 50.0, 100.0, 200.0, 300.0, 500.0, 900.0)
SAGE_S = 30.0
HOST_PRICE = 0.5


@dataclass(frozen=True, slots=True)
class ExitPoint:
    """One setting of a rule, and what it cost."""

    parameter: float
    costs: IdleCosts


@dataclass(frozen=True, slots=True)
class ExitCurves:
    """One window, or all of them together, under every setting of each rule."""

    fixed: tuple[ExitPoint, ...]
    adaptive: tuple[ExitPoint, ...]
    hindsight: tuple[ExitPoint, ...]

    @property
    def sage(self) -> IdleCosts:
        """What SAGE's own setting costs."""
        (found,) = (point.costs for point in self.fixed if point.parameter == SAGE_S)
        return found


def curves(
    window: TraceWindow,
    functions: Sequence[GpuFunction],
    fixed_s: Sequence[float] = FIXED_S,
    worths: Sequence[float] = WORTHS_GIB_S,
    seed: int = 1,
) -> ExitCurves:
    """The window under each of these settings; SAGE's 30 s must be among them."""
    idle = window.idle_times(functions, seed)
    return ExitCurves(
        tuple(ExitPoint(seconds, _costs(f"fixed:{seconds}", idle)) for seconds in fixed_s),
        tuple(ExitPoint(worth, _costs(f"adaptive:{worth},{HOST_PRICE}", idle)) for worth in worths),
        tuple(ExitPoint(worth, hindsight(worth, HOST_PRICE, idle)) for worth in worths),
    )


def together(windows: Sequence[ExitCurves]) -> ExitCurves:
    """The sums over windows, setting by setting."""
    return ExitCurves(
        _summed([each.fixed for each in windows]),
        _summed([each.adaptive for each in windows]),
        _summed([each.hindsight for each in windows]),
    )


def at_equal(points: Sequence[ExitPoint], metric: str, value: float, wanted: str) -> float | None:
    """What the curve has of `wanted` where it has so much of `metric`; None: it never has.


    Between two neighbouring settings it goes straight, in logarithms.
    """
    for one, other in pairwise(points):
        low, high = getattr(one.costs, metric), getattr(other.costs, metric)
        if min(low, high) <= value <= max(low, high) and low != high and min(low, high) > 0:
            share = log(value / low) / log(high / low)
            first, second = getattr(one.costs, wanted), getattr(other.costs, wanted)
            return exp(log(first) + share * (log(second) - log(first)))
    return None


def _costs(rule: str, idle: Sequence[IdleTimes]) -> IdleCosts:
    return costs_of(exits.make(rule), idle)


def _summed(windows: Sequence[tuple[ExitPoint, ...]]) -> tuple[ExitPoint, ...]:
    return tuple(
        ExitPoint(points[0].parameter, sum((point.costs for point in points), IdleCosts()))
        for points in zip(*windows, strict=True)
    )
