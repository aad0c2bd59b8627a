"""Workers for a GPU that CUDA does not let them use: the words, and no loop of new workers."""

import asyncio
import os

import pytest
import torch

from gpu_manager.errors import LoadFailure
from gpu_manager.runtimes.process import ProcessRuntime, ProcessSettings
from gpu_manager.runtimes.runtime import LoadOrder
from gpu_manager.runtimes.worker_pool import PoolSettings
from tests.kit.processes.fork_servers import server_pid
from tests.kit.waiting import eventually
from tests.kit.worlds.caller import DIGEST, sealed_image
from tests.kit.worlds.worker_machine import Watcher, children_of

NOWHERE = "cuda:GPU-00000000-0000-0000-0000-000000000000"


async def test_load_fails_with_the_drivers_words_and_a_spare_waits() -> None:
    settings = ProcessSettings(pool=PoolSettings(forked=0, refill_delay_s=0.0), load_timeout_s=60)
    runtime = ProcessRuntime(Watcher(), [NOWHERE], settings)
    image, table, total = sealed_image(torch.ones(4))
    order = LoadOrder("m", "t", "g0", NOWHERE, DIGEST, table, total, image, limit_bytes=1 << 30)
    runtime.prepare()
    try:
        with pytest.raises(LoadFailure, match=r"the GPU cannot be used: .*(NVIDIA|CUDA)"):
            await runtime.load(order)
        await eventually(lambda: runtime.spares[NOWHERE] == 1, "there is a spare worker again")
        server = server_pid(runtime)
        assert server is not None
        (spare,) = runtime.spare_workers(NOWHERE)
        await asyncio.sleep(1.0)  # a pool that made one after the other would have done so
        assert runtime.spare_workers(NOWHERE) == (spare,)
        await eventually(lambda: children_of(server) == [spare.pid], "the other one has ended")
        assert runtime.spare_workers(NOWHERE) == (spare,)
    finally:
        await runtime.close()
        os.close(image)


async def test_spare_workers_that_die_are_made_ever_less_often() -> None:
    settings = ProcessSettings(pool=PoolSettings(forked=0, refill_delay_s=0.0), load_timeout_s=60)
    runtime = ProcessRuntime(Watcher(), ["cpu"], settings)
    runtime.prepare()
    loop, gaps = asyncio.get_running_loop(), []
    try:
        for _ in range(5):
            await eventually(lambda: runtime.spares["cpu"] == 1, "there is a spare worker")
            (spare,) = runtime.spare_workers("cpu")
            killed_s = loop.time()  # its death is seen later, and the pause begins with that
            spare.kill("the test")
            await spare.exited
            await eventually(lambda: runtime.spares["cpu"] == 1, "there is another one")
            gaps.append(loop.time() - killed_s)
    finally:
        await runtime.close()
    # Pauses of 0, 0.1, 0.3, 0.7 and 1.5 s: never less than that, however fast the machine is.
    assert all(gap >= 0.1 * (2**number - 1) - 0.01 for number, gap in enumerate(gaps))
