"""Calls of functions over time: the Azure trace on SAGE's functions, or Poisson's."""

from dataclasses import dataclass
from random import Random

from research.sage.gpu_systems import CallTimes
from scheduler.sim.azure_trace import CARRIED, Window, most_used, read
from scheduler.sim.workload import MINUTE_S, apportion

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
