"""One node: carries out the scheduler's orders and reports the results.

The node never picks a victim. Its state changes as soon as an order arrives, so that its reports
always reflect the orders given so far; tasks do the actual work.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence

from msgspec.structs import replace

from cache_manager.model.ids import ModelId, NodeId, Tier
from common.gpu_wishes import WHOLE
from gpu_manager import metrics
from gpu_manager.errors import NoWorker
from gpu_manager.node.counts import NodeMeters
from gpu_manager.node.leases import EndReason, SessionKey
from gpu_manager.node.leases_in_force import LeasesInForce
from gpu_manager.node.loading import Loader
from gpu_manager.node.residents import HostGpu, ModelOnGpu
from gpu_manager.node.run_reports import RunKind, RunReports
from gpu_manager.node.settings import NodeSettings
from gpu_manager.node.stepping_down import StoredWeights
from gpu_manager.node.tenant_models import Catalogue
from gpu_manager.runtimes.runtime import (
    EmptyHost,
    HostedId,
    HostedModel,
    MergedSums,
    NodeFeature,
    Observer,
    PressureAnswer,
    Runtime,
)
from gpu_manager.weights.store import WeightStore
from gpu_manager.worker.orders import CallsRan
from scheduler.api import (
    Demote,
    DemoteStored,
    Dispatch,
    EndContext,
    EndLease,
    GpuId,
    GpuSnapshot,
    LeaseComputed,
    LeaseId,
    MemoryPressure,
    NodeReports,
    NodeSnapshot,
    Prepare,
    RunFailed,
    SlotFreed,
)

log = logging.getLogger(__name__)

_PRESSURE_S = 2.0  # that a run waits for memory


class GpuNode(Observer):
    """A node's GPUs, residents and leases; implements NodeLink, too."""

    def __init__(
        self,
        settings: NodeSettings,
        gpus: Iterable[HostGpu],
        store: WeightStore,
        catalogue: Catalogue,
        reports: NodeReports,
        features: Sequence[NodeFeature],
        lease_ended: Callable[[SessionKey, LeaseId], None],
    ) -> None:
        """`lease_ended` is called after a claimed lease has ended."""
        self.name = NodeId(settings.node)
        self.gpus = {gpu.id: gpu for gpu in gpus}
        self.meters = NodeMeters(self.gpus)
        self.features = features
        self._reports = reports
        self._loop = asyncio.get_running_loop()
        self._resync_due = False
        self._runs = RunReports(reports)
        self.leases = LeasesInForce(
            settings.leases, self.gpus, self.meters, reports, self._runs, lease_ended
        )
        self.weights = StoredWeights(self.name, store, catalogue, reports)
        self._loader = Loader(
            settings, self.weights, reports, self.resync, self.meters, features, self.leases
        )

    def start(self, runtime: Runtime) -> None:
        """Report the node's state; from now on orders are accepted, and loads use this runtime."""
        self._loader.start(runtime)
        self._reports.report(self.snapshot())

    async def drain(self, within_s: float) -> None:
        """End every lease; calls in flight have `within_s` to end."""
        await self.leases.end_all(within_s)
        self._runs.flush()

    # -- orders of the scheduler ----------------------------------------------------------------

    def prepare(self, order: Prepare) -> None:
        gpu = self.gpus[order.gpu]
        for victim in order.victims:
            self._loader.unload(gpu, victim)
        for left in order.emptied:
            self._loader.end_context(gpu, left)
        last: asyncio.Task[None] | None = None
        for load in order.loads:
            step = self.weights.need(load.model)
            last = self._loader.load(gpu, load, order.lease, (last, step), ahead=order.prefetch)
            last.add_done_callback(lambda _: self.leases.note_loaded())
        if order.prefetch:
            self.leases.prefetch(order, last)

    def grant(self, order: Dispatch) -> None:
        self._loader.hurry(self.gpus[order.gpu], order.models)
        self.leases.grant(order)

    def demote(self, order: Demote) -> None:
        """Unload this model from this GPU, or have it leave its process there."""
        gpu = self.gpus[order.gpu]
        if order.keeps_context:
            self._loader.empty(gpu, order.model)
        else:
            self._loader.unload(gpu, order.model)

    def end_context(self, order: EndContext) -> None:
        self._loader.end_context(self.gpus[order.gpu], order.model)

    def demote_stored(self, order: DemoteStored) -> None:
        self.weights.step_down(order.model, order.tier, self._is_on_a_gpu)

    def end_lease(self, order: EndLease) -> None:
        """Admit no further call, let the one in flight end, then report the slot as freed."""
        lease = self.leases.get(order.lease)
        if lease is None:
            self._reports.report(SlotFreed(order.slot, order.lease))
        else:
            reason = EndReason.RECALLED if order.recalled else EndReason.ORDERED
            self.leases.end(lease, reason)

    def contended(self, *, waiting: bool) -> None:
        """Set whether requests wait, in which case idle leases end soon."""
        self.leases.contended = waiting
        self.leases.check()

    def hosted(self, name: HostedId) -> HostedModel:
        """Return the loaded model with this id; raise NoWorker if there is none."""
        for gpu in self.gpus.values():
            for hosted in gpu.loaded():
                if hosted.id == name:
                    return hosted
        raise NoWorker("any model", f"there is no worker {name}")

    # -- reports of hosted models ---------------------------------------------------------------

    def claimed(self, hosted: HostedModel, lease: int, session: str) -> None:
        held = self.leases.of(hosted, lease)
        if held is not None:
            self.leases.called_first(held, session)

    def ran(self, hosted: HostedModel, report: CallsRan) -> None:
        gpu = self.gpus[GpuId(hosted.order.gpu)]
        resident = gpu.resident_of(hosted)
        if resident is None:
            return
        now_s = resident.used_s = self._loop.time()
        resident.uses += 1
        held = self.leases.of(hosted, report.lease)
        if held is not None:
            held.note_use(now_s, report.run_s, report.session)
            if self.leases.contended:
                self.leases.check()
        needed_bytes, news = gpu.measured_run(resident, report.peak_bytes, report.held_bytes)
        if news:
            self.resync()
        self.meters.ran(gpu.id, resident.model, report.calls, report.run_s)
        slot, configuration = gpu.slot, None  # where the lease is not known any more
        if held is not None:
            slot, configuration = held.live.slot, held.live.configuration
        batch, together = max(1, report.batch), max(1, report.together)
        kind = RunKind(slot, resident.model, batch, configuration, together)
        self._runs.ran(kind, report.run_s, needed_bytes)
        if report.metrics:
            alone = len(self.leases.on(gpu.id)) <= 1
            self._runs.used(gpu.device, resident.model, report.metrics, alone=alone)

    def computed(self, hosted: HostedModel, lease: int, computed_s: float) -> None:
        held = self.leases.of(hosted, lease)
        if held is not None and held.live.own:
            model = ModelId(hosted.order.model)
            counted_s = held.count_computing(model, computed_s, self._loop.time())
            if counted_s > 0:
                self._reports.report(LeaseComputed(held.id, counted_s))

    def merged(self, hosted: HostedModel, added: MergedSums) -> None:
        self.meters.merged(hosted.order.gpu, added)
        self.gpus[GpuId(hosted.order.gpu)].note_merged(hosted, added)

    async def pressure(self, hosted: HostedModel, lease: int, need_bytes: int) -> PressureAnswer:
        """Obtain memory for a call beyond its model's limit: free bytes, or those of victims."""
        gpu = self.gpus[GpuId(hosted.order.gpu)]
        resident = gpu.resident_of(hosted)
        if resident is None:
            return PressureAnswer(hosted.order.limit_bytes, retry=False)
        log.info("%s needs %d bytes on %s (lease %d)", resident.model, need_bytes, gpu.id, lease)
        self.meters.count(metrics.PRESSURE, gpu.id)
        relieved = await self._relieve(gpu, resident, need_bytes)
        if gpu.resident_of(hosted) is None:
            return PressureAnswer(hosted.order.limit_bytes, retry=False)
        gpu.update_limits()
        return PressureAnswer(gpu.limit_bytes(resident), relieved, gpu.together_bytes(resident))

    def died(self, hosted: HostedModel, cause: str) -> None:
        """End every lease that may call a model that has ended unexpectedly."""
        gpu = self.gpus[GpuId(hosted.order.gpu)]
        resident = gpu.resident_of(hosted)
        if resident is None:
            return
        del gpu.residents[resident.model]
        self.meters.count(metrics.WORKERS_DIED, gpu.id)
        self._loader.report_lost(gpu, resident, cause)
        for lease in self.leases.using(gpu.id, resident.model):
            if lease.ending is None:
                self._reports.report(RunFailed(lease.id, f"{resident.model}: {cause}"))
            self.leases.end(lease, EndReason.WORKER_LOST)

    def context_lost(self, host: EmptyHost, cause: str) -> None:
        for gpu in self.gpus.values():
            if self._loader.context_lost(gpu, host, cause):
                self.meters.count(metrics.WORKERS_DIED, gpu.id)

    def lose(self, gpu: HostGpu, cause: str) -> None:
        """Mark a GPU as unusable, and end its leases and residents."""
        gpu.lost = True
        for lease in self.leases.on(gpu.id):
            self.leases.end(lease, EndReason.GPU_LOST)
        for resident in gpu.by_use():
            log.error("%s is lost with %s: %s", resident.model, gpu.id, cause)
            self._loader.unload(gpu, resident.model)
        for model in list(gpu.contexts):
            self._loader.end_context(gpu, model)
        self.resync()

    async def _relieve(self, gpu: HostGpu, resident: ModelOnGpu, need_bytes: int) -> bool:
        """Report a shortage to the scheduler, which picks victims, and wait for their memory.

        Return False if that is impossible or takes too long.
        """
        need_bytes -= gpu.for_calls_bytes(resident)
        if not gpu.ledger.ever_fits(need_bytes):
            return False

        def grant() -> int:
            there = gpu.residents.get(resident.model) is resident
            return gpu.ledger.grow(resident.memory, need_bytes) if there else 0

        if grant():
            await gpu.obtain(grant, self._reports, _PRESSURE_S)
            self.resync()
        return gpu.residents.get(resident.model) is resident and not grant()

    # -- snapshots ------------------------------------------------------------------------------

    def resync(self) -> None:
        """Report the whole state once the current order has been carried out."""
        if not self._resync_due:
            self._resync_due = True
            self._loop.call_soon(self._resync)

    def snapshot(self) -> NodeSnapshot:
        now_s, gpus = self._loop.time(), self.gpus.values()
        states = tuple(_gpu_snapshot(now_s, gpu, self.leases) for gpu in gpus if not gpu.lost)
        tiers = [
            (model.id, self.weights.store.tier(model.digest)) for model in self.weights.catalogue
        ]
        there = tuple(tier for tier in tiers if tier[1] is not Tier.ABSENT)
        return NodeSnapshot(self.name, states, there)

    def whole_state(self) -> list[NodeSnapshot | MemoryPressure]:
        """Return a snapshot, which clears the scheduler's shortages, and those by other programs.

        The snapshot does not contain these.
        """
        lasting = [
            MemoryPressure(gpu.id, 0, withheld_bytes=gpu.foreign_bytes)
            for gpu in self.gpus.values()
            if gpu.foreign_bytes and not gpu.lost
        ]
        return [self.snapshot(), *lasting]

    def stuck_reason(self) -> str:
        """Return how many loads make no progress, without names of tenants; empty if all do."""
        count = sum(len(gpu.stuck_loads()) for gpu in self.gpus.values())
        return f"loads without progress: {count}; the log here names them" if count else ""

    def _is_on_a_gpu(self, model: ModelId) -> bool:
        return any(model in gpu.residents for gpu in self.gpus.values())

    def _resync(self) -> None:
        self._resync_due = False
        for event in self.whole_state():
            self._reports.report(event)


def _gpu_snapshot(now_s: float, gpu: HostGpu, leases: LeasesInForce) -> GpuSnapshot:
    residents = tuple((resident.model, gpu.size_bytes(resident)) for resident in gpu.by_use())
    loading = tuple(resident.model for resident in gpu.by_use() if resident.hosted is None)
    live = tuple(lease.report() for lease in leases.on(gpu.id))
    contexts = tuple((empty.model, gpu.context_bytes(empty)) for empty in gpu.contexts.values())
    spec = replace(gpu.spec, context_bytes=gpu.ledger.context_bytes)
    calls = gpu.calls_at_once
    shared = tuple(
        (host.bytes(calls), tuple(resident.model for resident in gpu.sharing(host)))
        for host in gpu.shared.values()
    )
    gpu_shares = tuple(
        (resident.model, resident.gpu_share)
        for resident in gpu.by_use()
        if resident.gpu_share != WHOLE
    )
    stuck = tuple((model, now_s - since_s) for model, since_s in gpu.stuck_loads().items())
    return GpuSnapshot(spec, residents, live, contexts, shared, loading, gpu_shares, stuck=stuck)
