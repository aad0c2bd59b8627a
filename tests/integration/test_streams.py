"""The runtime of streams on a real node: a tenant's models in one process, each with its due."""

import os
import signal
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from cache_manager.model.ids import MIB, ModelId
from common.gpu_wishes import GpuWishes
from gpu_manager.api import FunctionIdentity
from gpu_manager.node.settings import EmulatedTimes
from gpufaas.embedded_node import EmbeddedNode
from tests.kit.nodes.manager_client import SealedWeights, weights
from tests.kit.nodes.node_thread import NodeThread, node_thread
from tests.kit.nodes.worker_client import FunctionClient, alive
from tests.kit.waiting import wait_until

CONTEXT_BYTES = 100 * MIB
MODEL_BYTES = 8 * MIB


@pytest.fixture
def node() -> Iterator[NodeThread]:
    emulation = EmulatedTimes(context_bytes=CONTEXT_BYTES)
    with node_thread(1024, runtime="stream", emulation=emulation) as found:
        yield found


@contextmanager
def models(count: int) -> Iterator[list[SealedWeights]]:
    """So many models, of which each begins with its number."""
    rest = b"\0" * (MODEL_BYTES - 16)
    made = [weights(struct.pack("4f", *[float(number)] * 4) + rest) for number in range(count)]
    try:
        yield made
    finally:
        for each in made:
            each.close()


@contextmanager
def functions(node: NodeThread, count: int, tenant: str = "team") -> Iterator[list[FunctionClient]]:
    with ExitStack() as stack:
        made = []
        for number in range(count):
            made.append(FunctionClient(node.address, node.credential(f"f{number}", tenant)))
            stack.callback(made[-1].close)
        yield made


def used(client: FunctionClient, model: SealedWeights, number: int) -> None:
    client.upload(model)
    assert client.use(model, x=1.0) == [1.0 + number] * 4
    client.release()


def evict(node: NodeThread, count: int) -> None:
    """Have the first models leave the GPU."""

    def residents(it: EmbeddedNode) -> list[ModelId]:
        (gpu,) = it.manager.node.gpus.values()
        return list(gpu.residents)

    wait_until(lambda: not node.leases(), "nobody uses them")
    for model in node.run(residents)[:count]:
        node.do(node.node.driver.evict(model))


def granted_bytes(node: NodeThread) -> int:
    def found(it: EmbeddedNode) -> int:
        (gpu,) = it.manager.node.gpus.values()
        return gpu.ledger.granted_bytes

    return node.run(found)


def resident_kib(pid: int) -> int:
    """The anonymous memory of a process."""
    fields = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    return int(fields["RssAnon"].split()[0])


def test_models_of_a_tenant_share_a_process_and_one_context(node: NodeThread) -> None:
    with models(4) as made, functions(node, 4) as clients:
        for number, (client, model) in enumerate(zip(clients, made, strict=True)):
            used(client, model, number)
        assert len(node.pids()) == 4
        assert len(set(node.pids())) == 1
        wait_until(
            lambda: granted_bytes(node) < 2 * CONTEXT_BYTES + 4 * MODEL_BYTES, "calls are measured"
        )
        for number, (client, model) in enumerate(zip(clients, made, strict=True)):
            used(client, model, number)


def test_tenants_never_share_a_process(node: NodeThread) -> None:
    with models(4) as made, functions(node, 2) as ours, functions(node, 2, "others") as theirs:
        for number, (client, model) in enumerate(zip([*ours, *theirs], made, strict=True)):
            used(client, model, number)
        assert len(node.pids()) == 4
        assert len(set(node.pids())) == 2


def test_no_process_serves_two_tenants_whatever_leaves_and_comes(node: NodeThread) -> None:
    """Looks at the processes of three rounds."""
    tenants: dict[int, set[str]] = {}

    def look(it: EmbeddedNode) -> None:
        for gpu in it.manager.node.gpus.values():
            for hosted in gpu.loaded():
                if hosted.host is not None:
                    tenants.setdefault(hosted.host.pid, set()).add(hosted.order.tenant)

    with models(3) as made, functions(node, 2) as ours, functions(node, 2, "others") as theirs:
        for turn in range(3):
            for number, clients in ((turn, ours), ((turn + 1) % 3, theirs)):
                for client in clients:
                    used(client, made[number], number)
            node.run(look)
            evict(node, 2)
            wait_until(lambda: not node.pids(), "they have left")
    assert len(tenants) >= 4
    assert all(len(found) == 1 for found in tenants.values())


def test_runtimes_live_side_by_side_as_functions_wish(node: NodeThread) -> None:
    with models(3) as made, functions(node, 2) as shared:
        for number, client in enumerate(shared):
            used(client, made[number], number)
        alone = FunctionIdentity("team", "alone", GpuWishes("process"))
        client = FunctionClient(
            node.address, node.run(lambda it: it.manager.credentials.issue(alone))
        )
        used(client, made[2], 2)
        client.close()
        first, second, third = node.pids()
        assert first == second != third


def test_a_model_leaves_and_its_memory_is_the_systems_while_others_go_on(node: NodeThread) -> None:
    with models(2) as made, functions(node, 2) as clients:
        for number, client in enumerate(clients):
            used(client, made[number], number)
        (pid,) = set(node.pids())
        before = granted_bytes(node)

        evict(node, 1)
        wait_until(lambda: len(node.pids()) == 1, "one model is left")
        wait_until(lambda: granted_bytes(node) <= before - MODEL_BYTES, "its memory is free")
        assert node.pids() == [pid]
        used(clients[1], made[1], 1)
        used(clients[0], made[0], 0)
        assert set(node.pids()) == {pid}


def test_the_process_ends_with_its_last_model(node: NodeThread) -> None:
    with models(2) as made, functions(node, 2) as clients:
        for number, client in enumerate(clients):
            used(client, made[number], number)
        (pid,) = set(node.pids())

        evict(node, 2)
        wait_until(lambda: not node.pids(), "no model is left")
        wait_until(lambda: granted_bytes(node) == 0, "nor is a context")
        wait_until(lambda: not alive(pid), "nor a process")


def test_neighbours_of_a_killed_process_repeat_a_call_and_get_the_right_numbers(
    node: NodeThread,
) -> None:
    with models(3) as made, functions(node, 3) as clients:
        for number, client in enumerate(clients):
            used(client, made[number], number)
        (pid,) = set(node.pids())
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: pid not in node.pids(), "it is gone")
        for number, client in enumerate(clients):
            used(client, made[number], number)
        assert len(set(node.pids())) == 1
