"""The job queues that pass the same tests: how a test opens each, and what it puts there."""

import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

from gateway_ext.jobs.queue import JobQueue, QueueLimits
from gateway_ext.jobs.values import call_lane
from gateway_ext.model import FunctionId
from tests.kit.engines.nats_servers import NatsServer, a_shared_queue, settings_for
from tests.kit.waiting import PATIENCE_S
from tests.kit.worlds.job_world import ECHO, a_queue

Open = Callable[[], AbstractAsyncContextManager[JobQueue]]

OTHER = FunctionId("team", "other")
LANE = call_lane(ECHO)
LIMITS = QueueLimits(
    body_bytes=100_000,
    inline_bytes=1_000,
    waiting_per_function=5,
    waiting_bytes=300_000,
    dead=3,
    dead_bytes=120_000,
    dead_age_s=1_000.0,
)
LARGE = bytes(range(250)) * 200


@asynccontextmanager
async def sqlite(folder: Path) -> AsyncIterator[JobQueue]:
    async with a_queue(folder, LIMITS) as queue:
        yield queue


@asynccontextmanager
async def jetstream(server: NatsServer, folder: Path) -> AsyncIterator[JobQueue]:
    """A queue that is there once it is opened, and stays, however slow the server is."""
    waits = {"connect_s": PATIENCE_S, "answer_s": PATIENCE_S}
    settings = settings_for(server.url, prefix=prefix_in(folder), **waits)
    async with a_shared_queue(folder, settings, LIMITS) as queue:
        yield queue


def prefix_in(folder: Path) -> str:
    """The names of the streams of the test with this folder: the server is shared."""
    return hashlib.sha256(str(folder).encode()).hexdigest()[:16]
