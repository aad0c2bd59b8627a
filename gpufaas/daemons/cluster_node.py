"""A GPU manager attached to a cluster's schedulers."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from cache_manager.model.ids import NodeId
from gpu_manager.api import GpuManager, MakeRuntime, NodeSettings
from gpu_manager.attachment.attachment import Attachment
from gpufaas.daemons.embedded_node import worker_processes
from scheduler.wire.node_stream import StreamTimes

log = logging.getLogger(__name__)

_TIMES = StreamTimes()


@asynccontextmanager
async def cluster_node(
    settings: NodeSettings,
    schedulers: Sequence[str],
    secret: bytes,
    make_runtime: MakeRuntime | None = None,
    times: StreamTimes = _TIMES,
) -> AsyncIterator[tuple[GpuManager, Attachment]]:
    """Run a node of a cluster; at the end its GPUs are drained and it detaches."""
    attachment = Attachment(schedulers, NodeId(settings.node), secret, times)
    make_runtime = make_runtime or worker_processes(settings)
    async with attachment, GpuManager(settings, attachment, make_runtime, attachment) as manager:
        attaching = asyncio.get_running_loop().create_task(_log_attached(attachment, settings.node))
        try:
            yield manager, attachment
        finally:
            attaching.cancel()
            attachment.drain(device.id for device in manager.devices)


async def _log_attached(attachment: Attachment, node: str) -> None:
    await attachment.attached()
    log.info("node %s is attached", node)
