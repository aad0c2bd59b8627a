"""What a rule's choices cost over the idle times of functions, without contention or queues."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import NamedTuple

from cache_manager.exits.exit_rule import ExitRule
from cache_manager.model.ids import Tier
from research.sage.gpu_functions import GpuFunction
from research.sage.shared_engines import FunctionEngine, setup_s
from scheduler.sim.workload import CARRIED, MINUTE_S, Trace, read

_MB_A_GIB = 1024.0


@dataclass(frozen=True, slots=True)
class IdleTimes:
    """A function, how long it was idle before each of its calls but the first, and at the end."""

    function: GpuFunction
    gaps_s: tuple[float, ...]
    last_s: float


class CalledFunction(NamedTuple):
    """When a function of a window is called, in order."""

    function: GpuFunction
    at_s: list[float]


@dataclass(frozen=True, slots=True)
class IdleCosts:
    """Memory of idle functions in GiB-seconds, and what their next calls waited for.

    A cold call finds neither weights nor context on the GPU; one that finds nothing at all comes
    when the function is gone. Waits are those for loading that a call in stage GPU has not.
    """

    gpu_gib_s: float = 0.0
    host_gib_s: float = 0.0
    calls: int = 0
    cold: int = 0
    gone: int = 0
    waited_s: float = 0.0

    def __add__(self, other: "IdleCosts") -> "IdleCosts":
        return IdleCosts(
            self.gpu_gib_s + other.gpu_gib_s,
            self.host_gib_s + other.host_gib_s,
            self.calls + other.calls,
            self.cold + other.cold,
            self.gone + other.gone,
            self.waited_s + other.waited_s,
        )


@dataclass(frozen=True, slots=True)
class TraceWindow:
    """A part of the trace: some minutes of one function in `step`, the most used first.

    The trace counts calls by minute: within it they come at random, or evenly with `regular`.
    """

    start_minute: int
    minutes: int
    first: int
    step: int
    regular: bool = False
    # Busier functions are warm under every rule, and only make the simulation longer.
    most_calls_a_minute: float = 20.0

    def calls(self, functions: Sequence[GpuFunction], seed: int) -> list[CalledFunction]:
        """The trace's functions as those of SAGE, in turn; none that is called just once."""
        random = Random(seed)
        return [
            CalledFunction(functions[number % len(functions)], self._calls(row, random))
            for number, row in enumerate(self._rows(read(CARRIED)))
        ]

    def idle_times(self, functions: Sequence[GpuFunction], seed: int) -> list[IdleTimes]:
        """The same, as the times between calls."""
        return [
            IdleTimes(
                each.function,
                tuple(later - earlier for earlier, later in pairwise(each.at_s)),
                self.minutes * MINUTE_S - each.at_s[-1],
            )
            for each in self.calls(functions, seed)
        ]

    def _calls(self, row: Sequence[int], random: Random) -> list[float]:
        phase = random.random()
        return sorted(
            (minute + ((place + phase) / many if self.regular else random.random())) * MINUTE_S
            for minute, many in enumerate(row)
            for place in range(many)
        )

    def _rows(self, trace: Trace) -> list[tuple[int, ...]]:
        end = self.start_minute + self.minutes
        rows = sorted((row[self.start_minute : end] for row in trace.rows), key=_busiest_first)
        most = self.most_calls_a_minute * self.minutes
        return [row for row in rows[self.first :: self.step] if 1 < sum(row) <= most]


def ten_windows(*, regular: bool = False) -> list[TraceWindow]:
    """Two periods of two hours, as long as SAGE's, of five sets of functions; none overlap."""
    return [
        TraceWindow(start, 120, first, 5, regular=regular)
        for start in (0, 120)
        for first in range(5)
    ]


def costs_of(rule: ExitRule, idle_times: Iterable[IdleTimes]) -> IdleCosts:
    """The rule's costs over all these functions."""
    total = IdleCosts()
    for each in idle_times:
        total += _walk(rule, each)
    return total


def hindsight(worth_gib_s: float, host_price: float, idle_times: Iterable[IdleTimes]) -> IdleCosts:
    """The least that a rule could cost that knows when the next call comes."""
    total = IdleCosts()
    for each in idle_times:
        stays = [_StageCost.of(FunctionEngine(each.function), stage) for stage in Tier]
        gpu_gib_s = host_gib_s = waited_s = 0.0
        found: Counter[Tier] = Counter()
        for gap_s in each.gaps_s:
            best = min(
                stays,
                key=lambda stay, gap_s=gap_s: (  # type: ignore[misc]  # the gap of this turn
                    gap_s * (stay.gpu_gib + host_price * stay.host_gib) + worth_gib_s * stay.waits_s
                ),
            )
            gpu_gib_s += gap_s * best.gpu_gib
            host_gib_s += gap_s * best.host_gib
            waited_s += best.waits_s
            found[best.stage] += 1
        cold = found[Tier.HOST] + found[Tier.DISK] + found[Tier.ABSENT]
        calls = len(each.gaps_s)
        total += IdleCosts(gpu_gib_s, host_gib_s, calls, cold, found[Tier.ABSENT], waited_s)
    return total


def _busiest_first(row: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    return -sum(row), row


def _walk(rule: ExitRule, idle: IdleTimes) -> IdleCosts:
    engine = FunctionEngine(idle.function)
    stays = [_StageCost.of(engine, stage) for stage in Tier]
    gpu_gib_s = host_gib_s = waited_s = 0.0
    cold = gone = 0
    for place, gap_s in enumerate((*idle.gaps_s, idle.last_s)):
        left_s, found = gap_s, stays[-1]
        for stay in stays[:-1]:
            stays_s = rule.stays_s(stay.stage, engine)
            held_s = left_s if stays_s is None else min(stays_s, left_s)
            gpu_gib_s += held_s * stay.gpu_gib
            host_gib_s += held_s * stay.host_gib
            if stays_s is None or left_s <= stays_s:
                found = stay
                break
            left_s -= stays_s
        engine.gaps.saw(gap_s)
        # The window ends in the last idle time: then no call comes.
        if place < len(idle.gaps_s):
            cold += found.stage >= Tier.HOST
            gone += found.stage is Tier.ABSENT
            waited_s += found.waits_s
    return IdleCosts(gpu_gib_s, host_gib_s, len(idle.gaps_s), cold, gone, waited_s)


class _StageCost(NamedTuple):
    """What a function holds in a stage, and what its next call then waits for."""

    stage: Tier
    gpu_gib: float
    host_gib: float
    waits_s: float

    @classmethod
    def of(cls, engine: FunctionEngine, stage: Tier) -> "_StageCost":
        in_host = Tier.CONTEXT <= stage <= Tier.HOST
        return cls(
            stage,
            engine.gpu_mb(stage) / _MB_A_GIB,
            engine.function.read_only_mb / _MB_A_GIB if in_host else 0.0,
            setup_s(engine.function, stage) - setup_s(engine.function, Tier.GPU),
        )
