"""A GPU manager that belongs to a cluster: its scheduler is elsewhere."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from cache_manager.model import NodeId
from gpu_manager.api import GpuManager, MakeRuntime, NodeSettings
from gpu_manager.attachment import Attachment
from gpufaas.node import processes
from scheduler.stream import StreamTimes

log = logging.getLogger(__name__)

_TIMES = StreamTimes()


@asynccontextmanager
async def joined_node(
    settings: NodeSettings,
    schedulers: Sequence[str],
    secret: bytes,
    make_runtime: MakeRuntime = processes,
    times: StreamTimes = _TIMES,
) -> AsyncIterator[tuple[GpuManager, Attachment]]:
    """Run a node of a cluster; at the end its GPUs are drained, and it leaves."""
    attachment = Attachment(schedulers, NodeId(settings.node), secret, times)
    async with attachment, GpuManager(settings, attachment, make_runtime, attachment) as manager:
        attaching = asyncio.get_running_loop().create_task(_attached(attachment, settings.node))
        try:
            yield manager, attachment
        finally:
            attaching.cancel()
            attachment.drain(device.id for device in manager.devices)


async def _attached(attachment: Attachment, node: str) -> None:
    await attachment.attached()
    log.info("node %s is attached", node)
