"""A cluster kept full: as many requests wait as were asked for, while slots come free in turn."""

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate
from random import Random
from time import perf_counter_ns

from cache_manager.model import MIB, GpuId, ModelId, NodeId, Tier
from scheduler.actions import Action, Dispatch, EnqueueLocally
from scheduler.core import Core, make_core
from scheduler.events import Event, GpuJoined, ModelRegistered, RequestArrived, SlotFreed
from scheduler.model import ANY_GPU_TYPE, GpuSpec, ModelSpec, Request, RequestId
from scheduler.sim.catalogue import table1

GPU_MEMORY_BYTES = 7982 * MIB


@dataclass(frozen=True, slots=True)
class Size:
    """How large the cluster is, and how much waits for it."""

    gpus: int
    waiting: int
    models: int

    def __str__(self) -> str:
        return f"{self.gpus:,} GPUs, {self.waiting:,} waiting, {self.models:,} models"


class Steady:
    """Drives one core in a steady state of overload and times every call."""

    def __init__(self, policy: str, size: Size, seed: int = 1) -> None:
        self.core: Core = make_core(policy)
        self.placements = 0
        self.samples_ns: list[float] = []
        self._random = Random(seed)
        self._models = [ModelId(f"m{number}") for number in range(size.models)]
        shares = accumulate(1.0 / rank for rank in range(1, size.models + 1))
        self._cumulative = list(shares)
        self._running: list[tuple[float, int, SlotFreed]] = []
        self._now = 0.0
        self._asked = 0
        table = list(table1().values())
        for number, model in enumerate(self._models):
            like = table[number % len(table)]
            runs = {(1, ANY_GPU_TYPE): like.run_s}
            spec = ModelSpec(model, like.memory_bytes, {Tier.DISK: like.load_s}, runs)
            self.core.handle(ModelRegistered(spec), 0.0)
        for number in range(size.gpus):
            gpu = GpuSpec(GpuId(f"g{number:05d}"), NodeId(f"n{number // 8}"), GPU_MEMORY_BYTES)
            self.core.handle(GpuJoined(gpu), 0.0)
        self._fill(size)

    def _fill(self, size: Size) -> None:
        for event in self._requests(size.gpus + size.waiting):
            self._now += 1e-6
            self._carry_out(self.core.handle(event, self._now))

    def run(self, placements: int) -> None:
        """Free slots and add requests until so many placements were timed."""
        while self.placements < placements:
            self._now, _, freed = heappop(self._running)
            self._timed(freed)
            self._timed(self._arrival())

    def _timed(self, event: Event) -> None:
        handle, now = self.core.handle, self._now
        began_ns = perf_counter_ns()
        actions = handle(event, now)
        took_ns = perf_counter_ns() - began_ns
        emitted = self._carry_out(actions)
        if emitted:
            self.placements += emitted
            self.samples_ns.extend([took_ns / emitted] * emitted)

    def _carry_out(self, actions: list[Action]) -> int:
        emitted = 0
        for action in actions:
            if isinstance(action, Dispatch):
                emitted += 1
                done_s = self._now + action.estimate.total_s
                freed = SlotFreed(action.slot, action.lease)
                heappush(self._running, (done_s, action.lease, freed))
            elif isinstance(action, EnqueueLocally):
                emitted += 1
        return emitted

    def _arrival(self) -> RequestArrived:
        return next(self._requests(1))

    def _requests(self, number: int) -> Iterator[RequestArrived]:
        chosen = self._random.choices(self._models, cum_weights=self._cumulative, k=number)
        for model in chosen:
            self._asked += 1
            yield RequestArrived(Request(RequestId(f"r{self._asked}"), "f", (model,)))
