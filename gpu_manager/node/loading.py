"""Brings models onto a node's GPUs and takes them off again, in the order of the orders."""

import asyncio
import logging
from collections.abc import Callable

from cache_manager.model.ids import ModelId, NodeId, Tier
from gpu_manager.errors import GpuManagerError, LoadFailure, NoWorker, WeightStoreError
from gpu_manager.node.node_counts import NodeMeters
from gpu_manager.node.residents import HostGpu, ModelOnGpu
from gpu_manager.node.settings import GIB, NodeSettings
from gpu_manager.node.tenant_models import Catalogue, TenantModel
from gpu_manager.runtimes.runtime import Emulation, HostedModel, LoadOrder, Runtime
from gpu_manager.weights.host_images import ImageHold
from gpu_manager.weights.weight_store import WeightStore
from scheduler.api import (
    LeaseId,
    LoadFailed,
    MemoryPressure,
    ModelDemoted,
    ModelLoad,
    ModelLoaded,
    NodeReports,
)

log = logging.getLogger(__name__)

_LOOK_S = 1.0  # how often to see whether weights that do not come are still wanted


class _Phases:
    """How long each part of a load took."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._before_s = now_s()
        self._took_s: dict[str, float] = {}

    def ended(self, phase: str) -> None:
        """This part is over, and the next begins."""
        before_s, self._before_s = self._before_s, self._now_s()
        self._took_s[phase] = self._before_s - before_s

    def took_s(self, transfer_s: float) -> dict[str, float]:
        """Every part; what the worker did not measure as its own went into having a worker."""
        worker_s = max(0.0, self._now_s() - self._before_s - transfer_s)
        return {**self._took_s, "worker": worker_s, "transfer": transfer_s}


class Loader:
    """Loads and unloads; what comes of it is reported to the scheduler."""

    def __init__(
        self,
        settings: NodeSettings,
        store: WeightStore,
        catalogue: Catalogue,
        runtime: Runtime,
        reports: NodeReports,
        short: Callable[[], None],
        meters: NodeMeters,
    ) -> None:
        """`short` is called after memory pressure was reported and has passed."""
        self._settings = settings
        self._node = NodeId(settings.node)
        self._store = store
        self._catalogue = catalogue
        self._runtime = runtime
        self._reports = reports
        self._short = short
        self._meters = meters
        self._loop = asyncio.get_running_loop()

    def load(
        self,
        gpu: HostGpu,
        load: ModelLoad,
        lease: LeaseId,
        after: asyncio.Task[None] | None,
        over: Callable[[], bool],
    ) -> asyncio.Task[None]:
        """The model is a resident from now on, and on its way when `after` has ended.

        Weights that the node lacks are waited for until the lease is `over`.
        """
        resident = ModelOnGpu(load.model, load.memory_bytes, self._loop.time())
        gpu.residents[load.model] = resident
        before = set(gpu.leaving) | ({after} if after is not None else set())
        resident.loading = self._loop.create_task(self._load(gpu, resident, lease, before, over))
        return resident.loading

    def unload(self, gpu: HostGpu, model: ModelId) -> None:
        """The model is no resident any more; its memory comes free in a moment."""
        resident = gpu.residents.pop(model, None)
        if resident is None:
            return  # it was lost, and the order to let it go had been given before that was known
        resident.lost(NoWorker(model, "it was told to leave"))
        task = self._loop.create_task(self._unload(gpu, resident))
        gpu.leaving.add(task)
        task.add_done_callback(gpu.leaving.discard)

    def lost(self, gpu: HostGpu, resident: ModelOnGpu, cause: str) -> None:
        """The model's worker is gone unasked."""
        log.warning("%s is gone from %s: %s", resident.model, gpu.id, cause)
        resident.lost(NoWorker(resident.model, cause))
        self._forget(gpu, resident)
        tier = self._tier(resident.model)
        self._reports.report(ModelDemoted(self._node, gpu.id, resident.model, tier))

    # -- loading --------------------------------------------------------------------------------

    async def _load(
        self,
        gpu: HostGpu,
        resident: ModelOnGpu,
        lease: LeaseId,
        before: set[asyncio.Task[None]],
        over: Callable[[], bool],
    ) -> None:
        if before:
            await asyncio.wait(before)
        source = self._tier(resident.model)
        phases = _Phases(self._loop.time)
        try:
            await self._make_room(gpu, resident)
            phases.ended("room")
            begun_s = self._loop.time()
            await self._weights(resident.model, over)
            phases.ended("weights")
            hosted = await self._bring(gpu, resident, phases)
        except (LoadFailure, WeightStoreError) as error:
            log.warning("%s: %s", gpu.id, error)
            self._failed(gpu, resident, lease, error)
            return
        now_s = self._loop.time()
        gpu.ledger.loaded(resident.model, hosted.memory_bytes)
        resident.arrived(hosted, now_s)
        gpu.settle()
        self._meters.loaded(source.name.lower(), now_s - begun_s, phases.took_s(hosted.load_s))
        log.info("%s is on %s after %.3f s", resident.model, gpu.id, now_s - begun_s)
        more = hosted.memory_bytes > resident.reserved_bytes
        size_bytes = hosted.memory_bytes if more else None
        loaded = ModelLoaded(gpu.id, resident.model, now_s - begun_s, source, size_bytes)
        self._reports.report(loaded)

    def _failed(
        self, gpu: HostGpu, resident: ModelOnGpu, lease: LeaseId, error: GpuManagerError
    ) -> None:
        if gpu.residents.get(resident.model) is resident:
            del gpu.residents[resident.model]
        resident.lost(error)
        self._forget(gpu, resident)
        self._meters.load_failed(gpu.id)
        self._reports.report(LoadFailed(gpu.id, resident.model, str(error), lease=lease))

    async def _make_room(self, gpu: HostGpu, resident: ModelOnGpu) -> None:
        """Have the memory granted. The scheduler counted on it: where it lacks, say so and wait."""
        model, needed_bytes = resident.model, resident.reserved_bytes
        short_bytes = gpu.ledger.admit(model, needed_bytes)
        if not short_bytes:
            return
        if gpu.ledger.ever_fits(needed_bytes):
            self._reports.report(MemoryPressure(gpu.id, short_bytes))
            deadline_s = self._loop.time() + self._settings.room_s
            while (short_bytes := gpu.ledger.admit(model, needed_bytes)) and (
                await gpu.change.within(deadline_s - self._loop.time())
            ):
                pass
            self._short()
        if short_bytes:
            detail = f"{short_bytes} of {needed_bytes} bytes are lacking on {gpu.id}"
            raise LoadFailure(model, detail, out_of_memory=True)

    async def _weights(self, model: ModelId, over: Callable[[], bool]) -> None:
        """Wait for weights that the node lacks: the function that holds the lease sends them."""
        deadline_s = self._loop.time() + self._settings.weights_s
        while self._tier(model) is Tier.ABSENT and not over():
            left_s = deadline_s - self._loop.time()
            if left_s <= 0.0:
                return
            await self._catalogue.arrived.within(min(left_s, _LOOK_S))

    async def _bring(self, gpu: HostGpu, resident: ModelOnGpu, phases: "_Phases") -> HostedModel:
        """Twice where need be: a worker that dies while it loads may have been unlucky."""
        model = self._catalogue.get(resident.model)
        resident.hold = await self._open(model.digest)
        phases.ended("read")
        order = self._order(gpu, model, resident.hold)
        try:
            return await self._runtime.load(order)
        except (LoadFailure, NoWorker) as error:
            if isinstance(error, LoadFailure) and error.out_of_memory:
                raise
            log.warning("%s; once more", error)
        try:
            return await self._runtime.load(order)
        except NoWorker as error:
            raise LoadFailure(model.id, str(error)) from error

    async def _open(self, digest: str) -> ImageHold:
        """In a thread, for it may read from disk; a hold whose waiter was cancelled is released."""
        opening = self._loop.run_in_executor(None, self._store.open, digest)
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(_release)
            raise

    def _order(self, gpu: HostGpu, model: TenantModel, hold: ImageHold) -> LoadOrder:
        emulation = self._settings.emulation
        per_gib_s = emulation.load_s_per_gib * model.table.total_bytes / GIB
        return LoadOrder(
            model=model.id,
            tenant=model.tenant,
            gpu=gpu.id,
            device=gpu.device.worker_device,
            digest=model.digest,
            table=model.table.storages,
            total_bytes=model.table.total_bytes,
            image=hold.descriptor,
            limit_bytes=gpu.ledger.limit_bytes(model.id),
            emulation=Emulation(emulation.load_s + per_gib_s, emulation.run_s),
            turns=gpu.turns,
        )

    # -- unloading ------------------------------------------------------------------------------

    async def _unload(self, gpu: HostGpu, resident: ModelOnGpu) -> None:
        if resident.loading is not None and not resident.loading.done():
            resident.loading.cancel()
            await asyncio.wait({resident.loading})
        if resident.hosted is not None:
            await resident.hosted.unload()
        self._forget(gpu, resident)
        tier = self._tier(resident.model)
        self._reports.report(ModelDemoted(self._node, None, resident.model, tier))

    def _forget(self, gpu: HostGpu, resident: ModelOnGpu) -> None:
        gpu.ledger.release(resident.model)
        resident.release()
        gpu.settle()

    def _tier(self, model: ModelId) -> Tier:
        try:
            return self._store.tier(self._catalogue.get(model).digest)
        except WeightStoreError:
            return Tier.ABSENT


def _release(opening: asyncio.Future[ImageHold]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().release()
