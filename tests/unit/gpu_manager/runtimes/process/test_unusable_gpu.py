"""Workers for a GPU that CUDA does not let them use: the words, and no loop of new workers."""

import asyncio
import os

import pytest
import torch

from gpu_manager.errors import LoadFailure
from gpu_manager.runtimes.process.process_runtime import ProcessRuntime, ProcessSettings
from gpu_manager.runtimes.process.worker_pool import PoolSettings
from gpu_manager.runtimes.runtime import LoadOrder
from tests.kit.waiting import eventually
from tests.kit.worlds.worker_machine import Watcher, children_of
from tests.unit.gpu_manager.worker.calls.caller import DIGEST, sealed_image

NOWHERE = "cuda:GPU-00000000-0000-0000-0000-000000000000"


async def test_load_fails_with_the_drivers_words_and_a_spare_waits() -> None:
    settings = ProcessSettings(pool=PoolSettings(refill_delay_s=0.0), load_timeout_s=60)
    runtime = ProcessRuntime(Watcher(), [NOWHERE], settings)
    image, table, total = sealed_image(torch.ones(4))
    order = LoadOrder("m", "t", "g0", NOWHERE, DIGEST, table, total, image, limit_bytes=1 << 30)
    await runtime.start()
    try:
        with pytest.raises(LoadFailure, match=r"the GPU cannot be used: .*(NVIDIA|CUDA)"):
            await runtime.load(order)
        await eventually(lambda: runtime.spares[NOWHERE] == 1, "there is a spare worker again")
        server = runtime.server_pid
        assert server is not None
        (spare,) = runtime.spare_workers(NOWHERE)
        await asyncio.sleep(1.0)  # a pool that made one after the other would have done so
        assert runtime.spare_workers(NOWHERE) == (spare,)
        assert children_of(server) == [spare.pid]
    finally:
        await runtime.close()
        os.close(image)
