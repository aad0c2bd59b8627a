"""Processes that models leave and that stay on their GPU: emptied, kept, taken, ended, lost."""

import asyncio
import logging
from collections.abc import Callable

from cache_manager.model.ids import ModelId
from gpu_manager.node.residents import ContextOnGpu, HostGpu, ModelOnGpu
from gpu_manager.node.stepping_down.tier_reports import TierReports
from gpu_manager.runtimes.runtime import EmptyHost, StayingData
from scheduler.api import ContextKept, NodeReports

log = logging.getLogger(__name__)


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
        """End the process that the model left on this GPU, if there is one."""
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
        found = [context for context in gpu.contexts_now() if context.host is host]
        for context in found:
            log.warning("what %s left on %s was lost: %s", context.model, gpu.id, cause)
            context.host = None
            gpu.ledger.release_context(context)
            gpu.update_limits()
            self._report_lost(gpu, context)
        return bool(found)

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
            short_bytes = gpu.ledger.leave(resident.model, context, host.memory_bytes)
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
        gpu.ledger.release_context(context)
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
