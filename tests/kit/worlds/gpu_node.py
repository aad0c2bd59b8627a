"""A node on virtual time: the real node and driver, and a runtime without processes."""

import asyncio
import logging
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from cache_manager.model.ids import MIB, GpuId, ModelId, NodeId
from cache_manager.tier_index import TierIndex
from gpu_manager.credentials import FunctionIdentity
from gpu_manager.devices.gpu_device import HealthEvent
from gpu_manager.emulated.gpu import EmulatedGpu
from gpu_manager.node.device_watch import DeviceWatch
from gpu_manager.node.leases import Lease, LeaseTimes, SessionKey
from gpu_manager.node.ledger import Ledger
from gpu_manager.node.node import GpuNode
from gpu_manager.node.residents import HostGpu
from gpu_manager.node.settings import EmulatedTimes, NodeSettings
from gpu_manager.node.tenant_models import Catalogue, TenantModel
from gpu_manager.runtimes.runtime import NodeFeature
from gpu_manager.sessions.sessions import ClientSession, session_key
from gpu_manager.sessions.weight_requests import Library
from gpu_manager.weights.sealed_images import ImageWriter
from gpu_manager.weights.store import WeightStore
from scheduler.api import Event, GpuSpec, LeaseId, Placement, Request, RequestId
from scheduler.composition import make_core
from scheduler.features.billing.use_meter import UseMeter
from scheduler.service.driver import Driver
from tests.kit.loop_clock import LoopClock
from tests.kit.nodes.in_memory_runtime import InMemoryHosted, InMemoryRuntime
from torch_shim.wire.image_digests import lay_out

Kind = TypeVar("Kind")

OWNER = FunctionIdentity("team", "function")
GPU = GpuId("node/cpu:0")
# A model of this many bytes of weights is counted with this much more before it is measured.
GUESS_BYTES = 64 * MIB


@dataclass(slots=True)
class World:
    """The parts of one node, and what it reported."""

    node: GpuNode
    driver: Driver
    runtime: InMemoryRuntime
    store: WeightStore
    library: Library
    events: list[Event]
    meter: UseMeter
    ended: list[tuple[SessionKey, LeaseId]]
    _requests: int = 0

    def add(self, weights_mib: int, owner: FunctionIdentity = OWNER) -> ModelId:
        """A model of this size, known by its size alone."""
        return add_model(self.library, weights_mib, owner)

    def model(self, model: ModelId) -> TenantModel:
        return self.library.catalogue.get(model)

    async def acquire(
        self, *models: ModelId, deadline_s: float | None = None, own: bool = False
    ) -> Placement:
        """A lease, as the scheduler gives it: nobody has claimed it yet."""
        self._requests += 1
        name = RequestId(f"r{self._requests}")
        request = Request(name, "f", models, deadline_s=deadline_s, own=own)
        return await self.driver.acquire(request)

    async def hold(
        self, *models: ModelId, session: str = "s", own: bool = False
    ) -> tuple[Lease, InMemoryHosted]:
        """A claimed lease, and the worker of its first model."""
        placement = await self.acquire(*models, own=own)
        workers = await self.node.leases.when_loaded(placement)
        assert self.node.leases.claim(placement.lease, SessionKey(session), workers.values())
        held = self.node.leases.get(placement.lease)
        assert held is not None
        return held, self.runtime.of(models[0])

    def seen(self, kind: type[Kind]) -> list[Kind]:
        """What was reported of one kind."""
        return [event for event in self.events if isinstance(event, kind)]

    def residents(self, gpu: GpuId = GPU) -> dict[ModelId, int]:
        """What the scheduler believes to be on a GPU, with its bytes."""
        (found,) = [status for status in self.driver.status().gpus if status.id == gpu]
        return {resident.model: resident.memory_bytes for resident in found.residents}

    def idle(self) -> bool:
        """Whether the scheduler believes that no lease is in force."""
        status = self.driver.status()
        return not any(slot.leases for gpu in status.gpus for slot in gpu.slots)


def add_model(library: Library, weights_mib: int, owner: FunctionIdentity = OWNER) -> ModelId:
    """Add a model of this size, known by its size alone."""
    table = lay_out([weights_mib * MIB])
    writer = ImageWriter(table)
    writer.write(b"%d" % weights_mib)
    digest = library.store.adopt(writer.seal(), table, str(owner))
    return library.add(ClientSession(session_key(owner, "s"), owner), digest, table).id


def granted_bytes(gpu: HostGpu) -> dict[ModelId, int]:
    """What the residents of a GPU are granted."""
    return {model: resident.memory.granted_bytes for model, resident in gpu.residents.items()}


@asynccontextmanager
async def world(
    gpu_mib: int = 1024,
    gpus: int = 1,
    times: LeaseTimes | None = None,
    store: WeightStore | None = None,
    *,
    shared: bool = False,
    watched: bool = False,
    emulation: EmulatedTimes = EmulatedTimes(),  # noqa: B008 - it never changes
    features: Sequence[NodeFeature] = (),
) -> AsyncIterator[World]:
    """A node with emulated GPUs and nothing on them.

    `shared`: one process runs many models; `watched`: its GPUs are looked at every two seconds.
    """
    loop = asyncio.get_running_loop()
    settings = NodeSettings("node", (), leases=times or LeaseTimes(), emulation=emulation)
    name = NodeId("node")
    devices = [EmulatedGpu(GpuId(f"node/cpu:{index}"), gpu_mib * MIB) for index in range(gpus)]
    store = store or WeightStore(TierIndex("lru", 64 * 1024 * MIB))
    hosts = [
        HostGpu(device, GpuSpec(device.id, name, device.memory_bytes), Ledger(device.memory_bytes))
        for device in devices
    ]
    catalogue = Catalogue()
    events: list[Event] = []
    core = make_core("lalbo3")
    driver = Driver(
        core,
        LoopClock(loop),
        logging.getLogger("test"),
        observer=lambda _, event, _actions: events.append(event),
    )
    ended: list[tuple[SessionKey, LeaseId]] = []
    node = GpuNode(
        settings, hosts, store, catalogue, driver, features, lambda *lease: ended.append(lease)
    )
    runtime = InMemoryRuntime(node, shared=shared)
    library = Library(node.weights, store, catalogue, driver, 0)
    meter = core.add(UseMeter(core.lifecycle, loop.time()))
    found = World(node, driver, runtime, store, library, events, meter, ended)
    driver.attach(name, node)
    node.start(runtime)
    if watched:
        DeviceWatch(node).start()
    try:
        yield found
    finally:
        await node.drain(1.0)
        await runtime.close()
        driver.close()
        store.close()


TOTAL_BYTES = 1024 * MIB


@dataclass
class MeasuredDevice:
    """A GPU that says of itself what a test wants."""

    id: GpuId = GPU
    kind: str = "cuda"
    name: str = "measured GPU"
    gpu_type: str = "measured"
    memory_bytes: int = TOTAL_BYTES
    device_bytes: int = TOTAL_BYTES
    worker_device: str = "cuda:GPU-a"
    is_divisible: bool = True
    used: int | None = 0
    by_process: dict[int, int] = field(default_factory=dict)
    events: list[HealthEvent] = field(default_factory=list)

    def used_bytes(self) -> int | None:
        return self.used

    def process_bytes(self, pids: Collection[int] = ()) -> Mapping[int, int]:
        del pids
        return self.by_process

    def memory_utilisation(self) -> None:
        return None

    def utilisation(self) -> None:
        return None

    def health(self) -> tuple[HealthEvent, ...]:
        said, self.events = tuple(self.events), []
        return said

    def close(self) -> None:
        return None
