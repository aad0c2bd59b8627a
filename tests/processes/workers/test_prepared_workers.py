"""The fork server and the spare workers: none before they are needed, and then once."""

import asyncio
import os

import pytest
import torch

from gpu_manager.runtimes.process import ProcessRuntime
from gpu_manager.runtimes.runtime import LoadOrder
from tests.kit.processes.fork_servers import server_pid
from tests.kit.waiting import eventually
from tests.kit.worlds.caller import DIGEST, sealed_image
from tests.kit.worlds.worker_machine import Watcher, children_of


@pytest.fixture(scope="module", autouse=True)
def quick_fork_servers() -> None:
    """None: when they are started is what is tested."""


async def test_no_process_runs_before_a_first_load_is_prepared_for() -> None:
    before = set(children_of(os.getpid()))
    runtime = ProcessRuntime(Watcher(), ["cpu"])
    await asyncio.sleep(0)  # whatever the constructor has started runs
    assert server_pid(runtime) is None
    runtime.prepare()
    runtime.prepare()
    try:
        await eventually(lambda: runtime.spares["cpu"] == 1, "there is a spare worker")
        assert set(children_of(os.getpid())) - before == {server_pid(runtime)}
    finally:
        await runtime.close()


async def test_one_fork_server_makes_all_workers_when_loads_and_orders_to_prepare_meet() -> None:
    before = set(children_of(os.getpid()))
    image, table, total = sealed_image(torch.ones(4))
    orders = [
        LoadOrder(f"m{number}", "t", "g0", "cpu", DIGEST, table, total, image, limit_bytes=1 << 30)
        for number in range(3)
    ]
    runtime = ProcessRuntime(Watcher(), ["cpu"])
    loads = [asyncio.create_task(runtime.load(order)) for order in orders]
    try:
        while not all(load.done() for load in loads):
            runtime.prepare()
            await asyncio.sleep(0.01)
            assert len(set(children_of(os.getpid())) - before) <= 1
        hosted = [load.result() for load in loads]
        await eventually(lambda: runtime.spares["cpu"] > 0, "there is a spare worker")

        server = server_pid(runtime)
        assert server is not None
        workers = set(children_of(server))
        assert {model.host.pid for model in hosted} < workers
    finally:
        await runtime.close()
        os.close(image)


async def test_a_load_has_spare_workers_made_when_nothing_was_prepared() -> None:
    image, table, total = sealed_image(torch.ones(4))
    order = LoadOrder("m", "t", "g0", "cpu", DIGEST, table, total, image, limit_bytes=1 << 30)
    runtime = ProcessRuntime(Watcher(), ["cpu"])
    try:
        await runtime.load(order)
        await eventually(lambda: runtime.spares["cpu"] > 0, "there is a spare worker")
    finally:
        await runtime.close()
        os.close(image)
