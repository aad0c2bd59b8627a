"""Removes dead letters beyond the limits on age, number and bytes, once a minute."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from logging import Logger

from gateway_ext.errors import QueueFailed
from gateway_ext.jobs.queue.job_queue import JobQueue

_EVERY_S = 60.0


@asynccontextmanager
async def expiring(
    queue: JobQueue, log: Logger, every_s: float = _EVERY_S
) -> AsyncIterator[asyncio.Task[None]]:
    """Remove expired dead letters every `every_s` until the context exits."""
    looking = asyncio.create_task(_keep_looking(queue, log, every_s), name="dead letters")
    try:
        yield looking
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)


async def _keep_looking(queue: JobQueue, log: Logger, every_s: float) -> None:
    while True:
        try:
            count = await queue.expire(queue.now_s())
        except QueueFailed as error:
            log.warning("expired dead letters are not removed: %s", error)
        else:
            if count:
                log.info("%d expired dead letters were removed", count)
        await asyncio.sleep(every_s)
