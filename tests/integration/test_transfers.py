"""Real workers on an emulated PCIe: what passes it, in which order, and what is told of it."""

import os
import signal
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from cache_manager.model.ids import MIB
from common.gpu_wishes import PROCESS, RUNTIMES
from gpu_manager.node.settings import EmulatedTimes
from gpu_manager.transfers import CountedPaths
from gpu_manager.worker.transfers.process_gate import path_holder
from gpufaas.embedded_node import EmbeddedNode
from tests.kit.nodes.manager_client import SealedWeights, weights
from tests.kit.nodes.node_thread import NodeThread, node_thread
from tests.kit.nodes.worker_client import FunctionClient, alive
from tests.kit.waiting import wait_until
from torch_shim.errors import ConnectionLost, RemoteFailure

# So slow that what takes its time on the path takes much longer than a process is held up.
SPEED = 16 * MIB
INPUT = 1 * MIB
ALONE_S = INPUT / SPEED
LARGE_MIB = 128  # eight seconds of the path
FEEDS = 15


@contextmanager
def node(runtime: str = PROCESS, **more: Any) -> Iterator[NodeThread]:
    """Two requests at a time have leases on its only GPU."""
    emulation = EmulatedTimes(pcie_bytes_per_s=SPEED, pcie_per_gpu=True)
    values: dict[str, Any] = {"emulation": emulation, "gpu_overlap": 2, "runtime": runtime}
    with node_thread(2048, **values, **more) as found:
        yield found


def model(first: float, mib: int = 1) -> SealedWeights:
    return weights(struct.pack("4f", *[first] * 4) + bytes(mib * MIB - 16))


def client(it: NodeThread, *images: SealedWeights, function: str = "function") -> FunctionClient:
    found = FunctionClient(it.address, it.credential(function))
    for image in images:
        found.upload(image)
    return found


def gate_to_gpu(found: EmbeddedNode) -> int:
    (gpu,) = found.manager.node.gpus.values()
    return gpu.paths.descriptors[0]


def moved(it: NodeThread) -> dict[tuple[str, str], int]:
    """The bytes that were counted, by direction and class."""
    (gpu,) = it.run(lambda found: list(found.manager.node.gpus.values()))
    return {
        (passed.direction, passed.kind): int(passed.size_bytes) for passed in gpu.paths.passed()
    }


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_inputs_and_results_of_calls_take_their_time_and_are_counted(runtime: str) -> None:
    with node(runtime) as it:
        image = model(1.0)
        it_calls = client(it, image)
        it_calls.acquire(image)

        fed = [it_calls.feed(image, INPUT) for _ in range(FEEDS)]

        assert all(results == [2.0] * 4 for results, _ in fed)
        # The quickest one: a busy machine holds up some of them.
        assert ALONE_S <= min(seconds for _, seconds in fed) < 20 * ALONE_S
        it_calls.release()
        wait_until(lambda: moved(it)["to_gpu", "call"] == FEEDS * INPUT, "inputs are counted")
        wait_until(lambda: moved(it)["to_host", "call"] == FEEDS * 16, "results are counted")
        assert moved(it)["to_gpu", "awaited"] == MIB
        page = it.run(lambda found: found.manager.metrics()).decode()
        assert 'transferred_bytes_total{gpu="node/cpu:0",direction="to_gpu",class="call"}' in page
        it_calls.close()
        image.close()


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_call_takes_less_than_twice_its_time_beside_a_load(runtime: str) -> None:
    with node(runtime) as it:
        small, large = model(1.0), model(2.0, LARGE_MIB)
        caller, other = client(it, small), client(it, large, function="other")
        caller.acquire(small)
        caller.feed(small, INPUT)
        loading = threading.Thread(target=other.acquire, args=(large,))
        loading.start()
        wait_until(lambda: moved(it)["to_gpu", "awaited"] > 2 * MIB, "it loads")

        beside: list[float] = []
        while loading.is_alive() and len(beside) < FEEDS:
            _, seconds = caller.feed(small, INPUT)
            if loading.is_alive():
                beside.append(seconds)

        # The quickest one: a busy machine holds up some of them, and a path that is shared none.
        assert min(beside) < 2.0 * ALONE_S, beside
        loading.join()
        assert other.call(large) == [3.0] * 4
        for each in (caller, other):
            each.close()
        for image in (small, large):
            image.close()


def test_path_is_free_when_a_worker_is_killed_in_mid_transfer() -> None:
    with node() as it:
        first, second = model(1.0), model(2.0)
        leaver, other = client(it, first), client(it, second, function="other")
        leaver.acquire(first)
        (pid,) = it.pids()
        other.acquire(second)
        failed: list[Exception] = []

        def call() -> None:
            try:
                leaver.feed(first, LARGE_MIB * MIB)
            except ConnectionLost as error:
                failed.append(error)

        calling = threading.Thread(target=call)
        calling.start()
        gates = it.run(gate_to_gpu)
        wait_until(lambda: path_holder(gates) == pid, "the input is on its way, for long")
        os.kill(pid, signal.SIGKILL)
        calling.join()
        wait_until(lambda: not alive(pid), "it is dead")
        assert path_holder(gates) is None
        other.acquire(second)  # an idle lease may have ended meanwhile

        results, seconds = other.feed(second, INPUT)

        assert failed
        assert results == [3.0] * 4
        assert seconds < 6.0  # what was left of the other input needs eight
        for each in (leaver, other):
            each.close()
        for image in (first, second):
            image.close()


def test_load_that_is_given_up_has_no_block_more() -> None:
    with node() as it:
        image = model(1.0, LARGE_MIB)
        leaver = client(it, image)
        leaving = threading.Thread(target=_acquire_until_lost, args=(leaver, image))
        leaving.start()
        wait_until(lambda: moved(it)["to_gpu", "awaited"] > 2 * MIB, "it loads")
        (model_id,) = it.run(
            lambda found: [
                resident for gpu in found.manager.node.gpus.values() for resident in gpu.residents
            ]
        )

        def give_up(found: Any) -> None:
            (gpu,) = found.manager.node.gpus.values()
            found.manager.node._loader.unload(gpu, model_id)  # noqa: SLF001 - as an eviction does

        it.run(give_up)
        (gpu,) = it.run(lambda found: list(found.manager.node.gpus.values()))
        owner, paths = f"{model_id} on {gpu.id}", gpu.paths
        assert isinstance(paths, CountedPaths)
        wait_until(lambda: not paths.gates.paths[0].is_queued(owner), "nothing is queued")
        passed = moved(it)["to_gpu", "awaited"]
        time.sleep(0.2)
        assert moved(it)["to_gpu", "awaited"] == passed < 100 * MIB
        leaver.close()
        leaving.join()
        image.close()


def _acquire_until_lost(leaver: FunctionClient, image: SealedWeights) -> None:
    with pytest.raises(RemoteFailure):
        leaver.acquire(image)
