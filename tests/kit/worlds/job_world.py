"""Builders for tests of jobs: calls, a queue in a folder, functions with scripted answers."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from common.http.asgi import Header
from gateway_ext.calls.invoke import StreamedResponse
from gateway_ext.errors import GatewayError
from gateway_ext.jobs.callbacks import CallbackRule
from gateway_ext.jobs.queue import JobQueue, QueueLimits, opened
from gateway_ext.jobs.sqlite.queue import SqliteQueue
from gateway_ext.jobs.values import (
    AsyncCall,
    JobKind,
    JobLane,
    JobNumber,
    StoredBody,
    call_lane,
    whole,
)
from gateway_ext.model import FunctionId

LOG = logging.getLogger("tests.jobs")
ECHO = FunctionId("openfaas-fn", "echo")
ANYWHERE = CallbackRule(allowed=("0.0.0.0/0", "::/0", "localhost"))
CALLBACKS = JobLane(JobKind.CALLBACK, "there:80")


def call(
    call_id: str = "c1",
    function: FunctionId = ECHO,
    *,
    queued_at_s: float = 100.0,
    callback_url: str = "",
) -> AsyncCall:
    return AsyncCall(
        id=call_id,
        function=function,
        method="POST",
        path=b"/a%20b",
        query=b"q=1",
        headers=[(b"content-type", b"text/plain"), (b"x-odd", b"\xff")],
        queued_at_s=queued_at_s,
        callback_url=callback_url,
    )


@asynccontextmanager
async def a_queue(folder: Path, limits: QueueLimits | None = None) -> AsyncIterator[SqliteQueue]:
    async with opened(SqliteQueue(folder, limits or QueueLimits(), LOG)) as queue:
        yield queue


async def put(queue: JobQueue, one: AsyncCall, body: bytes = b"hello") -> bool:
    spool = queue.spool()
    try:
        await spool.write(body)
        return await queue.put(one, spool)
    finally:
        await spool.discard()


async def claimed(queue: JobQueue, function: FunctionId = ECHO, at_s: float = 1e12) -> JobNumber:
    (job,) = await queue.claim([call_lane(function)], at_s)
    return job.number


Behaviour = Callable[[AsyncCall, bytes, int], "ScriptedAnswer | GatewayError"]


@dataclass
class ScriptedAnswer:
    """What a function answers, after some time."""

    status: int = 200
    body: bytes = b"done"
    headers: Sequence[Header] = ()
    after_s: float = 0.0
    breaks: GatewayError | None = None
    called: bool = False


@dataclass
class Functions:
    """Answers calls by `behave`, which gets the call, its body and the number of earlier calls."""

    behave: Behaviour
    made: list[tuple[str, float]] = field(default_factory=list)
    now: int = 0
    most: int = 0

    def times(self, call_id: str) -> int:
        return sum(one == call_id for one, _ in self.made)

    @asynccontextmanager
    async def call(self, one: AsyncCall, body: StoredBody) -> AsyncIterator[StreamedResponse]:
        before = self.times(one.id)
        content = await whole(body)
        self.made.append((one.id, time.monotonic()))
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            answer = self.behave(one, content, before)
            if isinstance(answer, GatewayError):
                raise answer
            await asyncio.sleep(answer.after_s)
            headers = list(answer.headers)
            yield StreamedResponse(answer.status, headers, _body(answer), called=answer.called)
        finally:
            self.now -= 1


async def _body(answer: ScriptedAnswer) -> AsyncGenerator[bytes, None]:
    yield answer.body
    if answer.breaks is not None:
        raise answer.breaks
