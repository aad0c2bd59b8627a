"""SAGE: one engine a function, whose calls share context and read-only data, and staged exit."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from math import ceil

from cache_manager.exits.exit_rule import ExitRule
from cache_manager.model.ids import MIB, Tier
from cache_manager.model.request_rates import IdleGaps
from research.sage.gpu_functions import GpuFunction
from research.sage.gpu_machine import GpuMachine, SimulatedCall


@dataclass(slots=True)
class FunctionEngine:
    """What is left of a function between its calls; an exit rule reads it as an idle model."""

    function: GpuFunction
    stage: Tier = Tier.ABSENT
    running: int = 0
    moves: int = 0  # from stage to stage; a timer is for the stage in which it was set
    idle_since_s: float | None = None
    gaps: IdleGaps = field(default_factory=IdleGaps)
    # Calls that wait for what another one makes; None: nobody makes it.
    for_context: list[SimulatedCall] | None = None
    for_data: list[SimulatedCall] | None = None

    def held_bytes(self, stage: Tier) -> int:
        """Bytes of the GPU, the host or the disk that the function holds in this stage."""
        return ceil(self._held_mb(stage) * MIB)

    def reload_s(self, stage: Tier) -> float:
        """The set-up of a call that comes alone in this stage."""
        return setup_s(self.function, stage)

    def gpu_mb(self, stage: Tier) -> float:
        return self._held_mb(stage) if stage <= Tier.CONTEXT else 0.0

    def _held_mb(self, stage: Tier) -> float:
        if stage is Tier.ABSENT:
            return 0.0
        context_mb = self.function.context_mb if stage <= Tier.CONTEXT else 0.0
        return context_mb + (self.function.read_only_mb if stage is not Tier.CONTEXT else 0.0)


def setup_s(function: GpuFunction, stage: Tier) -> float:
    """How long a call that comes alone in this stage waits before it computes."""
    read_s = function.database_s if stage >= Tier.DISK else function.database_writable_s
    copied_s = function.pcie_s if stage >= Tier.CONTEXT else function.pcie_writable_s
    context_s = function.gpu_context_s if stage >= Tier.HOST else 0.0
    return (function.cpu_context_s if stage is Tier.ABSENT else 0.0) + max(
        context_s, read_s + copied_s
    )


class SharedEngines:
    """Calls join their function's engine in the order in which they came.

    At most so many are on the GPU at once, and only where their memory fits.
    """

    def __init__(
        self,
        machine: GpuMachine,
        functions: Sequence[GpuFunction],
        rule: ExitRule,
        calls_at_once: int,
    ) -> None:
        self._machine = machine
        self._rule = rule
        self._may_begin = calls_at_once
        self._engines = [FunctionEngine(each) for each in functions]
        self._waiting: deque[SimulatedCall] = deque()

    def arrived(self, call: SimulatedCall, now: float) -> None:
        """One more call."""
        self._waiting.append(call)
        self._admit(now)

    def _admit(self, now: float) -> None:
        while self._waiting and self._may_begin:
            call = self._waiting[0]
            engine = self._engines[call.number]
            needs_mb = call.function.writable_mb + self._missing_mb(engine)
            if not self._machine.memory.fits(needs_mb) and not self._make_room(
                needs_mb, call.number, now
            ):
                return
            self._waiting.popleft()
            self._may_begin -= 1
            self._machine.memory.take(needs_mb, now)
            self._begin(call, engine, now)

    def _missing_mb(self, engine: FunctionEngine) -> float:
        """What an engine in this stage lacks on the GPU; running ones lack nothing."""
        if engine.running:
            return 0.0
        return engine.gpu_mb(Tier.GPU) - engine.gpu_mb(engine.stage)

    def _make_room(self, needs_mb: float, asking: int, now: float) -> bool:
        """Idle functions leave the GPU, the one that is idle longest first."""
        idle = [
            (engine.idle_since_s or 0.0, number)
            for number, engine in enumerate(self._engines)
            if not engine.running and engine.stage <= Tier.CONTEXT and number != asking
        ]
        for _, number in sorted(idle):
            self._leave(self._engines[number], Tier.HOST, now)
            if self._machine.memory.fits(needs_mb):
                return True
        return False

    def _begin(self, call: SimulatedCall, engine: FunctionEngine, now: float) -> None:
        call.began_s, call.found = now, engine.stage
        first = not engine.running
        engine.running += 1
        # It waits for its own data, and for what is being made: the context, others' shared data.
        call.waits = 1
        if not first:
            _wait_for(engine.for_data, call)
        delay_s = self._wake(engine, now) if first else 0.0
        _wait_for(engine.for_context, call)
        self._machine.at(now + delay_s, partial(self._read, call, first=first))

    def _wake(self, engine: FunctionEngine, now: float) -> float:
        """End the exit, and begin what the engine lacks; the time until its data can be read."""
        found, function = engine.stage, engine.function
        engine.stage = Tier.GPU
        engine.moves += 1
        if engine.idle_since_s is not None:
            engine.gaps.saw(now - engine.idle_since_s)
        delay_s = function.cpu_context_s if found is Tier.ABSENT else 0.0
        if found is not Tier.GPU:
            engine.for_data = []
        if found >= Tier.HOST:
            engine.for_context = []
            ready_s = now + delay_s + function.gpu_context_s
            self._machine.at(ready_s, partial(self._context_made, engine))
        return delay_s

    def _read(self, call: SimulatedCall, now: float, *, first: bool) -> None:
        """Its own data, and, for the first call of an engine, what all calls share."""
        function, found = call.function, call.found
        read_s, copied_s = function.database_writable_s, function.pcie_writable_s
        if first and found >= Tier.DISK:
            read_s += function.database_read_only_s
        if first and found >= Tier.CONTEXT:
            copied_s += function.pcie_read_only_s
        call.solo_loading_s = read_s + copied_s
        call.loading_s = -now
        copied = partial(self._copy, copied_s=copied_s, first=first)
        self._machine.database.add(read_s, (copied, call), now)

    def _copy(self, call: SimulatedCall, now: float, *, copied_s: float, first: bool) -> None:
        self._machine.pcie.add(copied_s, (self._loaded_all if first else self._loaded, call), now)

    def _loaded_all(self, call: SimulatedCall, now: float) -> None:
        engine = self._engines[call.number]
        waiting, engine.for_data = engine.for_data or [], None
        self._loaded(call, now)
        for other in waiting:
            self._ready(other, now)

    def _loaded(self, call: SimulatedCall, now: float) -> None:
        call.loading_s += now
        self._ready(call, now)

    def _context_made(self, engine: FunctionEngine, now: float) -> None:
        waiting, engine.for_context = engine.for_context or [], None
        for call in waiting:
            self._ready(call, now)

    def _ready(self, call: SimulatedCall, now: float) -> None:
        call.waits -= 1
        if not call.waits:
            self._machine.compute(call, now, self._ended)

    def _ended(self, call: SimulatedCall, now: float) -> None:
        engine = self._engines[call.number]
        self._machine.end(call, now)
        self._machine.memory.take(-call.function.writable_mb, now)
        engine.running -= 1
        self._may_begin += 1
        if not engine.running:
            engine.idle_since_s = now
            self._stay(engine, now)
        self._admit(now)

    def _stay(self, engine: FunctionEngine, now: float) -> None:
        """Plan the end of the stage in which the engine is now."""
        stays_s = self._rule.stays_s(engine.stage, engine)
        if stays_s is not None and engine.stage is not Tier.ABSENT:
            self._machine.at(now + stays_s, partial(self._next_stage, engine, engine.moves))

    def _next_stage(self, engine: FunctionEngine, moves: int, now: float) -> None:
        if engine.moves == moves:
            self._leave(engine, Tier(engine.stage + 1), now)
            self._admit(now)

    def _leave(self, engine: FunctionEngine, stage: Tier, now: float) -> None:
        freed_mb = engine.gpu_mb(engine.stage) - engine.gpu_mb(stage)
        engine.stage = stage
        engine.moves += 1
        self._machine.memory.take(-freed_mb, now)
        self._stay(engine, now)


def _wait_for(others: list[SimulatedCall] | None, call: SimulatedCall) -> None:
    """Let the call wait with these, if somebody makes what they wait for."""
    if others is not None:
        others.append(call)
        call.waits += 1
