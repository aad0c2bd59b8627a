"""A process that keeps jobs and makes them, for tests that kill it.

`python -m tests.kit.processes.job_process FOLDER CALLBACK_URL [NATS_URL]`:
every line on standard input is the
id of a job to keep; it is printed once it is kept. Each call that is made is written to
FOLDER/made. The process runs until it is killed, or until everything is made after a line `end`.
"""

import asyncio
import hashlib
import os
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

from gateway_ext.calls.invoke import StreamedResponse
from gateway_ext.errors import GatewayError
from gateway_ext.jobs.attempts import BackOff, RetryPolicy
from gateway_ext.jobs.queue import JobQueue, QueueLimits
from gateway_ext.jobs.values import AsyncCall, StoredBody, whole
from gateway_ext.jobs.worker import JobWorker, JobWorkerSettings
from tests.kit.engines.nats_servers import a_shared_queue, settings_for
from tests.kit.waiting import eventually
from tests.kit.worlds.job_world import ANYWHERE, LOG, a_queue, call, put

PATIENCE = RetryPolicy(attempts=1000, back_off=BackOff(first_s=0.01, most_s=0.05))
SETTINGS = JobWorkerSettings(patience=PATIENCE, callback_rule=ANYWHERE)
_MOST_S = 3600.0  # the test that started this process has the deadline
LIMITS = QueueLimits(inline_bytes=2000)


def body_of(call_id: str) -> bytes:
    """Small ones and large ones, each as its id says."""
    number = int(call_id)
    return hashlib.sha256(call_id.encode()).digest() * (1 if number % 2 else 200)


class Writing:
    """A function that writes down what it was called with, and is not always able."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    @asynccontextmanager
    async def call(self, one: AsyncCall, body: StoredBody) -> AsyncIterator[StreamedResponse]:
        if time.time_ns() % 5 == 0:
            yield StreamedResponse(503, [], _body(b"not now"))
            return
        content = await whole(body)
        right = content == body_of(one.id)
        os.write(self._file, f"{one.id} {'right' if right else 'wrong'}\n".encode())
        await asyncio.sleep(0.005)
        yield StreamedResponse(200, [], _body(content[::-1]))


async def _body(content: bytes) -> AsyncGenerator[bytes, None]:
    yield content


def _queue(folder: Path, nats_url: str) -> AbstractAsyncContextManager[JobQueue]:
    if not nats_url:
        return a_queue(folder, LIMITS)
    return a_shared_queue(folder, settings_for(nats_url), LIMITS)


async def _main(folder: Path, callback_url: str, nats_url: str = "") -> None:
    async with (
        _queue(folder, nats_url) as queue,
        JobWorker(queue, Writing(folder / "made"), lambda _: None, SETTINGS, LOG),
    ):
        print("open", flush=True)  # noqa: T201 - this is what the test reads
        async with asyncio.TaskGroup() as keeping:
            while (line := (await asyncio.to_thread(sys.stdin.readline)).strip()) != "end":
                url = callback_url if int(line) % 3 else ""
                keeping.create_task(_keep(queue, line, url))
        tally = queue.tally
        await eventually(lambda: not tally.calls and not tally.callbacks, within_s=_MOST_S)
        print(f"dead {tally.dead}", flush=True)  # noqa: T201


async def _keep(queue: JobQueue, call_id: str, url: str) -> None:
    one = call(call_id, queued_at_s=time.time(), callback_url=url)
    while True:  # as a client that repeats a refused request
        try:
            await put(queue, one, body_of(call_id))
            break
        except GatewayError as error:
            LOG.error("call %s is not kept: %s", call_id, error)
            await asyncio.sleep(0.1)
    print(call_id, flush=True)  # noqa: T201


if __name__ == "__main__":
    asyncio.run(_main(Path(sys.argv[1]), *sys.argv[2:]))
