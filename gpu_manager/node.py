"""One node: carries out what the scheduler orders, and reports what came of it.

It never picks a victim. Its books change at once when an order comes, so that what it reports
always fits the orders given so far; the work itself is done by tasks.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from functools import partial

from cache_manager.model import ModelId, NodeId, Tier
from gpu_manager.catalogue import Catalogue
from gpu_manager.change import Change
from gpu_manager.errors import NoWorker
from gpu_manager.leases import Held, Leases, SessionKey, Why
from gpu_manager.loading import Loader
from gpu_manager.meters import NodeMeters
from gpu_manager.residents import HostGpu
from gpu_manager.runs import RunReports
from gpu_manager.runtime import Hosted, Relief, Runtime
from gpu_manager.settings import NodeSettings
from gpu_manager.weights import WeightStore
from scheduler.api import (
    Demote,
    Dispatch,
    EndLease,
    GpuId,
    GpuSnapshot,
    LeaseId,
    LiveLease,
    MemoryPressure,
    NodeSnapshot,
    Placement,
    Prepare,
    Reports,
    RunFailed,
    SlotFreed,
    SlotId,
)

log = logging.getLogger(__name__)

# A call that is still in flight so long after its lease ended may be one of a worker that hangs:
# one that does not answer an order in time is killed.
_LATE_S = 1.0
_PATIENCE_S = 2.5
_NO_LEASE = LeaseId(0)


class Node:
    """A node's GPUs, residents and leases: the scheduler's NodeLink, the runtime's Observer."""

    def __init__(
        self,
        settings: NodeSettings,
        gpus: Iterable[HostGpu],
        store: WeightStore,
        catalogue: Catalogue,
    ) -> None:
        self.name = NodeId(settings.node)
        self.gpus = {gpu.id: gpu for gpu in gpus}
        self.leases = Leases(settings.leases)
        self.meters = NodeMeters(self.gpus, settings.metric_names)
        self.lease_ended: Callable[[SessionKey, LeaseId], None] = _nobody
        self.granted = Change()
        self.addresses: tuple[str, ...] = ()
        self._settings = settings
        self._store = store
        self._catalogue = catalogue
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._resync_due = False

    def start(self, runtime: Runtime, reports: Reports) -> None:
        """Tell the scheduler what is here, and take its orders from now on."""
        self._reports = reports
        self._runs = RunReports(reports)
        settings = self._settings
        self._loader = Loader(
            settings, self._store, self._catalogue, runtime, reports, self.resync, self.meters
        )
        reports.report(self.snapshot())

    async def drain(self, within_s: float) -> None:
        """End every lease; calls in flight have that long to end."""
        for held in self.leases:
            self._end(held, Why.STOPPING, within_s)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=within_s + 1.0)
        if self._timer is not None:
            self._timer.cancel()
        self._runs.flush()

    # -- orders of the scheduler ----------------------------------------------------------------

    def prepare(self, order: Prepare) -> None:
        """Let the victims go, then load."""
        gpu = self.gpus[order.gpu]
        for victim in order.victims:
            self._loader.unload(gpu, victim)
        last: asyncio.Task[None] | None = None
        for load in order.loads:
            # Nobody brings the weights of a prefetch; a function may be on its way with its own.
            over = _always if order.prefetch else partial(self.leases.is_over, order.lease)
            last = self._loader.load(gpu, load, order.lease, last, over)
        if order.prefetch:
            models = tuple(load.model for load in order.loads)
            if self.leases.grant(order.lease, order.slot, order.gpu, models):
                log.debug("lease %d on %s is granted to %s", order.lease, order.slot, "")
            self._keep(self._loop.create_task(self._prefetched(order.lease, last)))

    def grant(self, order: Dispatch) -> None:
        """A lease is in force."""
        now_s, who = self._loop.time(), order.requests
        if self.leases.grant(order.lease, order.slot, order.gpu, order.models, now_s, who):
            log.debug("lease %d on %s is granted to %s", order.lease, order.slot, ", ".join(who))
        self.granted.happened()
        if self._timer is None:
            self._tick()

    def demote(self, order: Demote) -> None:
        """This model leaves this GPU."""
        self._loader.unload(self.gpus[order.gpu], order.model)

    def end_lease(self, order: EndLease) -> None:
        """Admit no further call, let the one in flight end, then report the slot as freed."""
        held = self.leases.get(order.lease)
        if held is None:
            self._reports.report(SlotFreed(order.slot, order.lease))
        else:
            self._end(held, Why.ORDERED)

    def contended(self, *, waiting: bool) -> None:
        """Others wait, so that leases which merely linger should end soon; or they do no more."""
        self.leases.contended = waiting
        self._tick()

    # -- leases and their holders ---------------------------------------------------------------

    async def workers(self, placement: Placement) -> dict[ModelId, Hosted]:
        """Wait until the models of a lease are loaded, or raise why that will not be."""
        residents = self.gpus[placement.gpu].residents
        found = {}
        for model in placement.models:
            resident = residents.get(model)
            if resident is None:
                raise NoWorker(model, f"it has left {placement.gpu}")
            found[model] = await resident.ready()
        return found

    def worker(self, worker_id: str) -> Hosted:
        """The worker that shims know by this name, or NoWorker."""
        for gpu in self.gpus.values():
            for resident in gpu.residents.values():
                if resident.hosted is not None and resident.hosted.worker_id == worker_id:
                    return resident.hosted
        raise NoWorker("any model", f"there is no worker {worker_id}")

    def workers_now(self, held: Held, models: Iterable[ModelId]) -> dict[ModelId, Hosted]:
        """The workers of a lease in force for these models; nothing unless all are there."""
        gpu = self.gpus[held.gpu]
        found = {model: gpu.hosted(model) for model in models if model in held.models}
        there = {model: hosted for model, hosted in found.items() if hosted is not None}
        in_force = self.leases.get(held.id) is held and held.ending is None
        return there if in_force and there.keys() == set(models) else {}

    async def sign_of_life(self, hosted: Hosted) -> None:
        """Wait for a worker to answer, or for its end: one that does not answer is killed."""
        await hosted.end(_NO_LEASE, _PATIENCE_S)

    def claim(
        self, lease: LeaseId, holder: SessionKey, workers: Iterable[Hosted], *, given: bool = False
    ) -> bool:
        """Let a session's calls run; False where the lease has ended meanwhile.

        What was `given` to it is for one request alone.
        """
        held = self.leases.get(lease)
        if held is None or held.ending is not None:
            return False
        for hosted in workers:
            hosted.admit(lease)
        self.leases.claim(held, holder, self._loop.time(), given=given)
        self._tick()
        return True

    def release(self, held: Held, why: Why) -> None:
        """Its holder needs it no more, or is gone."""
        self._end(held, why)

    def _tick(self) -> None:
        """End the leases that are due, and come back for the next one."""
        for held, why in self.leases.due(self._loop.time()):
            if why is Why.QUIET:
                held.checking = True
                self._keep(self._loop.create_task(self._check_quiet(held)))
            else:
                self._end(held, why)
        if self._timer is not None:
            self._timer.cancel()
        next_s = self.leases.next_due_s()
        self._timer = None if next_s is None else self._loop.call_at(next_s, self._tick)

    async def _check_quiet(self, held: Held) -> None:
        """Have its workers say what they have not said yet: then it is used, or it ends."""
        runs = held.runs
        await asyncio.gather(*(self.sign_of_life(hosted) for hosted in self._workers_of(held)))
        held.checking = False
        held.checked_s = self._loop.time()
        if self.leases.contended and held.ending is None and 0 < runs == held.runs:
            self._end(held, Why.QUIET)
        self._tick()

    def _end(self, held: Held, why: Why, grace_s: float | None = None) -> None:
        """End a lease; one that ends already ends sooner if the new reason leaves it less time."""
        if grace_s is None:
            grace_s = self.leases.times.grace(why)
        deadline_s = self._loop.time() + grace_s
        if held.ending is not None and deadline_s >= held.deadline_s:
            return
        first = held.ending is None
        held.ending, held.deadline_s = held.ending or why, deadline_s
        if held.holder is None and first:
            self._freed(held)
        else:
            self._keep(self._loop.create_task(self._ended(held, grace_s)))

    async def _ended(self, held: Held, grace_s: float) -> None:
        workers = self._workers_of(held)
        ends = asyncio.gather(*(hosted.end(held.id, grace_s) for hosted in workers))
        while not (await asyncio.wait({ends}, timeout=_LATE_S))[0]:
            # A worker answers this at once, whatever it computes, unless it hangs.
            await asyncio.gather(*(self.sign_of_life(hosted) for hosted in workers))
        self._freed(held)

    def _workers_of(self, held: Held) -> list[Hosted]:
        """Those of its models that are loaded."""
        gpu = self.gpus[held.gpu]
        found = [gpu.hosted(model) for model in held.models]
        return [hosted for hosted in found if hosted is not None]

    def _freed(self, held: Held) -> None:
        if self.leases.get(held.id) is not held:
            return  # it was ended twice, the second time with less patience
        self.leases.forget(held.id)
        self.meters.lease_ended(held.ending)
        log.debug("lease %d on %s has ended: %s", held.id, held.slot, held.ending)
        if held.holder is not None:
            self.lease_ended(held.holder, held.id)
        self._runs.flush()  # what ran under this lease is told while the lease is known
        self._reports.report(SlotFreed(held.slot, held.id))

    async def _prefetched(self, lease: LeaseId, last: asyncio.Task[None] | None) -> None:
        """A prefetch's lease ends when all is loaded; a failed one is ended by the scheduler."""
        if last is not None:
            await asyncio.wait({last})
        held = self.leases.get(lease)
        if held is not None:
            self._end(held, Why.RELEASED)

    # -- what workers say -----------------------------------------------------------------------

    def ran(
        self,
        hosted: Hosted,
        lease: int,
        batch: int,
        run_s: float,
        peak_bytes: int,
        calls: int = 1,
    ) -> None:
        """Calls ended well."""
        gpu = self.gpus[GpuId(hosted.order.gpu)]
        resident = gpu.resident_of(hosted)
        if resident is None:
            return
        now_s = self._loop.time()
        resident.uses += 1
        resident.used_s = now_s
        held = self.leases.get(LeaseId(lease))
        if held is not None:
            self.leases.used(held, now_s, run_s)
            if self.leases.contended:
                self._tick()
        batch = max(1, batch)
        before = gpu.ledger.measured_bytes(resident.model)
        gpu.ledger.ran(resident.model, None, batch, peak_bytes)
        if gpu.ledger.measured_bytes(resident.model) != before:
            gpu.settle()
        self.meters.ran(gpu.id, resident.model, calls, run_s)
        slot = gpu.slot if held is None else held.slot
        self._runs.ran(slot, resident.model, batch, run_s, peak_bytes)

    async def pressure(self, hosted: Hosted, lease: int, need_bytes: int) -> Relief:
        """A call needs more than its worker may use: get it from what is free or can leave."""
        gpu = self.gpus[GpuId(hosted.order.gpu)]
        resident = gpu.resident_of(hosted)
        if resident is None:
            return Relief(hosted.order.limit_bytes, retry=False)
        log.info("%s needs %d bytes on %s (lease %d)", resident.model, need_bytes, gpu.id, lease)
        self.meters.pressed(gpu.id)
        relieved = gpu.ledger.ever_fits(need_bytes) and await self._relieve(gpu, hosted, need_bytes)
        if gpu.resident_of(hosted) is None:
            return Relief(hosted.order.limit_bytes, retry=False)
        gpu.settle()
        return Relief(gpu.ledger.limit_bytes(resident.model), retry=relieved)

    async def _relieve(self, gpu: HostGpu, hosted: Hosted, need_bytes: int) -> bool:
        model = ModelId(hosted.order.model)
        short_bytes = gpu.ledger.grow(model, need_bytes)
        if not short_bytes:
            return True
        self._reports.report(MemoryPressure(gpu.id, short_bytes))
        deadline_s = self._loop.time() + self._settings.pressure_s
        while gpu.resident_of(hosted) is not None:
            if not gpu.ledger.grow(model, need_bytes):
                break
            if not await gpu.change.within(deadline_s - self._loop.time()):
                break
        self.resync()
        return gpu.resident_of(hosted) is not None and not gpu.ledger.grow(model, need_bytes)

    def died(self, hosted: Hosted, cause: str) -> None:
        """A worker is gone unasked: so is the model, and every lease that may call it."""
        gpu = self.gpus[GpuId(hosted.order.gpu)]
        resident = gpu.resident_of(hosted)
        if resident is None:
            return
        del gpu.residents[resident.model]
        self.meters.died(gpu.id)
        self._loader.lost(gpu, resident, cause)
        for held in self.leases.using(gpu.id, resident.model):
            if held.ending is None:
                self._reports.report(RunFailed(held.id, f"{resident.model}: {cause}"))
            self._end(held, Why.WORKER_LOST)

    def lose(self, gpu: HostGpu, cause: str) -> None:
        """A GPU is of no use any more: neither are its residents and leases."""
        gpu.lost = True
        for held in self.leases:
            if held.gpu == gpu.id:
                self._end(held, Why.GPU_LOST)
        for resident in gpu.by_use():
            log.error("%s is lost with %s: %s", resident.model, gpu.id, cause)
            self._loader.unload(gpu, resident.model)
        self.resync()

    # -- the whole truth ------------------------------------------------------------------------

    def resync(self) -> None:
        """Report everything anew, in a moment: in the midst of an order it would be half true."""
        if not self._resync_due:
            self._resync_due = True
            self._loop.call_soon(self._resync)

    def snapshot(self) -> NodeSnapshot:
        """What is here: GPUs, residents, leases, and where the node keeps every model's weights."""
        gpus = tuple(self._of(gpu) for gpu in self.gpus.values() if not gpu.lost)
        stored = tuple((model.id, self._store.tier(model.digest)) for model in self._catalogue)
        kept = tuple((model, tier) for model, tier in stored if tier is not Tier.ABSENT)
        return NodeSnapshot(self.name, gpus, kept)

    def truth(self) -> list[NodeSnapshot | MemoryPressure]:
        """A snapshot, which ends every shortage in the scheduler's books, and those that last."""
        lasting = [
            MemoryPressure(gpu.id, gpu.foreign_bytes)
            for gpu in self.gpus.values()
            if gpu.foreign_bytes and not gpu.lost
        ]
        return [self.snapshot(), *lasting]

    def _resync(self) -> None:
        self._resync_due = False
        for event in self.truth():
            self._reports.report(event)

    def _of(self, gpu: HostGpu) -> GpuSnapshot:
        residents = tuple((found.model, gpu.size_bytes(found)) for found in gpu.by_use())
        leases = tuple(
            LiveLease(held.id, SlotId(held.slot), held.models, held.requests)
            for held in self.leases
            if held.gpu == gpu.id
        )
        return GpuSnapshot(gpu.spec, residents, leases)

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _always() -> bool:
    """For what is not waited for."""
    return True


def _nobody(_holder: SessionKey, _lease: LeaseId) -> None:
    """Until a server wants to know."""
