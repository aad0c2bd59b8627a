"""Builders for tests of jobs: calls, a queue in a folder, functions that answer as told."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from gateway_ext.asgi import Header
from gateway_ext.errors import GatewayError
from gateway_ext.jobs.bodies import Body, whole
from gateway_ext.jobs.calls import Answer
from gateway_ext.jobs.model import Call, JobNumber, Kind, Lane, call_lane
from gateway_ext.jobs.queue import JobQueue
from gateway_ext.jobs.sqlite.queue import SqliteQueue, sqlite_queue
from gateway_ext.jobs.tally import QueueLimits
from gateway_ext.model import FunctionId

LOG = logging.getLogger("tests.jobs")
ECHO = FunctionId("openfaas-fn", "echo")
CALLBACKS = Lane(Kind.CALLBACK, "there:80")


def call(
    call_id: str = "c1",
    function: FunctionId = ECHO,
    *,
    queued_at_s: float = 100.0,
    callback_url: str = "",
) -> Call:
    return Call(
        id=call_id,
        function=function,
        method="POST",
        path=b"/a%20b",
        query=b"q=1",
        headers=((b"content-type", b"text/plain"), (b"x-odd", b"\xff")),
        queued_at_s=queued_at_s,
        callback_url=callback_url,
    )


@asynccontextmanager
async def a_queue(folder: Path, limits: QueueLimits | None = None) -> AsyncIterator[SqliteQueue]:
    queue = await sqlite_queue(folder, limits or QueueLimits(), LOG)
    try:
        yield queue
    finally:
        await queue.close()


async def put(queue: JobQueue, one: Call, body: bytes = b"hello") -> bool:
    spool = queue.spool()
    try:
        await spool.write(body)
        return await queue.put(one, spool)
    finally:
        await spool.discard()


async def claimed(queue: JobQueue, function: FunctionId = ECHO, at_s: float = 1e12) -> JobNumber:
    (job,) = await queue.claim([call_lane(function)], at_s)
    return job.number


Behaviour = Callable[[Call, bytes, int], "Said | GatewayError"]


@dataclass
class Said:
    """What a function answers, after some time."""

    status: int = 200
    body: bytes = b"done"
    headers: Sequence[Header] = ()
    after_s: float = 0.0
    breaks: GatewayError | None = None


@dataclass
class Functions:
    """Answers calls as `behave` says, told the call, its body and how often it came before."""

    behave: Behaviour
    made: list[tuple[str, float]] = field(default_factory=list)
    now: int = 0
    most: int = 0

    def times(self, call_id: str) -> int:
        return sum(one == call_id for one, _ in self.made)

    @asynccontextmanager
    async def call(self, one: Call, body: Body) -> AsyncIterator[Answer]:
        before = self.times(one.id)
        content = await whole(body)
        self.made.append((one.id, time.monotonic()))
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            said = self.behave(one, content, before)
            if isinstance(said, GatewayError):
                raise said
            await asyncio.sleep(said.after_s)
            yield Answer(said.status, said.headers, _body(said))
        finally:
            self.now -= 1


async def _body(said: Said) -> AsyncIterator[bytes]:
    yield said.body
    if said.breaks is not None:
        raise said.breaks


async def soon(holds: Callable[[], object], within_s: float = 10.0) -> None:
    """Until it holds; a test that waits in vain fails."""
    async with asyncio.timeout(within_s):
        while not holds():
            await asyncio.sleep(0.005)
