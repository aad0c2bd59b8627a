"""Loads models onto a node's GPUs, and unloads or empties them, in the sequence of the orders."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from cache_manager.model.ids import ModelId, Tier
from common.gpu_wishes import STREAM
from gpu_manager import metrics
from gpu_manager.devices.loads import LoadUrgency
from gpu_manager.errors import GpuManagerError, LoadFailure, NoWorker, WeightStoreError
from gpu_manager.node.counts import NodeMeters
from gpu_manager.node.leases_in_force import LeasesInForce
from gpu_manager.node.residents import ContextOnGpu, HostGpu, ModelOnGpu
from gpu_manager.node.settings import GIB, NodeSettings
from gpu_manager.node.stepping_down import StoredWeights
from gpu_manager.node.tenant_models import TenantModel
from gpu_manager.runtimes.runtime import (
    EmptyHost,
    Emulation,
    HostedModel,
    LoadOrder,
    LoadPhases,
    LoadSpan,
    NodeFeature,
    Runtime,
)
from gpu_manager.weights.host_images import ImageRequest
from gpu_manager.weights.image_requests import ImageFeed
from scheduler.api import (
    AfterLoss,
    ContextKept,
    LeaseId,
    LoadFailed,
    ModelLoad,
    ModelLoaded,
    NodeReports,
)

log = logging.getLogger(__name__)

_ROOM_S = 10.0  # that a load waits for room in GPU memory, which others are leaving
_CHECK_S = 1.0  # interval of checks whether missing weights are still needed


@dataclass(eq=False)
class Loader:
    """Loads models, unloads or empties them, and reports to the scheduler what becomes of them."""

    settings: NodeSettings
    weights: StoredWeights
    reports: NodeReports
    # Reports the whole state: after memory pressure that was reported has passed, and where a
    # single report would be misunderstood.
    short: Callable[[], None]
    meters: NodeMeters
    features: Sequence[NodeFeature]
    leases: LeasesInForce

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._runtime: asyncio.Future[Runtime] = self._loop.create_future()

    def start(self, runtime: Runtime) -> None:
        """Have all loads use this runtime; there may be none before."""
        self._runtime.set_result(runtime)

    def load(
        self,
        gpu: HostGpu,
        load: ModelLoad,
        lease: LeaseId,
        after: Iterable[asyncio.Task[None] | None],
        *,
        ahead: bool = False,
    ) -> asyncio.Task[None]:
        """Add the model to the residents, and load it after the tasks `after` have ended.

        If the node lacks the weights, wait for them while a lease waits. Nobody waits for a load
        `ahead` of its requests, until `hurry`, or sends its weights.
        """
        now_s = self._loop.time()
        urgency = LoadUrgency(ahead=ahead)
        resident = ModelOnGpu(load.model, load.memory_bytes, lease, now_s, now_s, ahead, urgency)
        gpu.residents[load.model] = resident
        if load.emptied is not None:
            resident.takes = gpu.contexts.pop(load.emptied, None)
            if resident.takes is None:
                log.warning("%s: nothing that %s left is there any more", gpu.id, load.emptied)
        before = gpu.leaving | {task for task in after if task is not None}
        resident.loading = self._loop.create_task(self._load(gpu, resident, before))
        return resident.loading

    def hurry(self, gpu: HostGpu, models: Iterable[ModelId]) -> None:
        """A request waits for these models: those that are loading ahead of it become urgent."""
        for model in models:
            resident = gpu.residents.get(model)
            if resident is not None:
                resident.urgency.hurry()

    def unload(self, gpu: HostGpu, model: ModelId) -> None:
        """Remove the model from the residents; its memory is freed a moment later."""
        resident = self._pop(gpu, model)
        if resident is not None:
            gpu.leave(self._unload(gpu, resident))

    def empty(self, gpu: HostGpu, model: ModelId) -> None:
        """Remove the model from the residents, and keep its process if that can be kept.

        What the model left there earlier ends.
        """
        resident = self._pop(gpu, model)
        self.end_context(gpu, model)
        if resident is not None:
            process = None if resident.hosted is None else resident.hosted.host
            context = gpu.contexts[model] = ContextOnGpu(model, process)
            context.emptying = gpu.leave(self._empty(gpu, resident, context))

    def end_context(self, gpu: HostGpu, model: ModelId) -> None:
        context = gpu.contexts.pop(model, None)
        if context is not None:
            gpu.leave(self._end_and_report(gpu, context))

    def context_lost(self, gpu: HostGpu, host: EmptyHost, cause: str) -> bool:
        """Release and report an empty process that ended without an order; False if it is not here.

        It may be another GPU's, or one that an order ends.
        """
        contexts = [context for context in gpu.contexts_now() if context.host is host]
        for context in contexts:
            log.warning("what %s left on %s was lost: %s", context.model, gpu.id, cause)
            context.host = None
            gpu.ledger.release(context.memory)
            gpu.update_limits()
            self._report_context_lost(gpu, context)
        return bool(contexts)

    def report_lost(self, gpu: HostGpu, resident: ModelOnGpu, cause: str) -> None:
        log.warning("%s on %s was lost: %s", resident.model, gpu.id, cause)
        resident.mark_lost(NoWorker(resident.model, cause))
        self._forget(gpu, resident)
        self.weights.report(resident.model, gpu.id)

    # -- loading --------------------------------------------------------------------------------

    async def _load(
        self, gpu: HostGpu, resident: ModelOnGpu, before: set[asyncio.Task[None]]
    ) -> None:
        if before:
            await asyncio.wait(before)
        resident.progress.step()
        source = self.weights.tier(resident.model)
        phases = LoadPhases(self._loop.time)
        if resident.takes is not None and resident.takes.host is not None:
            taken = resident.takes.memory
            gpu.ledger.move(taken, resident.memory, taken.granted_bytes)
        try:
            await self._make_room(gpu, resident)
            phases.end("room")
            resident.progress.step()
            begun_s = self._loop.time()
            if not resident.ahead:
                await self._wait_for_weights(gpu, resident)
            phases.end("weights")
            resident.progress.step()
            await self._choose_runtime(gpu, resident)
            hosted = await self._host(gpu, resident, phases)
            if hosted.closed.done():  # whoever was told of that found no resident with it
                raise LoadFailure(resident.model, f"its worker ended: {hosted.closed.result()}")
        except (LoadFailure, WeightStoreError) as error:
            log.warning("%s: %s", gpu.id, error)
            await self._fail(gpu, resident, error)
            return
        except Exception as error:  # else who waits for the model waits for ever
            log.exception("%s: loading %s", gpu.id, resident.model)
            await self._fail(gpu, resident, LoadFailure(resident.model, repr(error)))
            return
        now_s = self._loop.time()
        if resident.takes is not None and source is Tier.HOST:
            source = Tier.CONTEXT
        resident.takes = None
        news = self._note_context(gpu, resident, hosted)
        gpu.ledger.note_loaded(resident.memory, hosted.memory_bytes)
        resident.load_spans = phases.spans
        resident.mark_loaded(hosted, now_s)
        gpu.update_limits()
        load_s = now_s - begun_s
        self.meters.loaded(source.name.lower(), load_s, phases)
        log.info("%s was loaded on %s in %.3f s: %s", resident.model, gpu.id, load_s, phases)
        larger = hosted.memory_bytes > resident.reserved_bytes
        size_bytes = hosted.memory_bytes if larger else None
        shares, share = resident.shares is not None, resident.gpu_share
        self.reports.report(
            ModelLoaded(gpu.id, resident.model, load_s, source, size_bytes, shares, share)
        )
        if news:
            self.short()

    def _note_context(self, gpu: HostGpu, resident: ModelOnGpu, hosted: HostedModel) -> bool:
        """Note what the model's process takes without it; return whether that is news."""
        news = gpu.learn_context(hosted.overhead_bytes)
        if resident.shares is not None:
            news |= gpu.measured_shared(resident.shares, hosted.overhead_bytes)
            news |= resident.shares.models == 1
        return news

    async def _fail(self, gpu: HostGpu, resident: ModelOnGpu, error: GpuManagerError) -> None:
        """Report a load that failed; what waited for it fails, or if nobody did, waits again."""
        await self._give_up(gpu, resident)
        lease = resident.lease
        given_up = not resident.ahead and self.leases.nobody_waits(gpu.id, resident.model, lease)
        after = AfterLoss.REQUEUE if given_up else AfterLoss.FAIL
        if gpu.residents.get(resident.model) is resident:
            del gpu.residents[resident.model]
        resident.mark_lost(error)
        self._forget(gpu, resident)
        self.meters.count(metrics.LOAD_FAILURES, gpu.id)
        self.reports.report(LoadFailed(gpu.id, resident.model, str(error), after, lease))

    async def _make_room(self, gpu: HostGpu, resident: ModelOnGpu) -> None:
        """Grant the memory that the scheduler assumed; report a shortage and wait if it lacks."""
        needed_bytes = resident.reserved_bytes
        grant = partial(gpu.ledger.grow, resident.memory, needed_bytes)
        await self._granted(gpu, resident, needed_bytes, grant)

    async def _choose_runtime(self, gpu: HostGpu, resident: ModelOnGpu) -> None:
        """Host the model as its function wishes; a process that others share needs memory, too."""
        model = self.weights.catalogue.get(resident.model)
        resident.runtime = self._runtime.result().hosting(model.wishes.runtime, model.id)
        resident.gpu_share, resident.merged = model.wishes.share, model.wishes.merged
        if resident.runtime == STREAM:
            grant = partial(gpu.share, resident, model.tenant)
            await self._granted(gpu, resident, gpu.ledger.context_bytes, grant)

    async def _granted(
        self, gpu: HostGpu, resident: ModelOnGpu, needed_bytes: int, grant: Callable[[], int]
    ) -> None:
        """Wait until memory is granted: `grant` returns the bytes lacking, and nothing if it is."""
        short_bytes = grant()
        if not short_bytes:
            return
        if gpu.ledger.ever_fits(needed_bytes):
            with resident.progress.bounded_wait():
                short_bytes = await gpu.obtain(grant, self.reports, _ROOM_S)
            self.short()
        if short_bytes:
            detail = f"{short_bytes} of {needed_bytes} bytes are lacking on {gpu.id}"
            raise LoadFailure(resident.model, detail, out_of_memory=True)

    async def _wait_for_weights(self, gpu: HostGpu, resident: ModelOnGpu) -> None:
        """Wait for weights that the node lacks; a function that holds a lease sends them."""
        model, leases = resident.model, self.leases
        deadline_s, since_s = self._loop.time() + self.settings.weights_s, None
        while self.weights.tier(model) is Tier.ABSENT:
            now_s = self._loop.time()
            if now_s >= deadline_s or leases.nobody_waits(gpu.id, model, resident.lease):
                break
            if self.weights.catalogue.is_being_sent(model):
                since_s = None
            elif since_s is None:
                since_s = now_s
            leases.note_lacking(gpu.id, model, since_s)
            resident.progress.step()  # the function has `weights_s`, whatever it does
            await self.weights.catalogue.arrived.wait(min(deadline_s - now_s, _CHECK_S))
        leases.note_lacking(gpu.id, model, None)

    async def _host(self, gpu: HostGpu, resident: ModelOnGpu, phases: LoadPhases) -> HostedModel:
        """Have a process take the model while its weights are read; both are there on return."""
        model = self.weights.catalogue.get(resident.model)
        request = self.weights.store.request(model.digest, model.table)
        try:
            order = self._order(gpu, model, request, resident)
            hosted = await self._load_in_worker(order, request)
            try:
                resident.hold = await request.hold()
            except BaseException:
                await hosted.unload()
                raise
        finally:
            request.close()
        phases.add(hosted.load_spans)
        phases.add(_reading(request))
        phases.finish()
        return hosted

    async def _load_in_worker(self, order: LoadOrder, request: ImageRequest) -> HostedModel:
        """Load the model with the runtime; try a second time if the worker dies meanwhile."""
        for last_try in (False, True):
            order.progress.step()
            try:
                return await self._runtime.result().load(order)
            except (LoadFailure, NoWorker) as error:
                request.raise_failure()
                if isinstance(error, LoadFailure) and (error.out_of_memory or last_try):
                    raise
                if last_try:
                    raise LoadFailure(order.model, str(error)) from error
                log.warning("%s; trying again", error)
        raise AssertionError("unreachable")

    def _order(
        self, gpu: HostGpu, model: TenantModel, request: ImageRequest, resident: ModelOnGpu
    ) -> LoadOrder:
        emulation = self.settings.emulation
        total_bytes = model.table.total_bytes
        per_gib_s = emulation.load_s_per_gib * total_bytes / GIB
        begin_transfer = partial(gpu.paths.load, f"{model.id} on {gpu.id}", resident.urgency)
        feed = ImageFeed(request, total_bytes, begin_transfer)
        arrives = request.arriving is not None or gpu.paths.is_limited
        resident.progress.moved_bytes = feed.moved_bytes
        least_s = emulation.context_s + emulation.load_s + per_gib_s
        resident.progress.copy_s = least_s + total_bytes / GIB
        return LoadOrder(
            model=model.id,
            tenant=model.tenant,
            gpu=gpu.id,
            device=gpu.device.worker_device,
            digest=model.digest,
            table=model.table.storages,
            total_bytes=total_bytes,
            image=request.descriptor,
            limit_bytes=gpu.limit_bytes(resident),
            emulation=Emulation(emulation.load_s + per_gib_s, emulation.run_s),
            turns=gpu.turns,
            slots=len(gpu.spec.slot_specs()),
            arrival=feed if arrives else None,
            emptied=None if resident.takes is None else resident.takes.host,
            runtime=resident.runtime,
            gpu_share=resident.gpu_share,
            merged=resident.merged,
            together_bytes=gpu.together_bytes(resident),
            paths=gpu.paths,
            urgency=resident.urgency,
            progress=resident.progress,
        )

    def _forget(self, gpu: HostGpu, resident: ModelOnGpu) -> None:
        """Release the memory of a model that has left, and of its process if that has ended."""
        ended = gpu.unshare(resident)
        gpu.forget(resident)
        if ended:
            self.short()

    # -- unloading ------------------------------------------------------------------------------

    def _pop(self, gpu: HostGpu, model: ModelId) -> ModelOnGpu | None:
        """Take a model from the residents; None if it was lost before the order was given."""
        resident = gpu.residents.pop(model, None)
        if resident is not None:
            resident.mark_lost(NoWorker(model, "it was unloaded"))
        return resident

    async def _unload(self, gpu: HostGpu, resident: ModelOnGpu) -> None:
        await resident.stop_loading()
        await self._give_up(gpu, resident)
        if resident.hosted is not None:
            for feature in self.features:
                await feature.rescue(resident.hosted)
            await resident.hosted.unload()
        self._forget(gpu, resident)
        self.weights.report(resident.model)

    # -- processes without a model ---------------------------------------------------------------

    async def _give_up(self, gpu: HostGpu, resident: ModelOnGpu) -> None:
        """End the process that a model should have taken, unless it has."""
        context, resident.takes = resident.takes, None
        if context is not None:
            await self._end_process(gpu, context)

    async def _empty(self, gpu: HostGpu, resident: ModelOnGpu, context: ContextOnGpu) -> None:
        await resident.stop_loading()
        await self._give_up(gpu, resident)
        host: EmptyHost | None = None
        if resident.hosted is not None:
            for feature in self.features:
                await feature.rescue(resident.hosted)
            host = await resident.hosted.empty()
        if host is not None and host.closed.done():
            host = None  # it has ended since
        if gpu.unshare(resident):
            self.short()
        if host is not None:
            short_bytes = gpu.ledger.move(resident.memory, context.memory, host.memory_bytes)
            if short_bytes:
                log.warning("%s: %d bytes lack for a context", gpu.id, short_bytes)
                await host.end()
                host = None
        gpu.forget(resident)
        if host is None:
            self._report_context_lost(gpu, context)
            return
        context.host = host
        log.info("%s has left %s, and its process stays", context.model, gpu.id)
        if gpu.contexts.get(context.model) is not context:
            self.weights.report(context.model)  # a model takes the process, or an order ends it
        elif context.model in gpu.residents:
            self.short()  # the model was ordered to come back, in another process
        else:
            self.reports.report(ContextKept(gpu.id, context.model, host.memory_bytes))

    async def _end_and_report(self, gpu: HostGpu, context: ContextOnGpu) -> None:
        await self._end_process(gpu, context)
        self.weights.report(context.model)

    async def _end_process(self, gpu: HostGpu, context: ContextOnGpu) -> None:
        if context.emptying is not None:
            await asyncio.wait({context.emptying})
        if context.host is not None:
            await context.host.end()
        gpu.ledger.release(context.memory)
        gpu.update_limits()

    def _report_context_lost(self, gpu: HostGpu, context: ContextOnGpu) -> None:
        if gpu.contexts.get(context.model) is not context:
            self.weights.report(context.model)  # as above
            return
        del gpu.contexts[context.model]
        if context.model in gpu.residents:
            self.short()
        else:
            self.weights.report(context.model, gpu.id)


def _reading(request: ImageRequest) -> list[LoadSpan]:
    """Return the parts of reading an image: its bytes, and what verifying took beyond them."""
    times = None if request.arriving is None else request.arriving.times
    if times is None:
        return []
    return [
        LoadSpan("read", times.begun_s, times.read_s),
        LoadSpan("verify", times.read_s, times.verified_s),
    ]
