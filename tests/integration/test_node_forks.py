"""The fork server when the client that ordered a worker stops waiting."""

import asyncio

import pytest

from common.liveness import LivenessTimes
from common.time_limits import time_limit
from gpu_manager.runtimes.fork_client import ForkServer
from tests.kit.nodes.worker_client import alive
from tests.kit.processes.stopped_process import stop
from tests.kit.waiting import eventually, wait_until

pytestmark = pytest.mark.group("node", seconds=130)


@pytest.fixture(scope="module", autouse=True)
def quick_fork_servers() -> None:
    """None: as they are started is how they are tested."""


async def test_workers_live_on_when_others_were_given_up_while_they_were_made() -> None:
    server = ForkServer()
    impatient = asyncio.ensure_future(server.fork())
    await asyncio.sleep(0.2)
    impatient.cancel()
    first = await server.fork()
    process = server.pid
    for tick in range(20):
        impatient = asyncio.ensure_future(server.fork())
        await asyncio.sleep(tick / 4000)
        impatient.cancel()

    second = await server.fork()

    assert server.pid == process
    assert not first.exited.done()
    for worker in (first, second):
        worker.kill("the test is over")
        await worker.wait_for_exit("the test is over")
    await server.close()


async def test_fork_server_is_gone_at_once_when_it_is_closed_while_it_starts() -> None:
    """Its start takes for ever: it is stopped, which nobody notices."""
    server = ForkServer(liveness=LivenessTimes(stopped_s=600.0))
    impatient = asyncio.ensure_future(server.fork())
    await eventually(lambda: server.pid is not None, "it starts")
    impatient.cancel()
    process = server.pid
    assert process is not None
    stop(process)

    async with time_limit(20.0):
        await server.close()

    wait_until(lambda: not alive(process), "the server has ended")
