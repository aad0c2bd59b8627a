"""SAGE's five systems by name, and one run of one of them on one node."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil, inf

from cache_manager import exits
from research.sage.fair_link import FairLink
from research.sage.gpu_functions import Assumptions, GpuFunction
from research.sage.gpu_machine import GpuMachine, MemoryMeter, SimulatedCall, Then
from research.sage.printed_numbers import sage_paper
from research.sage.shared_engines import SharedEngines

GRANULE_MB = 1024.0


@dataclass(slots=True)
class SerialPhases:
    """What one call does after its admission, without or with a context made before."""

    machine: GpuMachine
    ended: Callable[[SimulatedCall, float], None]

    def begin(self, call: SimulatedCall, now: float, *, has_context: bool) -> None:
        """CPU context, then data to the host, GPU context, data to the GPU, computing."""
        call.began_s = now
        call.solo_loading_s = call.function.data_s
        copies = self._copy if has_context else self._make_context
        self.machine.at(now + call.function.cpu_context_s, partial(self._read, call, copies))

    def _read(
        self, call: SimulatedCall, then: Callable[[SimulatedCall, float], None], now: float
    ) -> None:
        call.loading_s -= now
        self.machine.database.add(call.function.database_s, (then, call), now)

    def _make_context(self, call: SimulatedCall, now: float) -> None:
        call.loading_s += now
        ready_s = now + call.function.gpu_context_s
        self.machine.at(ready_s, partial(self._copy_after_context, call))

    def _copy_after_context(self, call: SimulatedCall, now: float) -> None:
        call.loading_s -= now
        self._copy(call, now)

    def _copy(self, call: SimulatedCall, now: float) -> None:
        self.machine.pcie.add(call.function.pcie_s, (self._compute, call), now)

    def _compute(self, call: SimulatedCall, now: float) -> None:
        call.loading_s += now
        self.machine.compute(call, now, self.ended)


class MemoryAdmission:
    """FixedGSL: calls wait in one queue for memory, in whole granules or exactly."""

    def __init__(self, machine: GpuMachine, granule_mb: float | None) -> None:
        self._machine = machine
        self._granule_mb = granule_mb
        self._waiting: deque[SimulatedCall] = deque()
        self._phases = SerialPhases(machine, self._ended)

    def arrived(self, call: SimulatedCall, now: float) -> None:
        """One more call."""
        self._waiting.append(call)
        self._admit(now)

    def _admit(self, now: float) -> None:
        memory = self._machine.memory
        while self._waiting and memory.fits(self._needs_mb(self._waiting[0].function)):
            call = self._waiting.popleft()
            memory.take(self._needs_mb(call.function), now)
            self._phases.begin(call, now, has_context=False)

    def _ended(self, call: SimulatedCall, now: float) -> None:
        self._machine.end(call, now)
        self._machine.memory.take(-self._needs_mb(call.function), now)
        self._admit(now)

    def _needs_mb(self, function: GpuFunction) -> float:
        if self._granule_mb is None:
            return function.total_mb
        return ceil(function.total_mb / self._granule_mb) * self._granule_mb


@dataclass(slots=True)
class _ContextPool:
    """One function's contexts: at most so many, as many calls at once."""

    function: GpuFunction
    made: int = 0
    busy: int = 0
    idle_since_s: float = 0.0
    waiting: deque[SimulatedCall] = field(default_factory=deque)


class ContextAdmission:
    """DGSF: a queue for each function, whose calls share its few contexts.

    Contexts are made beforehand and stay, or are made when needed and stay `stay_s` after the
    function's last call.
    """

    def __init__(
        self,
        machine: GpuMachine,
        functions: Sequence[GpuFunction],
        contexts: int,
        stay_s: float | None,
    ) -> None:
        self._machine = machine
        self._contexts = contexts
        self._stay_s = stay_s
        self._phases = SerialPhases(machine, self._ended)
        self._pools = [_ContextPool(each) for each in functions]
        # Functions whose calls wait for memory.
        self._starved: dict[int, None] = {}
        if stay_s is None:
            for pool in self._pools:
                pool.made = contexts
                machine.memory.take(contexts * pool.function.context_mb, 0.0)

    def arrived(self, call: SimulatedCall, now: float) -> None:
        """One more call."""
        self._pools[call.number].waiting.append(call)
        self._admit(call.number, now)

    def _admit(self, number: int, now: float) -> None:
        pool, memory = self._pools[number], self._machine.memory
        while pool.waiting and pool.busy < self._contexts:
            has_context = pool.made > pool.busy
            made_mb = 0.0 if has_context else pool.function.context_mb
            if not memory.fits(made_mb + pool.function.explicit_mb):
                self._starved[number] = None
                return
            memory.take(made_mb + pool.function.explicit_mb, now)
            pool.made += not has_context
            pool.busy += 1
            self._phases.begin(pool.waiting.popleft(), now, has_context=has_context)
        self._starved.pop(number, None)

    def _ended(self, call: SimulatedCall, now: float) -> None:
        pool = self._pools[call.number]
        self._machine.end(call, now)
        self._machine.memory.take(-pool.function.explicit_mb, now)
        pool.busy -= 1
        self._admit(call.number, now)
        self._admit_starved(now)
        if not pool.busy and self._stay_s is not None:
            pool.idle_since_s = now
            self._machine.at(now + self._stay_s, partial(self._leave, pool, now))

    def _leave(self, pool: _ContextPool, since_s: float, now: float) -> None:
        if pool.busy or pool.idle_since_s != since_s:
            return
        self._machine.memory.take(-pool.made * pool.function.context_mb, now)
        pool.made = 0
        self._admit_starved(now)

    def _admit_starved(self, now: float) -> None:
        for number in tuple(self._starved):
            self._admit(number, now)


