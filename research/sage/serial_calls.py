"""FixedGSL, FixedGSL-F and DGSF: every call loads its own data, one phase after the other."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import ceil

from research.sage.gpu_functions import GpuFunction
from research.sage.gpu_machine import GpuMachine, SimulatedCall

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
