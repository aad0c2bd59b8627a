"""A node with real workers that is told to empty them: its books against the processes' own."""

import asyncio
import fcntl
import os
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path

import pytest
import torch

from cache_manager.model.ids import MIB, ModelId, NodeId, Tier
from cache_manager.tier_index import TierIndex
from gpu_manager.credentials import FunctionIdentity
from gpu_manager.emulated.gpu import EmulatedGpu
from gpu_manager.errors import NoWorker
from gpu_manager.node.ledger import Ledger
from gpu_manager.node.node import GpuNode
from gpu_manager.node.residents import HostGpu
from gpu_manager.node.settings import NodeSettings
from gpu_manager.node.tenant_models import Catalogue
from gpu_manager.runtimes.process import ProcessRuntime
from gpu_manager.runtimes.runtime import HostedModel
from gpu_manager.sessions.sessions import ClientSession, session_key
from gpu_manager.sessions.weight_requests import Library
from gpu_manager.weights.store import WeightStore
from gpu_manager.worker.orders import Admission
from scheduler.api import (
    ContextKept,
    Demote,
    GpuSpec,
    LeaseId,
    LoadFailed,
    ModelDemoted,
    ModelLoad,
    Prepare,
    SlotId,
)
from tests.kit.fakes.sealed_images import open_images
from tests.kit.nodes.worker_client import alive
from tests.kit.processes.fork_servers import server_pid
from tests.kit.processes.open_files import open_files, opened_since
from tests.kit.processes.stopped_process import stop
from tests.kit.waiting import eventually, wait_until
from tests.kit.worlds.caller import Caller, program, step
from tests.kit.worlds.gpu_node import GPU, OWNER, granted_bytes
from tests.kit.worlds.ordered_node import ReportRecord
from tests.kit.worlds.worker_machine import children_of
from torch_shim.wire.image_digests import lay_out
from torch_shim.wire.programs import Ref

DOUBLE = program(step("o:mul", Ref(0), 2), output=[Ref(1)])
WEIGHTS_BYTES = GUESS_BYTES = 32 * MIB
RIVALS = FunctionIdentity("rivals", "function")


