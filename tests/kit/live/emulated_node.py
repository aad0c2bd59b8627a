"""A GPU manager whose GPUs only wait: loads and runs take the times of a workload's models."""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from cache_manager.model.ids import ModelId, NodeId, Tier
from scheduler.api import NodeReports
from scheduler.model.actions import Demote, DemoteStored, Dispatch, EndContext, EndLease, Prepare
from scheduler.model.events import (
    Event,
    GpuSnapshot,
    LiveLease,
    ModelDemoted,
    ModelLoaded,
    NodeSnapshot,
    RunFinished,
    SlotFreed,
)
from scheduler.model.values import GpuSpec, LeaseId, SlotId
from scheduler.sim.model_catalogue import BATCH, SimModel

# Timers of event loops count milliseconds; a greater delay is the machine's.
_TIMER_S = 0.001


class Word(StrEnum):
    """What happened to a lease, in a node's own log."""

    GIVEN = "given"
    FREED = "freed"


class Noted(NamedTuple):
    """One entry of a node's own log; a lease `beside` was loaded beside the runs of others."""

    word: Word
    slot: SlotId
    lease: LeaseId
    beside: bool = False


@dataclass(slots=True)
class _EmulatedLease:
    """A lease as the node knows it, from its grant or its first call on."""

    granted: asyncio.Future[Dispatch]
    run: asyncio.Task[None] | None = None
    ending: bool = False


@dataclass(slots=True)
class _Gpu:
    """One GPU: it runs one lease's work at a time, and keeps its models in memory."""

    spec: GpuSpec
    computing: asyncio.Lock = field(default_factory=asyncio.Lock)
    residents: dict[ModelId, int] = field(default_factory=dict)
    loading: dict[ModelId, asyncio.Task[None]] = field(default_factory=dict)