# When which function is called, by its place in the list of functions.
CallTimes = Sequence[tuple[float, int]]


@dataclass(frozen=True, slots=True)
class GpuSystem:
    """One way to run functions on a GPU.

    `contexts` of 0: a call makes its own. With `shares`, calls of one function share an engine,
    which leaves by the exit rule; without `shares_data` each of them loads all of its data.
    """

    name: str
    granule_mb: float | None = None
    contexts: int = 0
    contexts_stay_s: float | None = None
    shares: bool = False
    shares_data: bool = True
    exit_rule: str = "fixed"


FIXED_GSL = GpuSystem("FixedGSL", granule_mb=GRANULE_MB)
FIXED_GSL_F = GpuSystem("FixedGSL-F")
DGSF = GpuSystem("DGSF", contexts=4)
# Section 7.7 compares SAGE-NR with a DGSF whose contexts go when nobody called for 30 s.
# Four contexts for each of 30 functions are more than the GPU's memory.
DGSF_OF_TWO = GpuSystem("DGSF, 2 contexts", contexts=2)
DGSF_LEAVING = GpuSystem("DGSF, contexts leave", contexts=4, contexts_stay_s=30.0)
SAGE_NR = GpuSystem("SAGE-NR", shares=True, shares_data=False)
SAGE = GpuSystem("SAGE", shares=True)


@dataclass(frozen=True, slots=True)
class NodeRun:
    """What came of one run: the calls that ended, in the order of their ends.

    `memory_mb` is what was in use on average, `left_mb` what is in use at the end.
    """

    ended: Sequence[SimulatedCall]
    arrived: int
    memory_mb: float
    left_mb: float


def run_node(
    system: GpuSystem,
    functions: Sequence[GpuFunction],
    times: CallTimes,
    assumed: Assumptions,
    period_s: float = inf,
) -> NodeRun:
    """The calls on one node, until all have ended or the period is over."""
    served = functions if system.shares_data else [_own_data(each) for each in functions]
    machine = GpuMachine(MemoryMeter(sage_paper().gpu_memory_mb))
    machine.database = FairLink(_contention(system, assumed))
    calls = [SimulatedCall(served[number], number, at_s) for at_s, number in times]
    machine.run(calls, _admission(system, machine, served, assumed), period_s)
    ended = [call for call in machine.ended if call.ended_s <= period_s]
    last_s = period_s if period_s < inf else max((call.ended_s for call in ended), default=0.0)
    memory = machine.memory
    return NodeRun(ended, len(calls), memory.mean_mb(last_s), memory.used_mb)


def _contention(system: GpuSystem, assumed: Assumptions) -> float:
    """Only the calls of FixedGSL transfer by themselves, each from its own container."""
    if system.shares:
        return assumed.daemon_contention
    return assumed.api_contention if system.contexts else assumed.contention


def _admission(
    system: GpuSystem,
    machine: GpuMachine,
    functions: Sequence[GpuFunction],
    assumed: Assumptions,
) -> Then:
    if system.shares:
        rule = exits.make(system.exit_rule)
        return SharedEngines(machine, functions, rule, assumed.calls_at_once).arrived
    if system.contexts:
        pools = ContextAdmission(machine, functions, system.contexts, system.contexts_stay_s)
        return pools.arrived
    return MemoryAdmission(machine, system.granule_mb).arrived


def _own_data(function: GpuFunction) -> GpuFunction:
    """The function as if all its data were written by every call: nothing is shared."""
    return replace(
        function,
        read_only_mb=0.0,
        writable_mb=function.explicit_mb,
        database_read_only_s=0.0,
        database_writable_s=function.database_s,
        pcie_read_only_s=0.0,
        pcie_writable_s=function.pcie_s,
    )
