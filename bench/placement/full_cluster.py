"""A cluster in steady overload: slots become free in turn, and the queue keeps its length."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate, count
from random import Random
from time import perf_counter_ns
from typing import Protocol

from cache_manager.model.ids import MIB, GpuId, ModelId, NodeId, Tier
from scheduler.model.actions import Dispatch, EnqueueLocally, Prepare
from scheduler.model.events import (
    Event,
    GpuJoined,
    ModelLoaded,
    ModelRegistered,
    RequestArrived,
    SlotFreed,
)
from scheduler.model.values import (
    ANY_GPU_TYPE,
    GpuSpec,
    LeaseId,
    ModelSpec,
    Request,
    RequestId,
    SlotId,
)
from scheduler.sim.model_catalogue import table1
from tests.kit.cores.naive_scheduler import NaiveEnqueuing, NaivePlacement

GPU_MEMORY_BYTES = 7982 * MIB


@dataclass(frozen=True, slots=True)
class ClusterSize:
    """The number of GPUs, of waiting requests, and of models."""

    gpus: int
    waiting: int
    models: int

    def __str__(self) -> str:
        return f"{self.gpus:,} GPUs, {self.waiting:,} waiting, {self.models:,} models"


class Placing(Protocol):
    """A scheduler that answers events with placements: the core, or the naive version."""

    def handle(self, event: Event, now: float) -> Sequence[object]: ...


class SteadyOverload:
    """Drives a scheduler in a steady state of overload and times every call."""

    def __init__(self, scheduler: Placing, size: ClusterSize, seed: int = 1) -> None:
        self.scheduler = scheduler
        self.placements = 0
        self.samples_ns: list[float] = []
        self._random = Random(seed)
        self._models = [ModelId(f"m{number}") for number in range(size.models)]
        shares = accumulate(1.0 / rank for rank in range(1, size.models + 1))
        self._cumulative = list(shares)
        self._due: list[tuple[float, int, SlotFreed | ModelLoaded]] = []
        self._order = count()
        self._now = 0.0
        self._leases = 0
        self._taken = 0  # requests that wait no more since the last ones arrived
        self._asked_for: list[ModelId] = []
        table = list(table1().values())
        self._models_like = {
            model: table[number % len(table)] for number, model in enumerate(self._models)
        }
        for model, like in self._models_like.items():
            runs = ((1, ANY_GPU_TYPE, like.run_s),)
            spec = ModelSpec(model, like.memory_bytes, {Tier.ABSENT: like.load_s}, runs)
            self.scheduler.handle(ModelRegistered(spec), 0.0)
        for number in range(size.gpus):
            gpu = GpuSpec(GpuId(f"g{number:05d}"), NodeId(f"n{number // 8}"), GPU_MEMORY_BYTES)
            self.scheduler.handle(GpuJoined(gpu), 0.0)
        self._fill(size)

    def _fill(self, size: ClusterSize) -> None:
        for event in self._requests(size.gpus + size.waiting):
            self._now += 1e-6
            self._carry_out(self.scheduler.handle(event, self._now))

    def run(self, placements: int) -> None:
        """Free slots and add requests until this number of placements was timed."""
        while self.placements < placements:
            self._now, _, event = heappop(self._due)
            self._timed(event)
            for arrival in self._requests(self._taken):
                self._timed(arrival)

    def _timed(self, event: Event) -> None:
        handle, now = self.scheduler.handle, self._now
        began_ns = perf_counter_ns()
        actions = handle(event, now)
        took_ns = perf_counter_ns() - began_ns
        emitted = self._carry_out(actions)
        if emitted:
            self.placements += emitted
            self.samples_ns.extend([took_ns / emitted] * emitted)

    def _carry_out(self, actions: Sequence[object]) -> int:
        emitted = 0
        for action in actions:
            if isinstance(action, Dispatch):
                emitted += 1
                self._taken += len(action.requests)
                self._begin(action.slot, action.lease, action.estimate.total_s)
            elif isinstance(action, Prepare):
                self._load(action)
            elif isinstance(action, NaivePlacement):
                emitted += 1
                self._taken += 1
                self._leases += 1
                like = self._models_like[self._asked_for[int(action.request[1:]) - 1]]
                busy_s = like.run_s + (0.0 if action.hit else like.load_s)
                self._begin(action.slot, LeaseId(self._leases), busy_s)
            elif isinstance(action, EnqueueLocally | NaiveEnqueuing):
                emitted += 1
        return emitted

    def _load(self, action: Prepare) -> None:
        done_s = 0.0
        for load in action.loads:
            load_s = self._models_like[load.model].load_s
            done_s += load_s
            self._later(done_s, ModelLoaded(action.gpu, load.model, load_s, load.source))
        if action.prefetch:
            self._begin(action.slot, action.lease, done_s)

    def _begin(self, slot: SlotId, lease: LeaseId, busy_s: float) -> None:
        self._later(busy_s, SlotFreed(slot, lease))

    def _later(self, in_s: float, event: SlotFreed | ModelLoaded) -> None:
        heappush(self._due, (self._now + in_s, next(self._order), event))

    def _requests(self, number: int) -> Iterator[RequestArrived]:
        self._taken = 0
        chosen = self._random.choices(self._models, cum_weights=self._cumulative, k=number)
        for model in chosen:
            self._asked_for.append(model)
            yield RequestArrived(Request(RequestId(f"r{len(self._asked_for)}"), "f", (model,)))