@dataclass
class LiveNode:
    """A node whose workers are processes, and what it reported."""

    node: GpuNode
    gpu: HostGpu
    runtime: ProcessRuntime
    library: Library
    record: ReportRecord
    _leases: int = 0

    def add(self, *rows: int, owner: FunctionIdentity = OWNER) -> ModelId:
        """A model whose weights are these numbers, padded to some MiB."""
        weights = torch.zeros(WEIGHTS_BYTES // 4, dtype=torch.int32)
        weights[: len(rows)] = torch.tensor(rows)
        table = lay_out([weights.nbytes])
        descriptor = os.memfd_create("gpufaas-image", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
        os.pwrite(descriptor, weights.numpy().tobytes(), 0)
        _seal(descriptor)
        digest = self.library.store.adopt(descriptor, table, str(owner))
        return self.library.add(ClientSession(session_key(owner, "s"), owner), digest, table).id

    def prepare(self, model: ModelId, emptied: ModelId | None = None) -> None:
        self._leases += 1
        table = self.library.catalogue.get(model).table
        load = ModelLoad(model, table.total_bytes + GUESS_BYTES, Tier.HOST, emptied)
        self.node.prepare(Prepare(SlotId(GPU), GPU, LeaseId(self._leases), (), (load,)))

    async def load(self, model: ModelId, emptied: ModelId | None = None) -> HostedModel:
        self.prepare(model, emptied)
        return await self.gpu.residents[model].ready()

    def demote(self, model: ModelId, *, keeps_context: bool) -> None:
        self.node.demote(Demote(GPU, model, "test", keeps_context))

    async def empty(self, model: ModelId) -> int:
        """Empty its worker; the bytes that are left."""
        self.record.events.clear()
        self.demote(model, keeps_context=True)
        await self.at_rest()
        (kept,) = [event for event in self.record.events if isinstance(event, ContextKept)]
        assert (kept.gpu, kept.model) == (GPU, model)
        return kept.memory_bytes

    async def at_rest(self) -> None:
        await eventually(lambda: not self.gpu.leaving, "nothing leaves any more")

    async def first_numbers(self, hosted: HostedModel, count: int) -> list[int]:
        """Twice the first weights, by the model's worker."""
        ours, theirs = socket.socketpair()
        hosted.admit(Admission(7, "s"))
        hosted.channel("s", "f", theirs)
        source = [0, hosted.order.digest, *hosted.order.table[0]]
        with Caller(ours) as caller:
            described = [source, "int32", [count], [1], 0]
            reply = await asyncio.to_thread(caller.call, DOUBLE, described)
        found: list[int] = reply.outputs[0].tolist()
        return found

    def check_books(self) -> None:
        """The ledger has at least what each process measured, and exactly what was kept."""
        ledger = self.gpu.ledger
        hosted = {found.order.model: found.memory_bytes for found in self.runtime.hosted}
        granted = granted_bytes(self.gpu)
        assert set(granted) == set(hosted)
        assert all(granted[ModelId(model)] >= hosted[model] for model in hosted)
        empty_bytes = sum(found.memory_bytes for found in self.runtime.empty)
        assert ledger.granted_bytes == sum(granted.values()) + empty_bytes
        hosts = {found.host for found in self.runtime.hosted}
        assert self.gpu.processes() == hosts | {found.host for found in self.runtime.empty}


def _seal(descriptor: int) -> None:
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, 0xF)


@asynccontextmanager
async def live_node() -> AsyncIterator[LiveNode]:
    device = EmulatedGpu(GPU, 1024 * MIB)
    gpu = HostGpu(
        device, GpuSpec(GPU, NodeId("node"), device.memory_bytes), Ledger(device.memory_bytes)
    )
    store, catalogue, record = WeightStore(TierIndex("lru", 1 << 30)), Catalogue(), ReportRecord()
    node = GpuNode(NodeSettings("node", ()), [gpu], store, catalogue, record, (), lambda *_: None)
    runtime = ProcessRuntime(node, ["cpu"])
    runtime.prepare()
    node.start(runtime)
    library = Library(node.weights, store, catalogue, record, 0)
    try:
        yield LiveNode(node, gpu, runtime, library, record)
    finally:
        server = server_pid(runtime)
        await node.drain(1.0)
        await runtime.close()
        store.close()
        assert server is None or not children_of(server)


def lively(test: Callable[[LiveNode], Awaitable[None]]) -> Callable[[], None]:
    """Run a test with a node; it leaves no process, descriptor or image."""

    async def with_node() -> None:
        async with live_node() as it:
            await test(it)

    @wraps(test)
    def run() -> None:
        before = open_files()
        asyncio.run(with_node())
        wait_until(lambda: open_images() == 0, "no image is open")
        wait_until(
            lambda: not opened_since(before),
            "no file more is open",
            instead=lambda: str(opened_since(before)),
        )

    del run.__wrapped__  # or pytest would ask for a fixture `it`
    return run


@lively
async def test_tenants_models_take_turns_in_one_process_and_answer_with_their_own_weights(
    it: LiveNode,
) -> None:
    one, other = it.add(1, 2, 3), it.add(4, 5, 6)
    hosted = await it.load(one)
    pid = hosted.host
    for current, following, weights in ((one, other, [2, 4, 6]), (other, one, [8, 10, 12])) * 3:
        assert await it.first_numbers(hosted, 3) == weights
        left_bytes = await it.empty(current)
        assert left_bytes < hosted.memory_bytes - WEIGHTS_BYTES // 2
        assert it.gpu.ledger.granted_bytes == left_bytes
        it.check_books()
        hosted = await it.load(following, emptied=current)
        assert hosted.host == pid
        it.check_books()


@lively
async def test_load_that_is_ordered_while_its_process_is_emptied_gets_it(it: LiveNode) -> None:
    one = it.add(1, 2, 3)
    hosted = await it.load(one)

    it.demote(one, keeps_context=True)
    it.prepare(one, emptied=one)
    again = await it.gpu.residents[one].ready()

    assert again.host == hosted.host
    assert await it.first_numbers(again, 2) == [2, 4]
    with pytest.raises(NoWorker):
        it.node.hosted(hosted.id)
    it.check_books()


@lively
async def test_other_tenants_model_never_gets_the_process(it: LiveNode) -> None:
    one, theirs = it.add(1, 2, 3), it.add(7, 8, 9, owner=RIVALS)
    hosted = await it.load(one)
    await it.empty(one)

    other = await it.load(theirs, emptied=one)

    assert other.host != hosted.host
    assert hosted.host is not None
    pid = hosted.host.pid
    await eventually(lambda: not alive(pid), "the process has ended")
    assert await it.first_numbers(other, 1) == [14]
    it.check_books()


@pytest.mark.parametrize("when", ["before", "during", "after"])
def test_books_are_right_when_the_worker_is_killed(when: str) -> None:
    async def killed(it: LiveNode) -> None:
        one = it.add(1, 2, 3)
        hosted = await it.load(one)
        assert hosted.host is not None
        if when == "during":
            stop(hosted.host.pid)  # so that it cannot have carried out the order
            it.demote(one, keeps_context=True)
            await asyncio.sleep(0)
        elif when == "after":
            await it.empty(one)
        it.record.events.clear()

        os.kill(hosted.host.pid, signal.SIGKILL)
        lost = ModelDemoted(NodeId("node"), GPU, one, Tier.HOST)
        await eventually(lambda: lost in it.record.events, "its end is told")

        await it.at_rest()
        assert it.gpu.ledger.granted_bytes == 0
        assert it.node.snapshot().gpus[0].contexts == ()
        again = await it.load(one, emptied=one)  # as the scheduler may have ordered meanwhile
        assert await it.first_numbers(again, 1) == [2]
        assert not [event for event in it.record.events if isinstance(event, LoadFailed)]
        it.check_books()

    lively(killed)()


@lively
async def test_nothing_is_left_when_the_node_stops_while_a_worker_is_emptied(it: LiveNode) -> None:
    kept, leaving = it.add(1), it.add(2)
    await it.load(kept)
    await it.empty(kept)
    await it.load(leaving)
    it.demote(leaving, keeps_context=True)


@lively
async def test_memory_of_the_process_falls_when_its_model_leaves(it: LiveNode) -> None:
    one = it.add(1, 2, 3)
    hosted = await it.load(one)
    assert hosted.host is not None
    status = Path(f"/proc/{hosted.host.pid}/status")
    assert _shared_bytes(status) >= WEIGHTS_BYTES
    await it.empty(one)
    assert _shared_bytes(status) < MIB


def _shared_bytes(status: Path) -> int:
    """What a process has mapped and touched of memory files, such as images."""
    (line,) = [line for line in status.read_text().splitlines() if line.startswith("RssShmem:")]
    return int(line.split()[1]) * 1024