class EmulatedNode:
    """A NodeLink that takes as long as GPUs would, computes nothing, and logs the leases it served.

    `log` holds every lease that was given and freed, but for those that loaded beside the runs of
    others, `wrong` every order that no GPU could obey.
    All requests of a lease run as one batch, as in the simulator.
    """

    def __init__(
        self,
        name: str,
        specs: Iterable[GpuSpec],
        models: Iterable[SimModel],
        now_s: Callable[[], float],
    ) -> None:
        self.name = NodeId(name)
        self._now_s = now_s
        self._late_s = 0.0
        self.reports: NodeReports | None = None
        self.log: list[Noted] = []
        self.wrong: list[str] = []
        self._gpus = {spec.id: _Gpu(spec) for spec in specs}
        self._models: Mapping[ModelId, SimModel] = {model.id: model for model in models}
        self._leases: dict[LeaseId, _EmulatedLease] = {}
        self._beside: set[LeaseId] = set()
        self._ended: set[LeaseId] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    # -- what a function does ---------------------------------------------------------------------

    async def call(self, lease_id: LeaseId) -> None:
        """Run the models of a lease: once they are loaded, and the GPU is free."""
        if lease_id in self._ended:
            return  # the batch of all its requests has run
        lease = self._lease(lease_id)
        order = await asyncio.shield(lease.granted)  # the caller may be faster than the stream
        if lease.run is None:
            lease.run = self._begin(self._run(order))
        await asyncio.shield(lease.run)

    # -- orders -----------------------------------------------------------------------------------

    def whole_state(self) -> Sequence[Event]:
        """The snapshot to report on attaching."""
        return [NodeSnapshot(self.name, tuple(self._shown(gpu) for gpu in self._gpus.values()))]

    def prepare(self, order: Prepare) -> None:
        gpu = self._gpus[order.gpu]
        for victim in order.victims:
            self._unload(gpu, victim)
        gpu.residents |= {load.model: load.memory_bytes for load in order.loads}
        if sum(gpu.residents.values()) > gpu.spec.memory_bytes:
            self.wrong.append(f"{order.gpu} is over its memory with {sorted(gpu.residents)}")
        loads = self._begin(self._load(gpu, order))
        gpu.loading |= {load.model: loads for load in order.loads}
        if order.beside:
            self._beside.add(order.lease)

    def grant(self, order: Dispatch) -> None:
        lease = self._lease(order.lease)
        if not lease.granted.done():
            lease.granted.set_result(order)
            self._note(Word.GIVEN, order)

    def demote(self, order: Demote) -> None:
        """Evict a model; its process is never kept, which the report says by the GPU's name."""
        self._unload(self._gpus[order.gpu], order.model)
        gpu = order.gpu if order.keeps_context else None
        self._report(ModelDemoted(self.name, gpu, order.model, Tier.DISK))

    def end_context(self, order: EndContext) -> None:
        self.wrong.append(f"{order.model} has left no empty process on {order.gpu}")

    def demote_stored(self, order: DemoteStored) -> None:
        self._report(ModelDemoted(self.name, None, order.model, order.tier))

    def end_lease(self, order: EndLease) -> None:
        lease = self._leases.get(order.lease)
        if lease is not None and not lease.ending:
            lease.ending = True
            self._begin(self._end(lease, order))

    def contended(self, *, waiting: bool) -> None:
        """Leases never linger here."""

    # -- inside -----------------------------------------------------------------------------------

    def _lease(self, lease_id: LeaseId) -> _EmulatedLease:
        lease = self._leases.get(lease_id)
        if lease is None:
            granted = asyncio.get_running_loop().create_future()
            lease = self._leases[lease_id] = _EmulatedLease(granted)
        return lease

    def _note(self, word: Word, order: Dispatch | EndLease) -> None:
        beside = order.lease in self._beside
        self.log.append(Noted(word, order.slot, order.lease, beside))

    async def _load(self, gpu: _Gpu, order: Prepare) -> None:
        for load in order.loads:
            load_s = self._models[load.model].load_s
            await self._pass(load_s)
            gpu.loading.pop(load.model, None)
            if load.model in gpu.residents:
                self._report(ModelLoaded(gpu.spec.id, load.model, load_s, load.source))
        if order.prefetch:
            self._report(SlotFreed(order.slot, order.lease))

    async def _run(self, order: Dispatch) -> None:
        gpu, (model_id, *_) = self._gpus[order.gpu], order.models
        loads = [gpu.loading[each] for each in order.models if each in gpu.loading]
        await asyncio.gather(*map(asyncio.shield, loads))
        run_s = self._models[model_id].run_s * len(order.requests)
        async with gpu.computing:
            await self._pass(run_s)
        self._report(RunFinished(order.slot, model_id, BATCH * len(order.requests), run_s))

    async def _pass(self, seconds: float) -> None:
        """As long as a GPU would take: what the loop's coarse timers add is taken off later."""
        began_s = self._now_s()
        await asyncio.sleep(max(0.0, seconds - self._late_s))
        late_s = self._late_s + self._now_s() - began_s - seconds
        self._late_s = min(max(late_s, -_TIMER_S), _TIMER_S)

    async def _end(self, lease: _EmulatedLease, order: EndLease) -> None:
        """Let the run in flight end; a load goes on."""
        if lease.run is not None:
            await asyncio.shield(lease.run)
        del self._leases[order.lease]
        self._ended.add(order.lease)
        self._note(Word.FREED, order)
        self._beside.discard(order.lease)
        self._report(SlotFreed(order.slot, order.lease))

    def _unload(self, gpu: _Gpu, model: ModelId) -> None:
        gpu.loading.pop(model, None)
        if gpu.residents.pop(model, None) is None:
            self.wrong.append(f"{model} was to leave {gpu.spec.id}, where it is not")

    def _shown(self, gpu: _Gpu) -> GpuSnapshot:
        given = {
            lease_id: lease.granted.result()
            for lease_id, lease in self._leases.items()
            if lease.granted.done() and lease.granted.result().gpu == gpu.spec.id
        }
        leases = tuple(
            LiveLease(lease_id, order.slot, order.models, order.requests)
            for lease_id, order in given.items()
        )
        residents, loading = tuple(gpu.residents.items()), tuple(gpu.loading)
        return GpuSnapshot(gpu.spec, residents, leases, loading=loading)

    def _begin(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)  # the loop itself keeps none alive
        task.add_done_callback(self._tasks.discard)
        return task

    def _report(self, event: Event) -> None:
        assert self.reports is not None, "attach it first"
        self.reports.report(event)


def given_twice(log: Iterable[Noted], leases: int = 1) -> list[Noted]:
    """Leases that a node was given on a slot that was full, by the node's own log.

    Those that were loaded beside others' runs may be one more.
    """
    held: Counter[SlotId] = Counter()
    wrong = []
    for noted in log:
        if noted.beside:
            continue
        if noted.word is Word.FREED:
            held[noted.slot] -= 1
        else:
            held[noted.slot] += 1
            if held[noted.slot] > leases:
                wrong.append(noted)
    return wrong
