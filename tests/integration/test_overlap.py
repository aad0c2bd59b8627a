"""Several leases on one GPU with real workers: more requests, and one at a time on the GPU."""

import os
import signal
import threading
import time

import pytest

from gpu_manager.node.leases import LeaseTimes
from gpu_manager.node.settings import EmulatedTimes
from gpufaas.embedded_node import EmbeddedNode
from tests.kit.live.overlapping_leases import overlapped
from tests.kit.nodes.manager_client import SealedWeights, model
from tests.kit.nodes.node_thread import NodeThread, holder_of_first_slot, node_thread
from tests.kit.nodes.worker_client import FunctionClient, alive
from tests.kit.processes.stopped_process import stop
from tests.kit.waiting import wait_until
from torch_shim.errors import WireError

# Leases that are not used stay in force.
PATIENT = LeaseTimes(quiet_s=60.0, quantum_s=60.0)


def fails(function: FunctionClient, image: SealedWeights) -> None:
    """Call, and get the error that the worker is gone."""
    with pytest.raises(WireError):
        function.call(image)


@pytest.mark.parametrize("overlap", [1, 3])
def test_slot_holds_as_many_leases_at_once_as_its_overlap_says(overlap: int) -> None:
    """One caller more than that waits; it is served once another one has released its lease."""
    image = model(1.0)
    with node_thread(gpu_overlap=overlap, leases=PATIENT) as node:
        functions = [FunctionClient(node.address, node.credential()) for _ in range(overlap + 1)]
        functions[0].upload(image)
        for function in functions[:overlap]:
            function.acquire(image)
        assert node.leases() == overlap

        waiting = threading.Thread(target=functions[-1].acquire, args=(image,))
        waiting.start()
        wait_until(lambda: node.run(lambda it: it.status().waiting) == 1, "the last one waits")
        assert node.leases() == overlap
        functions[0].release()
        waiting.join()
        for function in functions[1:]:
            assert function.call(image) == [2.0] * 4
            function.release()
        for function in functions:
            function.close()
    image.close()


def test_all_callers_are_served_alike_when_there_are_more_than_leases() -> None:
    served = overlapped(5, 10, 8.0).served  # a busy machine may serve nobody for seconds
    assert min(served) > max(served) / 4


def two_calls_s(node: NodeThread) -> float:
    """Until two models of two workers, which both hold leases, have answered one call each."""
    images = [model(1.0), model(2.0)]
    functions = [FunctionClient(node.address, node.credential()) for _ in images]
    for function, image in zip(functions, images, strict=True):
        function.upload(image)
        function.acquire(image)
    assert node.leases() == 2
    threads = [
        threading.Thread(target=function.call, args=(image,))
        for function, image in zip(functions, images, strict=True)
    ]
    begun_s = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spent_s = time.perf_counter() - begun_s
    for function in functions:
        function.close()
    for image in images:
        image.close()
    return spent_s


def test_calls_of_two_workers_take_turns_when_both_hold_leases() -> None:
    """Two models' workers on one GPU, called at the same time, for 0.2 s each."""
    with node_thread(gpu_overlap=2, emulation=EmulatedTimes(run_s=0.2)) as node:
        assert two_calls_s(node) >= 0.4


def test_calls_of_two_workers_run_at_once_when_the_gpu_takes_no_turns() -> None:
    """Two calls of 7 s each would take 14 s in turns."""
    with node_thread(gpu_concurrency=2, emulation=EmulatedTimes(run_s=7.0)) as node:
        assert two_calls_s(node) < 14.0


def test_scheduler_gives_a_slot_as_many_leases_as_its_node_says() -> None:
    with node_thread(gpu_overlap=3) as node:
        (gpu,) = node.run(lambda it: it.status().gpus)
        assert [slot.capacity for slot in gpu.slots] == [3]


def test_worker_is_killed_when_it_keeps_its_turn_without_a_lease() -> None:
    """Stopped in the midst of a call whose lease is then forgotten: others would wait for ever."""
    image = model(1.0)
    with node_thread(gpu_overlap=2, emulation=EmulatedTimes(run_s=60.0)) as node:
        it = FunctionClient(node.address, node.credential())
        it.upload(image)
        it.acquire(image)
        (pid,) = node.pids()
        calling = threading.Thread(target=fails, args=(it, image))
        calling.start()
        wait_until(lambda: node.run(holder_of_first_slot) == pid, "it has its turn")
        stop(pid)

        def forget(found: EmbeddedNode) -> None:
            found.manager.node.leases._leases.clear()  # noqa: SLF001 - nothing forgets them

        node.run(forget)
        wait_until(lambda: not alive(pid), "it has ended")
        calling.join()
        it.close()
    image.close()


def test_other_workers_go_on_when_the_one_with_the_turn_is_killed() -> None:
    images = [model(1.0), model(2.0)]
    with node_thread(gpu_overlap=2, emulation=EmulatedTimes(run_s=7.0)) as node:
        killed, other = (FunctionClient(node.address, node.credential()) for _ in images)
        killed.upload(images[0])
        killed.acquire(images[0])
        (pid,) = node.pids()
        other.upload(images[1])
        other.acquire(images[1])
        calling = threading.Thread(target=fails, args=(killed, images[0]))
        calling.start()
        wait_until(lambda: node.run(holder_of_first_slot) == pid, "it has its turn")

        threading.Timer(0.2, os.kill, (pid, signal.SIGKILL)).start()

        assert other.call(images[1]) == [3.0] * 4
        calling.join()
        killed.close()
        other.close()
    for image in images:
        image.close()
