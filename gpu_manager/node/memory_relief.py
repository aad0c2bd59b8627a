"""Memory pressure: obtains GPU memory for a call that needs more than its model's limit."""

import asyncio
import logging
from collections.abc import Callable

from cache_manager.model.ids import ModelId
from gpu_manager.node.residents import HostGpu
from gpu_manager.runtimes.runtime import HostedModel
from scheduler.api import MemoryPressure, NodeReports

log = logging.getLogger(__name__)


class MemoryRelief:
    """Reports a shortage to the scheduler, which picks victims, and waits for their memory."""

    def __init__(self, reports: NodeReports, wait_s: float, resync: Callable[[], None]) -> None:
        """`resync` is called after a reported shortage has ended."""
        self._reports = reports
        self._wait_s = wait_s
        self._resync = resync

    async def relieve(self, gpu: HostGpu, hosted: HostedModel, need_bytes: int) -> bool:
        """Grant the model this many bytes; return False if impossible or if it takes too long."""
        resident = gpu.resident_of(hosted)
        if resident is None:
            return False
        need_bytes -= gpu.for_calls_bytes(resident)
        if not gpu.ledger.ever_fits(need_bytes):
            return False
        model = ModelId(hosted.order.model)
        short_bytes = gpu.ledger.grow(model, need_bytes)
        if not short_bytes:
            return True
        self._reports.report(MemoryPressure(gpu.id, short_bytes))
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._wait_s
        while gpu.resident_of(hosted) is not None:
            if not gpu.ledger.grow(model, need_bytes):
                break
            if not await gpu.change.wait(deadline_s - loop.time()):
                break
        self._resync()
        return gpu.resident_of(hosted) is not None and not gpu.ledger.grow(model, need_bytes)
