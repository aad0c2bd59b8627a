"""What models leave as they step down: empty processes, stored weights, and their reports.

When a model steps down is the scheduler's decision, and does not belong here.
"""

import asyncio
import logging
from collections.abc import Callable

from cache_manager.model.ids import GpuId, ModelId, NodeId, Tier
from common.tasks import BackgroundTasks
from gpu_manager.errors import UnknownImage, WeightStoreError
from gpu_manager.node.residents import ContextOnGpu, HostGpu, ModelOnGpu
from gpu_manager.node.tenant_models import Catalogue, TenantModel
from gpu_manager.runtimes.runtime import EmptyHost, StayingData
from gpu_manager.weights.store import WeightStore
from scheduler.api import ContextKept, ModelDemoted, NodeReports

log = logging.getLogger(__name__)


class TierReports:
    """Reports the tiers of models; those whose weights the node has lost are forgotten."""

    def __init__(
        self, node: NodeId, store: WeightStore, catalogue: Catalogue, reports: NodeReports
    ) -> None:
        self._node = node
        self._store = store
        self._catalogue = catalogue
        self._reports = reports

    def tier(self, model: ModelId) -> Tier:
        """Return where the node has a model's weights; ABSENT for models that it does not know."""
        try:
            return self._store.tier(self._catalogue.get(model).digest)
        except WeightStoreError:
            return Tier.ABSENT

    def report(self, model: ModelId, gpu: GpuId | None = None) -> None:
        """Report where a model's weights are; `gpu` is one that has lost it, or its process."""
        self._reports.report(ModelDemoted(self._node, gpu, model, self.tier(model)))

    def report_changed(self, *digests: str) -> None:
        """Report the tiers that have changed, of these weights and others.

        Models whose weights this node no longer has are forgotten: their functions send them again.
        """
        for digest in self._store.take_changed().union(digests):
            tier = self._store.tier(digest)
            for model in self._catalogue.with_weights(digest):
                if tier is not model.reported:
                    model.reported = tier
                    self.report(model.id)
                if tier is Tier.ABSENT:
                    self._catalogue.remove(model)


