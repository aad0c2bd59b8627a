"""One node with one GPU on virtual time: its paths, its cores, its memory and its timers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf

from cache_manager.model.ids import Tier
from research.sage.fair_link import FairLink
from research.sage.gpu_functions import GpuFunction


@dataclass(slots=True, eq=False)
class SimulatedCall:
    """One call of a function, and when it came to what; `waits` counts what it still waits for.

    `began_loading_s` and `loaded_s` enclose the time on both data paths, `found` is the stage in
    which the function was when the call began.
    """

    function: GpuFunction
    number: int
    arrived_s: float
    began_s: float = inf
    found: Tier = Tier.ABSENT
    waits: int = 0
    began_loading_s: float = 0.0
    loading_s: float = 0.0
    solo_loading_s: float = 0.0
    computes_s: float = inf
    ended_s: float = inf


Then = Callable[[SimulatedCall, float], None]


@dataclass(slots=True)
class MemoryMeter:
    """GPU memory in use, and its sum over time."""

    capacity_mb: float
    used_mb: float = 0.0
    sum_mb_s: float = 0.0
    changed_s: float = 0.0

    def fits(self, mb: float) -> bool:
        return self.used_mb + mb <= self.capacity_mb

    def take(self, mb: float, now: float) -> None:
        """Use this much more; with a negative number, less."""
        self.sum_mb_s += self.used_mb * (now - self.changed_s)
        self.changed_s = now
        self.used_mb += mb

    def mean_mb(self, until_s: float) -> float:
        """The average from the beginning until this time, when nothing changed later."""
        rest_mb_s = self.used_mb * (until_s - self.changed_s)
        return (self.sum_mb_s + rest_mb_s) / until_s if until_s else 0.0


@dataclass(slots=True)
class GpuMachine:
    """Drives what happens on one node; who admits calls, and what they do, is given to it."""

    memory: MemoryMeter
    database: FairLink[tuple[Then, SimulatedCall]] = field(default_factory=FairLink)
    pcie: FairLink[tuple[Then, SimulatedCall]] = field(default_factory=FairLink)
    cores: FairLink[tuple[Then, SimulatedCall]] = field(default_factory=FairLink)
    ended: list[SimulatedCall] = field(default_factory=list)
    _timers: list[tuple[float, int, Callable[[float], None]]] = field(default_factory=list)
    _order: int = 0

    def at(self, when_s: float, then: Callable[[float], None]) -> None:
        """Do this then."""
        self._order += 1
        heappush(self._timers, (when_s, self._order, then))

    def compute(self, call: SimulatedCall, now: float, then: Then) -> None:
        """All that the call waited for is there."""
        call.computes_s = now
        self.cores.add(call.function.compute_s, (then, call), now)

    def end(self, call: SimulatedCall, now: float) -> None:
        """The call has computed; its result takes a moment to return."""
        call.ended_s = now + call.function.return_s
        self.ended.append(call)

    def run(self, calls: Sequence[SimulatedCall], arrive: Then, until_s: float = inf) -> None:
        """Let these calls arrive, in order, until nothing happens any more or time is up."""
        timers, database, pcie, cores = self._timers, self.database, self.pcie, self.cores
        place, many = 0, len(calls)
        while True:
            arrives_s = calls[place].arrived_s if place < many else inf
            timer_s = timers[0][0] if timers else inf
            now = min(arrives_s, timer_s, database.ends_s, pcie.ends_s, cores.ends_s)
            if now == inf or now > until_s:
                return
            if now == timer_s:
                heappop(timers)[2](now)
            elif now == arrives_s:
                arrive(calls[place], now)
                place += 1
            else:
                link = cores if now == cores.ends_s else pcie if now == pcie.ends_s else database
                then, call = link.take(now)
                then(call, now)
