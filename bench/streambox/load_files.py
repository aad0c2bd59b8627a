"""The loads of StreamBox's repository: a rate for each of 1,000 points, and arrivals drawn by it.

Sporadic and periodic are as its files have them. Of bursty ones no parameters are known: ours are
quiet but for 20 points in 200, at which calls come 30 times as often, in each function at others.
"""

import math
import random
from collections.abc import Callable
from typing import NamedTuple

POINTS = 1000
_QUIET_SHARE, _MOST_RATE = 0.97, 100.0
_AMPLITUDE, _PERIOD = 200.0, 200
_BURST_POINTS, _BURST_RATE = 20, 30.0


class Arrival(NamedTuple):
    """A call of a function, so many seconds after the load's beginning."""

    at_s: float
    function: int


def sporadic(chance: random.Random) -> list[float]:
    """Nothing at 97 % of the points, else up to 100."""
    return [
        0.0 if chance.random() < _QUIET_SHARE else chance.uniform(0.0, _MOST_RATE)
        for _ in range(POINTS)
    ]


def periodic(chance: random.Random) -> list[float]:
    """A sine of 200 points with noise as large as itself, cut at 0."""
    return [
        max(
            0.0,
            _AMPLITUDE * math.sin(2 * math.pi * point / _PERIOD)
            + chance.uniform(-_AMPLITUDE, _AMPLITUDE),
        )
        for point in range(POINTS)
    ]


def bursty(chance: random.Random) -> list[float]:
    """Bursts of a tenth of the time."""
    begins = chance.randrange(_PERIOD)
    return [
        _BURST_RATE if (point - begins) % _PERIOD < _BURST_POINTS else 1.0
        for point in range(POINTS)
    ]


LOADS: dict[str, Callable[[random.Random], list[float]]] = {
    "sporadic": sporadic,
    "periodic": periodic,
    "bursty": bursty,
}


def arrivals(
    load: str, functions: int, seconds: float, calls_per_s: float, seed: int
) -> list[Arrival]:
    """The calls of all functions in their order: each has its own rates, with one mean for all."""
    chance = random.Random(seed)
    found: list[Arrival] = []
    point_s = seconds / POINTS
    for function in range(functions):
        rates = LOADS[load](chance)
        total = sum(rates) or 1.0
        wanted = seconds * calls_per_s / functions
        for point, rate in enumerate(rates):
            found += [
                Arrival((point + chance.random()) * point_s, function)
                for _ in range(_poisson(wanted * rate / total, chance))
            ]
    return sorted(found)


def _poisson(mean: float, chance: random.Random) -> int:
    count, left = 0, math.exp(-mean)
    product = chance.random()
    while product > left:
        count += 1
        product *= chance.random()
    return count