class WeightSteps:
    """Moves weights down, unless a model needs them, and reports where they are.

    Models of several tenants may share weights: those move as far as all of the models may.
    """

    def __init__(
        self,
        store: WeightStore,
        catalogue: Catalogue,
        tiers: TierReports,
        on_a_gpu: Callable[[ModelId], bool],
    ) -> None:
        """`on_a_gpu` says whether a model is loaded or being loaded."""
        self._store = store
        self._catalogue = catalogue
        self._tiers = tiers
        self._on_a_gpu = on_a_gpu
        self._tasks = BackgroundTasks(log, "moving stored weights down")
        self._under_way: dict[str, asyncio.Task[None]] = {}  # by digest, the last one

    def order(self, name: ModelId, tier: Tier) -> None:
        """Move a model's weights down to this tier; orders about the same weights take turns."""
        try:
            model = self._catalogue.get(name)
        except UnknownImage:
            self._tiers.report(name)
            return
        model.lowest = tier
        before = self._under_way.get(model.digest)
        task = self._tasks.start(self._step(model, before))
        self._under_way[model.digest] = task
        task.add_done_callback(lambda _: self._forget(model.digest, task))

    def need(self, name: ModelId) -> asyncio.Task[None] | None:
        """Keep a model's weights from now on; return the step that is under way, if any."""
        try:
            model = self._catalogue.get(name)
        except UnknownImage:
            return None
        model.lowest = None
        return self._under_way.get(model.digest)

    async def _step(self, model: TenantModel, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait({before})
        reported = model.reported
        try:
            await self._move(model.digest)
        finally:
            self._tiers.report_changed(model.digest)
            if model.reported is reported:
                self._tiers.report(model.id)

    async def _move(self, digest: str) -> None:
        sharing = self._catalogue.with_weights(digest)
        ordered = [model.lowest for model in sharing if model.lowest is not None]
        is_on_a_gpu = any(self._on_a_gpu(model.id) for model in sharing)
        if ordered and len(ordered) == len(sharing) and not is_on_a_gpu:
            loop = asyncio.get_running_loop()
            still = _still_ordered(sharing)
            await loop.run_in_executor(None, self._store.step_down, digest, min(ordered), still)

    def _forget(self, digest: str, task: asyncio.Task[None]) -> None:
        if self._under_way.get(digest) is task:
            del self._under_way[digest]


def _still_ordered(sharing: list[TenantModel]) -> Callable[[], bool]:
    """Whether no model has come to need the weights meanwhile; called on another thread."""
    return lambda: all(model.lowest is not None for model in sharing)


class EmptiedProcesses:
    """Empties the processes of models, and reports to the scheduler what becomes of them."""

    def __init__(
        self,
        tiers: TierReports,
        reports: NodeReports,
        resync: Callable[[], None],
        data: StayingData,
    ) -> None:
        """`resync` is called where a single report would be misunderstood."""
        self._data = data
        self._tiers = tiers
        self._reports = reports
        self._resync = resync

    def empty(self, gpu: HostGpu, resident: ModelOnGpu) -> None:
        """Have a model that is no resident any more leave its process; keep the process if it can.

        What the model left there earlier ends.
        """
        self.end(gpu, resident.model)
        process = None if resident.hosted is None else resident.hosted.host
        context = gpu.contexts[resident.model] = ContextOnGpu(resident.model, process)
        context.emptying = gpu.leave(self._empty(gpu, resident, context))

    def end(self, gpu: HostGpu, model: ModelId) -> None:
        context = gpu.contexts.pop(model, None)
        if context is not None:
            gpu.leave(self._end_and_report(gpu, context))

    async def give_up(self, gpu: HostGpu, resident: ModelOnGpu) -> None:
        """End the process that a model should have taken, unless it has."""
        context, resident.takes = resident.takes, None
        if context is not None:
            await self._end(gpu, context)

    def lost(self, gpu: HostGpu, host: EmptyHost, cause: str) -> bool:
        """Release and report an empty process that ended without an order; False if it is not here.

        It may be another GPU's, or one that an order ends.
        """
        contexts = [context for context in gpu.contexts_now() if context.host is host]
        for context in contexts:
            log.warning("what %s left on %s was lost: %s", context.model, gpu.id, cause)
            context.host = None
            gpu.ledger.release(context.memory)
            gpu.update_limits()
            self._report_lost(gpu, context)
        return bool(contexts)

    async def _empty(self, gpu: HostGpu, resident: ModelOnGpu, context: ContextOnGpu) -> None:
        await resident.stop_loading()
        await self.give_up(gpu, resident)
        host: EmptyHost | None = None
        if resident.hosted is not None:
            await self._data.rescue(resident.hosted)
            host = await resident.hosted.empty()
        if host is not None and host.closed.done():
            host = None  # it has ended since
        if gpu.unshare(resident):
            self._resync()
        if host is not None:
            short_bytes = gpu.ledger.move(resident.memory, context.memory, host.memory_bytes)
            if short_bytes:
                log.warning("%s: %d bytes lack for a context", gpu.id, short_bytes)
                await host.end()
                host = None
        gpu.forget(resident)
        if host is None:
            self._report_lost(gpu, context)
            return
        context.host = host
        log.info("%s has left %s, and its process stays", context.model, gpu.id)
        if gpu.contexts.get(context.model) is not context:
            self._tiers.report(context.model)  # a model takes the process, or an order ends it
        elif context.model in gpu.residents:
            self._resync()  # the model was ordered to come back, in another process
        else:
            self._reports.report(ContextKept(gpu.id, context.model, host.memory_bytes))

    async def _end_and_report(self, gpu: HostGpu, context: ContextOnGpu) -> None:
        await self._end(gpu, context)
        self._tiers.report(context.model)

    async def _end(self, gpu: HostGpu, context: ContextOnGpu) -> None:
        if context.emptying is not None:
            await asyncio.wait({context.emptying})
        if context.host is not None:
            await context.host.end()
        gpu.ledger.release(context.memory)
        gpu.update_limits()

    def _report_lost(self, gpu: HostGpu, context: ContextOnGpu) -> None:
        if gpu.contexts.get(context.model) is not context:
            self._tiers.report(context.model)  # as above
            return
        del gpu.contexts[context.model]
        if context.model in gpu.residents:
            self._resync()
        else:
            self._tiers.report(context.model, gpu.id)
