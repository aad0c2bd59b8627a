"""What a rule's choices cost over the idle times of functions, without contention or queues."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

from cache_manager.model.ids import MIB, Stage
from cache_manager.tiers.exits.exit_rule import ExitRule
from scheduler.sim.azure_trace import CARRIED, Trace, read
from scheduler.sim.papers.sage.gpu_functions import GpuFunction
from scheduler.sim.papers.sage.shared_engines import FunctionEngine, setup_s
from scheduler.sim.workload import MINUTE_S

_GIB = 1024 * MIB
_HELD = (Stage.GPU, Stage.CONTEXT, Stage.HOST, Stage.DISK)


@dataclass(frozen=True, slots=True)
class IdleTimes:
    """A function, how long it was idle before each of its calls but the first, and at the end."""

    function: GpuFunction
    gaps_s: tuple[float, ...]
    last_s: float


@dataclass(frozen=True, slots=True)
class IdleCosts:
    """Memory of idle functions in GiB-seconds, and what their next calls waited for.

    A cold call finds neither weights nor context on the GPU. Waits are those for loading that a
    call in stage GPU would not have had.
    """

    gpu_gib_s: float = 0.0
    host_gib_s: float = 0.0
    calls: int = 0
    cold: int = 0
    waited_s: float = 0.0

    def __add__(self, other: "IdleCosts") -> "IdleCosts":
        return IdleCosts(
            self.gpu_gib_s + other.gpu_gib_s,
            self.host_gib_s + other.host_gib_s,
            self.calls + other.calls,
            self.cold + other.cold,
            self.waited_s + other.waited_s,
        )


@dataclass(frozen=True, slots=True)
class TraceWindow:
    """A part of the trace: some minutes of every so-manieth function, the most used first."""

    start_minute: int
    minutes: int
    first: int
    step: int
    # Busier functions are warm under every rule, and only make the simulation longer.
    most_calls_a_minute: float = 20.0

    def idle_times(self, functions: Sequence[GpuFunction], seed: int) -> list[IdleTimes]:
        """The functions of the trace as those of SAGE, in turn; None called just once."""
        random = Random(seed)
        rows = self._rows(read(CARRIED))
        return [
            idle
            for number, row in enumerate(rows)
            for idle in _idle_times(functions[number % len(functions)], row, random)
        ]

    def _rows(self, trace: Trace) -> list[tuple[int, ...]]:
        end = self.start_minute + self.minutes
        rows = sorted((row[self.start_minute : end] for row in trace.rows), key=_busiest_first)
        most = self.most_calls_a_minute * self.minutes
        return [row for row in rows[self.first :: self.step] if 1 < sum(row) <= most]


def ten_windows() -> list[TraceWindow]:
    """Two periods of two hours, as long as SAGE's, of five sets of functions; none overlap."""
    return [TraceWindow(start, 120, first, 5) for start in (0, 120) for first in range(5)]


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
        engine = FunctionEngine(each.function)
        for gap_s in each.gaps_s:
            total += min(
                (_stayed(engine, stage, gap_s) for stage in Stage),
                key=lambda cost: (
                    cost.gpu_gib_s + host_price * cost.host_gib_s + worth_gib_s * cost.waited_s
                ),
            )
    return total


def _busiest_first(row: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    return -sum(row), row


def _idle_times(
    function: GpuFunction, row: Sequence[int], random: Random
) -> Iterator[IdleTimes]:
    calls = sorted(
        (minute + random.random()) * MINUTE_S for minute, many in enumerate(row) for _ in range(many)
    )
    gaps = tuple(later - earlier for earlier, later in zip(calls, calls[1:], strict=False))
    yield IdleTimes(function, gaps, len(row) * MINUTE_S - calls[-1])


def _walk(rule: ExitRule, idle: IdleTimes) -> IdleCosts:
    engine = FunctionEngine(idle.function)
    gpu_gib_s = host_gib_s = waited_s = 0.0
    cold = 0
    warm_s = setup_s(idle.function, Stage.GPU)
    gpu = [engine.gpu_mb(stage) * MIB / _GIB for stage in _HELD]
    host = [_host_gib(engine, stage) for stage in _HELD]
    for gap_s in (*idle.gaps_s, idle.last_s):
        left_s, found = gap_s, Stage.GONE
        for place, stage in enumerate(_HELD):
            stays_s = rule.stays_s(stage, engine)
            held_s = left_s if stays_s is None else min(stays_s, left_s)
            gpu_gib_s += held_s * gpu[place]
            host_gib_s += held_s * host[place]
            if stays_s is None or left_s <= stays_s:
                found = stage
                break
            left_s -= stays_s
        engine.gaps.saw(gap_s)
        cold += found >= Stage.HOST
        waited_s += setup_s(idle.function, found) - warm_s
    # The window ends in the last idle time: no call comes, whatever stage it is.
    cold -= found >= Stage.HOST
    waited_s -= setup_s(idle.function, found) - warm_s
    return IdleCosts(gpu_gib_s, host_gib_s, len(idle.gaps_s), cold, waited_s)


def _stayed(engine: FunctionEngine, stage: Stage, gap_s: float) -> IdleCosts:
    function = engine.function
    return IdleCosts(
        gap_s * engine.gpu_mb(stage) * MIB / _GIB,
        gap_s * _host_gib(engine, stage),
        1,
        int(stage >= Stage.HOST),
        setup_s(function, stage) - setup_s(function, Stage.GPU),
    )


def _host_gib(engine: FunctionEngine, stage: Stage) -> float:
    in_host = Stage.CONTEXT <= stage <= Stage.HOST
    return engine.function.read_only_mb * MIB / _GIB if in_host else 0.0
