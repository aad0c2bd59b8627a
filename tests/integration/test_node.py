"""A node with real worker processes: calls, evictions, memory, and everything that can die."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cache_manager.model.ids import MIB
from common.addresses import TcpAddress, UnixAddress
from gpu_manager.node.settings import EmulatedTimes
from tests.kit.nodes.manager_client import SealedWeights, model
from tests.kit.nodes.node_thread import NodeThread, node_thread
from tests.kit.nodes.worker_client import FunctionClient, alive, needs
from tests.kit.processes.stopped_process import stop
from tests.kit.waiting import wait_until
from torch_shim.errors import RemoteFailure, WireError

pytestmark = pytest.mark.group("node", seconds=130)

GPU_MIB = 400
# A busy machine takes its time; who waits for a call that nobody ends waits for two minutes.
PROMPT_S = 60.0


@pytest.fixture(scope="module")
def node() -> Iterator[NodeThread]:
    listen = (UnixAddress(f"@gpufaas-test-node-{os.getpid()}"), TcpAddress("127.0.0.1", 0))
    with node_thread(GPU_MIB, listen=listen) as found:
        yield found


@pytest.fixture
def functions(node: NodeThread) -> Iterator[list[FunctionClient]]:
    """Processes of this list are ended with the test, with all their children."""
    found: list[FunctionClient] = []
    yield found
    for function in found:
        function.close()
    wait_until(lambda: node.leases() == 0, "no lease is left")


def function(
    node: NodeThread, functions: list[FunctionClient], name: str = "function"
) -> FunctionClient:
    functions.append(FunctionClient(node.address, node.credential(name)))
    return functions[-1]


def evict_all(node: NodeThread) -> None:
    """Leave nothing on the GPU."""
    wait_until(lambda: node.leases() == 0, "no lease is left")
    for resident in node.run(lambda it: [r.model for g in it.status().gpus for r in g.residents]):
        node.do(node.node.driver.evict(resident))
    wait_until(lambda: node.pids() == [], "no process is left")


def test_call_is_answered_by_a_worker(node: NodeThread, functions: list[FunctionClient]) -> None:
    image = model(10.0)
    it = function(node, functions)
    it.upload(image)

    assert it.use(image, x=1.5) == [11.5] * 4
    assert it.use(image, x=2.0) == [12.0] * 4
    assert len(node.pids()) == 1
    image.close()


def test_worker_of_the_first_model_is_gone_when_both_do_not_fit(
    node: NodeThread, functions: list[FunctionClient]
) -> None:
    evict_all(node)
    one, other = model(1.0, 200), model(2.0, 201)
    it = function(node, functions)
    it.upload(one)
    it.upload(other)
    assert it.use(one) == [2.0] * 4
    (first,) = node.pids()

    assert it.use(other) == [3.0] * 4

    (second,) = node.pids()
    assert second != first
    assert not alive(first)
    assert it.use(one) == [2.0] * 4
    for image in (one, other):
        image.close()


def test_call_fails_alone_when_it_can_never_fit(
    node: NodeThread, functions: list[FunctionClient]
) -> None:
    image = model(3.0)
    it = function(node, functions)
    it.upload(image)
    assert it.use(image) == [4.0] * 4
    before = node.pids()

    with pytest.raises(RemoteFailure) as failed:
        it.use(image, needs(GPU_MIB + 50))

    assert failed.value.failure == "out of memory"
    assert it.use(image) == [4.0] * 4
    assert node.pids() == before
    image.close()


def test_idle_model_leaves_when_a_call_needs_its_memory(
    node: NodeThread, functions: list[FunctionClient]
) -> None:
    evict_all(node)
    idle, busy = model(4.0, 150), model(5.0, 1)
    it = function(node, functions)
    it.upload(idle)
    it.upload(busy)
    it.use(idle)
    it.release()
    it.use(busy)
    assert len(node.pids()) == 2

    answer = it.use(busy, needs(300))

    assert answer == pytest.approx([6.0 * 300 * MIB / 4] * 4, rel=1e-3)
    assert len(node.pids()) == 1
    for image in (idle, busy):
        image.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_next_lease_has_another_worker_when_one_was_killed(
    node: NodeThread, functions: list[FunctionClient], number: signal.Signals
) -> None:
    evict_all(node)
    image = model(6.0)
    it = function(node, functions)
    it.upload(image)
    it.use(image)
    (pid,) = node.pids()

    os.kill(pid, number)

    wait_until(lambda: node.leases() == 0, "no lease is left")
    assert it.use(image) == [7.0] * 4
    assert node.pids() != [pid]
    image.close()


def test_two_functions_take_turns_when_both_want_the_gpu(
    node: NodeThread, functions: list[FunctionClient]
) -> None:
    evict_all(node)
    image = model(7.0)
    ones, others = function(node, functions), function(node, functions, "other")
    ones.upload(image)
    others.upload(image)
    assert ones.use(image) == [8.0] * 4  # a first worker takes as long as all turns
    ones.release()
    until_s = time.monotonic() + PROMPT_S
    counts = {ones.session: 0, others.session: 0}

    def work(it: FunctionClient) -> None:
        while min(counts.values()) < 3 and time.monotonic() < until_s:
            assert it.use(image) == [8.0] * 4
            counts[it.session] += 1

    threads = [threading.Thread(target=work, args=(it,)) for it in (ones, others)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert min(counts.values()) >= 3, counts
    assert len(node.pids()) == 1
    image.close()


def test_tenants_share_no_worker_when_their_weights_are_the_same(node: NodeThread) -> None:
    evict_all(node)
    image = model(8.0)
    ones = FunctionClient(node.address, node.credential("f", "one"))
    others = FunctionClient(node.address, node.credential("f", "other"))
    for it in (ones, others):
        it.upload(image)
        assert it.use(image) == [9.0] * 4
        it.release()

    assert len(node.pids()) == 2
    for it in (ones, others):
        it.close()
    wait_until(lambda: node.leases() == 0, "no lease is left")
    image.close()


def test_call_is_answered_when_the_client_is_on_another_node(node: NodeThread) -> None:
    image = model(9.0)
    here = FunctionClient(node.address, node.credential())
    here.upload(image)
    there = FunctionClient(str(node.node.addresses[1]), node.credential())

    assert there.use(image) == [10.0] * 4

    for it in (here, there):
        it.close()
    wait_until(lambda: node.leases() == 0, "no lease is left")
    image.close()


CLIENT = """
import sys, time
sys.path.insert(0, {root!r})
from tests.kit.nodes.manager_client import model
from tests.kit.nodes.worker_client import FunctionClient
it = FunctionClient({address!r}, {credential!r}, "killed")
image = model(11.0, 50)
it.upload(image)
it.acquire(image)
print("calls", flush=True)
it.call(image)
print("answered", flush=True)
"""


@pytest.fixture(scope="module")
def slow_node() -> Iterator[NodeThread]:
    """Every call takes six seconds, in which a test may be held up."""
    with node_thread(GPU_MIB, emulation=EmulatedTimes(run_s=6.0)) as found:
        yield found


def test_everything_of_a_process_is_gone_when_it_is_killed_in_a_call(
    slow_node: NodeThread,
) -> None:
    evict_all(slow_node)
    code = CLIENT.format(
        root=str(Path.cwd()), address=slow_node.address, credential=slow_node.credential()
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == b"calls\n"
        time.sleep(0.2)
        (worker,) = slow_node.pids()

        client.kill()
        client.wait()

        wait_until(lambda: slow_node.leases() == 0, "no lease is left")
        assert client.stdout.read() == b""
    # Its worker was killed, or ended the call before that.
    assert slow_node.pids() in ([], [worker])


def test_call_is_lost_when_its_worker_dies_and_the_gpu_goes_on(slow_node: NodeThread) -> None:
    evict_all(slow_node)
    image = model(12.0)
    it = FunctionClient(slow_node.address, slow_node.credential())
    it.upload(image)
    it.acquire(image)
    (pid,) = slow_node.pids()
    threading.Timer(0.3, os.kill, (pid, signal.SIGSEGV)).start()

    with pytest.raises(WireError):
        it.call(image)

    assert it.use(image) == [13.0] * 4
    it.close()
    image.close()


def test_worker_that_hangs_is_replaced_when_another_one_waits(slow_node: NodeThread) -> None:
    evict_all(slow_node)
    image = model(13.0)
    hung, other = (FunctionClient(slow_node.address, slow_node.credential()) for _ in range(2))
    hung.upload(image)
    hung.acquire(image)
    (pid,) = slow_node.pids()
    caller = threading.Thread(target=_call_in_vain, args=(hung, image))
    caller.start()
    time.sleep(0.2)
    stop(pid)
    began_s = time.monotonic()

    other.acquire(image)

    assert time.monotonic() - began_s < PROMPT_S
    assert slow_node.pids() != [pid]
    caller.join(PROMPT_S)
    assert not caller.is_alive()
    for it in (hung, other):
        it.close()
    image.close()


def test_call_ends_with_its_deadline_when_the_worker_hangs(slow_node: NodeThread) -> None:
    evict_all(slow_node)
    image = model(14.0)
    it = FunctionClient(slow_node.address, slow_node.credential())
    it.upload(image)
    it.acquire(image)  # which loads it
    it.release()
    it.acquire(image, deadline_s=8.0)  # the grant may take a while
    (pid,) = slow_node.pids()
    stop(pid)
    began_s = time.monotonic()

    with pytest.raises(WireError):
        it.call(image)

    assert time.monotonic() - began_s < PROMPT_S
    wait_until(lambda: slow_node.leases() == 0, "no lease is left")
    it.close()
    image.close()


def _call_in_vain(it: FunctionClient, image: SealedWeights) -> None:
    with pytest.raises(WireError):
        it.call(image)
