"""Processes that are forked ahead, without a device: a load that finds no context takes one."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import wraps

import torch

from cache_manager.model.ids import MIB
from gpu_manager.runtimes.process import ProcessRuntime, ProcessSettings
from gpu_manager.runtimes.runtime import HostedModel, LoadOrder
from gpu_manager.runtimes.worker_pool import PoolSettings
from tests.kit.processes.fork_servers import server_pid
from tests.kit.processes.open_files import open_files, opened_since
from tests.kit.waiting import eventually
from tests.kit.worlds.caller import DIGEST, sealed_image
from tests.kit.worlds.worker_machine import Watcher, children_of

CONTEXT_S, CONTEXT_BYTES = 0.3, 20 * MIB
POOL = PoolSettings(
    least=0, most=0, refill_delay_s=0.0, context_s=CONTEXT_S, context_bytes=CONTEXT_BYTES
)


class World:
    """A runtime without spare contexts, and an image."""

    def __init__(self, runtime: ProcessRuntime) -> None:
        self.runtime = runtime
        self._image, self._table, self._total = sealed_image(torch.ones(4096))

    def forked(self) -> list[int]:
        """The processes that the fork server has made and that live."""
        server = server_pid(self.runtime)
        return [] if server is None else children_of(server)

    async def ready(self) -> int:
        """Wait for the one that is forked ahead, and until those that have died are gone."""
        await eventually(self._is_ready, "a process is forked ahead")
        (pid,) = self._idle()
        return pid

    def _is_ready(self) -> bool:
        return self.runtime.forked == 1 and len(self._idle()) == 1

    def _idle(self) -> set[int]:
        return set(self.forked()) - {found.host.pid for found in self.runtime.hosted}

    async def load(self, model: str) -> HostedModel:
        names = (model, "t", "g0", "cpu", DIGEST, self._table, self._total, self._image)
        return await self.runtime.load(LoadOrder(*names, limit_bytes=1 << 30))

    def close(self) -> None:
        os.close(self._image)


@asynccontextmanager
async def world() -> AsyncIterator[World]:
    before = open_files()
    runtime = ProcessRuntime(Watcher(), ["cpu"], ProcessSettings(pool=POOL, load_timeout_s=20))
    runtime.prepare()
    it = World(runtime)
    try:
        yield it
    finally:
        server = server_pid(runtime)
        await runtime.close()
        it.close()
        assert server is None or not children_of(server)
        # One that was being forked ends a moment after the server; the loop closes its pidfd.
        await eventually(
            lambda: not opened_since(before),
            "no descriptor is left",
            instead=lambda: str(opened_since(before)),
        )


def lively(test: Callable[[World], Awaitable[None]]) -> Callable[[], None]:
    """Run a test with a world; it leaves no process and no descriptor."""

    async def with_world() -> None:
        async with world() as it:
            await test(it)

    @wraps(test)
    def run() -> None:
        before = open_files()
        asyncio.run(with_world())
        assert not opened_since(before)

    del run.__wrapped__  # or pytest would ask for a fixture `it`
    return run


@lively
async def test_load_takes_the_process_that_was_forked_ahead_and_another_one_follows(
    it: World,
) -> None:
    for model in ("first", "second"):
        ahead = await it.ready()
        hosted = await it.load(model)
        assert hosted.host is not None
        assert hosted.host.pid == ahead
        assert await it.ready() != ahead


@lively
async def test_forked_process_has_no_context_until_a_load_takes_it(it: World) -> None:
    await it.ready()
    begun_s = asyncio.get_running_loop().time()
    hosted = await it.load("m")
    (context,) = [span for span in hosted.load_spans if span.phase == "context"]
    assert context.begin_s >= begun_s
    assert context.end_s - context.begin_s >= CONTEXT_S
    assert hosted.overhead_bytes >= CONTEXT_BYTES


@lively
async def test_no_load_gets_a_forked_process_that_has_died(it: World) -> None:
    dead = await it.ready()
    os.kill(dead, signal.SIGKILL)
    hosted = await it.load("m")
    assert hosted.host is not None
    assert hosted.host.pid != dead
    assert dead not in (await it.ready(), *it.forked())


@lively
async def test_loads_at_once_all_succeed_when_one_process_is_forked_ahead(it: World) -> None:
    ahead = await it.ready()
    hosted = await asyncio.gather(*(it.load(f"m{number}") for number in range(3)))
    pids = [found.host.pid for found in hosted if found.host is not None]
    assert len(set(pids)) == 3
    assert ahead in pids


@lively
async def test_forked_process_is_replaced_with_the_fork_server(it: World) -> None:
    await it.ready()
    server = server_pid(it.runtime)
    assert server is not None
    os.kill(server, signal.SIGKILL)
    await eventually(lambda: server_pid(it.runtime) not in {None, server}, "another server")
    hosted = await it.load("m")
    assert hosted.host is not None
    await it.ready()
