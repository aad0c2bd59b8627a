"""Several models of one process of which one is in trouble; and the pool under random functions."""

import os
import signal
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from cache_manager.model.ids import MIB, ModelId
from gpufaas.embedded_node import EmbeddedNode
from tests.kit.nodes.manager_client import SealedWeights, weights
from tests.kit.nodes.node_thread import NodeThread, node_thread
from tests.kit.nodes.stream_soak import soak
from tests.kit.nodes.worker_client import FunctionClient, needs
from tests.kit.waiting import wait_until
from torch_shim.errors import RemoteFailure, WireError
from torch_shim.wire.programs import Program, ProgramStep, Ref, Tuple

MODEL_BYTES = 2 * MIB
MODELS = 4
# Adds to its weights in place, and gives them.
SPOILING = Program(2, (), (ProgramStep("m:add_", [Ref(1), Ref(0)]),), Tuple([Ref(2)]))
ENDLESS = Program(
    2,
    (),
    (
        ProgramStep("t:torch.ones", [1200, 1200]),
        *(ProgramStep("o:matmul", [Ref(2), Ref(2 + n)]) for n in range(3000)),
        ProgramStep("o:add", [Ref(0), Ref(1)]),
    ),
    Tuple([Ref(3003)]),
)


class Four:
    """Four functions of a tenant on a node, each with a model that begins with its number."""

    def __init__(self, node: NodeThread) -> None:
        self.node = node
        rest = b"\0" * (MODEL_BYTES - 16)
        self.models: list[SealedWeights] = []
        self.clients: list[FunctionClient] = []
        for number in range(MODELS):
            self.models.append(weights(struct.pack("4f", *[float(number)] * 4) + rest))
            self.clients.append(FunctionClient(node.address, node.credential(f"f{number}")))
            self.clients[-1].upload(self.models[-1])

    def use(self, number: int) -> None:
        client = self.clients[number]
        assert client.use(self.models[number], x=1.0) == [1.0 + number] * 4
        client.release()

    def use_all(self) -> None:
        for number in range(MODELS):
            self.use(number)

    def close(self) -> None:
        for client in self.clients:
            client.close()
        for model in self.models:
            model.close()


@pytest.fixture(params=[96])
def four(request: pytest.FixtureRequest) -> Iterator[Four]:
    """Four models on a GPU of so many MiB."""
    with node_thread(request.param, runtime="stream", gpu_overlap=2) as node:
        made = Four(node)
        made.use_all()
        yield made
        made.close()


def test_others_go_on_when_one_model_wants_more_than_there_is(four: Four) -> None:
    (pid,) = set(four.node.pids())
    client = four.clients[0]
    client.acquire(four.models[0])
    with pytest.raises(RemoteFailure, match="out of memory"):
        client.call(four.models[0], needs(200))
    client.release()
    four.use_all()
    assert set(four.node.pids()) == {pid}


def test_calls_that_together_want_more_than_there_is_all_get_their_numbers(four: Four) -> None:
    (pid,) = set(four.node.pids())
    wrong: list[object] = []

    def call(number: int) -> None:
        expected = [(1.0 + number) * (50 * MIB // 4)] * 4
        for _ in range(3):
            found = four.clients[number].use(four.models[number], needs(50), x=1.0)
            four.clients[number].release()
            if found != expected:
                wrong.append((number, found))

    threads = [threading.Thread(target=call, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert set(four.node.pids()) <= {pid}


def test_weights_are_what_they_were_when_a_model_writes_to_its_own(four: Four) -> None:
    client = four.clients[1]
    client.acquire(four.models[1])
    assert client.call(four.models[1], SPOILING, 5.0) == [6.0] * 4
    client.release()
    four.use_all()


def test_neighbours_repeat_one_call_when_one_computes_for_ever(four: Four) -> None:
    (pid,) = set(four.node.pids())
    client = four.clients[2]
    client.acquire(four.models[2])
    failed: list[BaseException] = []

    def call() -> None:
        try:
            client.call(four.models[2], ENDLESS)
        except WireError as error:
            failed.append(error)

    before_s = processor_s(pid)
    thread = threading.Thread(target=call)
    thread.start()
    wait_until(lambda: processor_s(pid) > before_s + 2.0, "it computes, and has long been read")
    client.release()  # its call has a grace of two seconds, then its process ends
    thread.join()
    assert failed
    wait_until(lambda: pid not in four.node.pids(), "it is gone")
    four.use_all()
    assert len(set(four.node.pids())) == 1


def test_neighbours_get_their_numbers_when_the_process_is_killed_in_the_middle(
    four: Four,
) -> None:
    (pid,) = set(four.node.pids())
    ended = threading.Event()
    calls: list[int] = []
    broken: list[int] = []

    def call(number: int) -> None:
        while not ended.is_set():
            try:
                four.use(number)
                calls.append(number)
            except (WireError, RemoteFailure):
                broken.append(number)  # which a shim repeats, once

    threads = [threading.Thread(target=call, args=(number,)) for number in range(MODELS)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(set(calls)) == MODELS, "all call")
    os.kill(pid, signal.SIGKILL)
    before = len(calls)
    wait_until(lambda: len(set(calls[before:])) == MODELS, "all call again")
    ended.set()
    for thread in threads:
        thread.join()
    assert pid not in four.node.pids()
    four.use_all()


@pytest.mark.parametrize("four", [160], indirect=True)  # unmeasured: weights and 64 MiB
def test_memory_of_a_model_that_left_is_the_systems_while_its_neighbours_stay(four: Four) -> None:
    (pid,) = set(four.node.pids())
    before, weights_before = resident_bytes(pid), weights_bytes(pid)
    large = weights(b"\1" * 32 * MIB)
    client = FunctionClient(four.node.address, four.node.credential("large"))
    client.upload(large)
    client.acquire(large)
    client.call(large)
    client.release()
    assert weights_bytes(pid) > weights_before + 16 * MIB  # the system may take idle pages
    wait_until(lambda: not four.node.leases(), "nobody uses it")
    four.node.do(four.node.node.driver.evict(four.node.run(lambda it: model_of(it, 32 * MIB))))
    wait_until(lambda: resident_bytes(pid) < before + 8 * MIB, "its pages are the system's")
    assert set(four.node.pids()) == {pid}
    four.use_all()
    client.close()
    large.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to look at a worker's memory")
def test_pool_returns_to_its_floor_under_random_functions() -> None:
    found = soak(15.0, functions=100, seed=7)
    assert found.calls > 20
    assert found.pool_peak_bytes > 4 * MIB


def resident_bytes(pid: int) -> int:
    """Of weights, which lie in pages that processes share, and of calls, in anonymous ones."""
    return sum(memory_fields(pid).values())


def weights_bytes(pid: int) -> int:
    """Of weights alone, which lie in pages that processes share."""
    return memory_fields(pid)["RssShmem"]


def memory_fields(pid: int) -> dict[str, int]:
    """What the system says of a process's memory, in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return {name: int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem")}


def processor_s(pid: int) -> float:
    """What a process has computed, in seconds of one core."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def model_of(it: EmbeddedNode, weights_bytes: int) -> ModelId:
    """The model of this size."""
    models = it.manager.library.catalogue
    (found,) = [model.id for model in models if model.table.total_bytes == weights_bytes]
    return found
