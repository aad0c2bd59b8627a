"""A node on virtual time that a test gives orders to, and a record of what it reports."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from cache_manager.model.ids import MIB, GpuId, ModelId, NodeId, Tier
from cache_manager.tier_index import TierIndex
from common.gpu_wishes import STREAM, GpuWishes
from gpu_manager.emulated.gpu import EmulatedGpu
from gpu_manager.node.ledger import Ledger
from gpu_manager.node.node import GpuNode
from gpu_manager.node.residents import HostGpu
from gpu_manager.node.settings import NodeSettings
from gpu_manager.node.tenant_models import Catalogue
from gpu_manager.sessions.sessions import ClientSession, session_key
from gpu_manager.sessions.weight_requests import Library
from gpu_manager.weights.sealed_images import ImageWriter
from gpu_manager.weights.store import WeightStore
from scheduler.api import (
    Demote,
    DemoteStored,
    Dispatch,
    EndContext,
    Estimate,
    Event,
    GpuSnapshot,
    GpuSpec,
    LeaseId,
    ModelLoad,
    NodeSnapshot,
    Placement,
    Prepare,
    RequestId,
    SlotId,
)
from tests.kit.nodes.in_memory_runtime import InMemoryHosted, InMemoryRuntime
from tests.kit.virtual_time import until
from tests.kit.waiting import eventually
from tests.kit.worlds.gpu_node import GPU, OWNER
from torch_shim.wire.image_digests import lay_out

Kind = TypeVar("Kind")
SLOT = SlotId(GPU)
# What a process without a model takes here.
CONTEXT_BYTES = 100 * MIB


@dataclass
class ReportRecord:
    """Takes every report."""

    events: list[Event] = field(default_factory=list)

    def report(self, event: Event) -> None:
        self.events.append(event)


@dataclass
class OrderedNode:
    """The node, its parts, and short forms of the orders."""

    node: GpuNode
    gpu: HostGpu
    runtime: InMemoryRuntime
    store: WeightStore
    library: Library
    record: ReportRecord
    _leases: int = 0

    def add(
        self, weights_mib: int, owner: str = OWNER.tenant, runtime: str = "", share: float = 1.0
    ) -> ModelId:
        """A model of this size; a process of its own takes a context more than the weights."""
        identity = type(OWNER)(owner, "function", GpuWishes(runtime, share))
        table = lay_out([weights_mib * MIB])
        writer = ImageWriter(table)
        writer.write(b"%d" % weights_mib)
        digest = self.store.adopt(writer.seal(), table, str(identity))
        session = ClientSession(session_key(identity, "s"), identity)
        model = self.library.add(session, digest, table).id
        own_bytes = 0 if runtime == STREAM else CONTEXT_BYTES
        self.runtime.memory_bytes[model] = weights_mib * MIB + own_bytes
        return model

    def digest(self, model: ModelId) -> str:
        return self.library.catalogue.get(model).digest

    def prepare(
        self,
        model: ModelId,
        *,
        emptied: ModelId | None = None,
        victims: Iterable[ModelId] = (),
        ends: Iterable[ModelId] = (),
    ) -> Placement:
        """Order a load and a lease for it; `ends` have left empty processes that must end."""
        self._leases += 1
        lease, requests = LeaseId(self._leases), (RequestId(f"r{self._leases}"),)
        load = ModelLoad(model, self.runtime.memory_bytes[model], Tier.HOST, emptied)
        self.node.prepare(Prepare(SLOT, GPU, lease, tuple(victims), (load,), False, tuple(ends)))
        return self.grant(model, lease, requests)

    def grant(
        self,
        model: ModelId,
        lease: LeaseId | None = None,
        requests: tuple[RequestId, ...] = (RequestId("r"),),
        function: str = "",
    ) -> Placement:
        """Order a lease alone."""
        if lease is None:
            self._leases += 1
            lease = LeaseId(self._leases)
        estimate, name = Estimate(0.0, 0.0), self.node.name
        self.node.grant(
            Dispatch(
                lease,
                SLOT,
                GPU,
                name,
                requests,
                hit=False,
                held_elsewhere=False,
                estimate=estimate,
                rule="test",
                models=(model,),
                function=function,
            )
        )
        return Placement(lease, GPU, name, SLOT, (model,), hit=False, estimate=estimate)

    async def loaded(self, model: ModelId, *, emptied: ModelId | None = None) -> InMemoryHosted:
        """Load a model, and let time pass until it is there."""
        placement = self.prepare(model, emptied=emptied)
        await self.node.leases.when_loaded(placement)
        return self.runtime.of(model)

    def empty(self, model: ModelId) -> None:
        self.node.demote(Demote(GPU, model, "test", keeps_context=True))

    def demote(self, model: ModelId) -> None:
        self.node.demote(Demote(GPU, model, "test"))

    def end_context(self, model: ModelId) -> None:
        self.node.end_context(EndContext(GPU, model, "test"))

    def step_down(self, model: ModelId, tier: Tier) -> None:
        self.node.demote_stored(DemoteStored(self.node.name, model, tier, "test"))

    async def advance(self, seconds: float) -> None:
        """Let time pass."""
        await until(asyncio.get_running_loop().time() + seconds)

    async def settle(self) -> None:
        """Let all that was ordered come to its end."""
        await until(asyncio.get_running_loop().time() + 60.0)
        assert not self.gpu.leaving

    def seen(self, kind: type[Kind]) -> list[Kind]:
        return [event for event in self.record.events if isinstance(event, kind)]

    def forget_reports(self) -> None:
        self.record.events.clear()

    def shown(self) -> GpuSnapshot:
        """The GPU in a snapshot of now."""
        (found,) = self.node.snapshot().gpus
        return found

    def snapshots(self) -> list[NodeSnapshot]:
        return self.seen(NodeSnapshot)

    def check_books(self) -> None:
        """The ledger has what the processes take, and no process is left that it lacks."""
        there = [found for found in self.runtime.hosted if not found.closed.done()]
        empty = [found for found in self.runtime.empty if not found.closed.done()]
        taken_bytes = sum(found.memory_bytes for found in there)
        taken_bytes += sum(found.memory_bytes for found in empty)
        assert self.gpu.ledger.granted_bytes == taken_bytes
        hosts = {found.host for found in there} | {found.host for found in empty}
        assert hosts == self.gpu.processes()
        assert taken_bytes <= self.gpu.ledger.capacity_bytes


@asynccontextmanager
async def ordered_node(
    gpu_mib: int = 1024, store: WeightStore | None = None
) -> AsyncIterator[OrderedNode]:
    """A node with one emulated GPU and nothing on it; every image is released in the end."""
    name = NodeId("node")
    device = EmulatedGpu(GPU, gpu_mib * MIB)
    ledger = Ledger(device.memory_bytes, CONTEXT_BYTES)
    gpu = HostGpu(device, GpuSpec(GpuId(GPU), name, device.memory_bytes), ledger)
    store = store or WeightStore(TierIndex("lru", 64 * 1024 * MIB))
    catalogue, record = Catalogue(), ReportRecord()
    node = GpuNode(NodeSettings("node", ()), [gpu], store, catalogue, record, (), lambda *_: None)
    runtime = InMemoryRuntime(node)
    runtime.context_bytes = CONTEXT_BYTES
    library = Library(node.weights, store, catalogue, record, CONTEXT_BYTES)
    found = OrderedNode(node, gpu, runtime, store, library, record)
    node.start(runtime)
    try:
        yield found
    finally:
        await node.drain(1.0)
        await runtime.close()
        await eventually(lambda: not gpu.leaving, "nothing leaves any more")
        store.close()
