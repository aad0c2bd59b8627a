"""The functions that a load calls, and the moments; pure."""

import math
from collections.abc import Sequence
from itertools import accumulate
from random import Random
from typing import Self

from common.numerals import number
from gpufaas.errors import CommandError
from scheduler.sim import workload
from scheduler.sim import workload as traces
from scheduler.sim.workload import MINUTE_S, Pattern, Window

# Seconds since the beginning, and the function's index.
Arrival = tuple[float, int]

_UNIFORM, _THESIS, _ZIPF = "uniform", "thesis", "zipf"


def shares(popularity: str, functions: int) -> list[float]:
    """Each function's share of the calls, largest first; the shares sum to 1."""
    kind, _, exponent = popularity.partition(":")
    if popularity == _UNIFORM:
        return [1.0 / functions] * functions
    if popularity == _THESIS:
        return workload.popularity(functions)
    if kind == _ZIPF:
        return _zipf(_exponent(popularity, exponent), functions)
    raise CommandError(f"popularity {popularity!r}: one of uniform, thesis, zipf:EXPONENT")


def at_rate(
    popularity: Sequence[float], rate: float, seconds: float, pattern: Pattern, seed: int
) -> list[Arrival]:
    """Calls at a rate, each to a function chosen by its share."""
    random = Random(seed)
    minutes = math.ceil(seconds / MINUTE_S)
    times = [
        at_s
        for minute in range(minutes)
        for at_s in pattern.times(minute, round(rate * MINUTE_S), random)
        if at_s < seconds
    ]
    if not times:
        raise CommandError(f"{rate:g} calls a second are none at all in {seconds:g} s")
    chosen = random.choices(range(len(popularity)), popularity, k=len(times))
    return list(zip(times, chosen, strict=True))


def traced(
    path: str, functions: int, start_minute: int, seconds: float, speed: float
) -> "TracedLoad":
    """A trace's most used functions, at `speed` times the trace's rate."""
    minutes = math.ceil(seconds * speed / MINUTE_S)
    return TracedLoad(traces.read(path), Window(start_minute, minutes, functions), seconds, speed)


class TracedLoad:
    """A window of a trace, to be replayed within some seconds."""

    def __init__(self, trace: traces.Trace, window: Window, seconds: float, speed: float) -> None:
        self._trace = trace
        self._window = window
        self._seconds = seconds
        self._speed = speed

    def arrivals(self, rate: float | None, pattern: Pattern, seed: int) -> list[Arrival]:
        """The trace's calls, at its own rate or with `rate` a second in its busiest minute."""
        a_minute = None if rate is None else rate * MINUTE_S / self._speed
        busiest = self._busiest() if a_minute is None else max(1, round(a_minute))
        found = traces.workload(self._trace, self._window, busiest, pattern, seed)
        numbers = {model.id: number for number, model in enumerate(found.models)}
        chosen = [
            (at_s / self._speed, numbers[model])
            for at_s, model in found.arrivals
            if at_s / self._speed < self._seconds
        ]
        if not chosen:
            raise CommandError(f"the trace has no call in these {self._seconds:g} s")
        return chosen

    def _busiest(self) -> int:
        minutes = range(self._window.minutes)
        # For a window beyond the trace's end, the workload raises the error.
        within = self._window.start_minute + self._window.minutes <= self._trace.minutes
        rows = traces.most_used(self._trace, self._window) if within else ()
        return max((sum(row[minute] for row in rows) for minute in minutes), default=1)


class Choices:
    """An endless sequence of functions, chosen by their shares; equal for equal seeds."""

    def __init__(self, popularity: Sequence[float], seed: int) -> None:
        self._random = Random(seed)
        self._upto = list(accumulate(popularity))
        self._all = range(len(popularity))
        self._ahead: list[int] = []

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> int:
        """The next function; drawn a thousand at a time, because each call waits for its draw."""
        if not self._ahead:
            self._ahead = self._random.choices(self._all, cum_weights=self._upto, k=1_000)
        return self._ahead.pop()


def _zipf(exponent: float, functions: int) -> list[float]:
    weights = [rank**-exponent for rank in range(1, functions + 1)]
    return [weight / sum(weights) for weight in weights]


def _exponent(popularity: str, text: str) -> float:
    try:
        found = number(text or "1")
    except ValueError:
        found = math.nan
    if not 0.0 <= found < math.inf:
        raise CommandError(f"popularity {popularity!r}: the exponent is a number, 0 or more")
    return found
