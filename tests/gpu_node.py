"""A node on virtual time: the real node and driver, and a runtime without processes."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from cache_manager.model import MIB, GpuId, ModelId, NodeId
from gpu_manager.catalogue import Catalogue, Model
from gpu_manager.credentials import Identity
from gpu_manager.devices.cpu import CpuDevice
from gpu_manager.images import ImageWriter
from gpu_manager.leases import Held, LeaseTimes, SessionKey
from gpu_manager.ledger import Ledger
from gpu_manager.node import Node
from gpu_manager.residents import HostGpu
from gpu_manager.sessions import Session, session_key
from gpu_manager.settings import NodeSettings
from gpu_manager.weight_requests import Library
from gpu_manager.weights import WeightStore
from scheduler.api import Event, GpuSpec, LeaseId, Placement, Request, RequestId
from scheduler.core import make_core
from scheduler.service.clock import LoopClock
from scheduler.service.driver import Driver
from tests.in_memory_runtime import AtOnce, InMemoryHosted, InMemoryRuntime
from torch_shim.digests import lay_out

Kind = TypeVar("Kind")

OWNER = Identity("team", "function")
GPU = GpuId("node/cpu:0")
# A model of this many bytes of weights is counted with this much more before it is measured.
GUESS_BYTES = 64 * MIB


@dataclass(slots=True)
class World:
    """The parts of one node, and what it reported."""

    node: Node
    driver: Driver
    runtime: InMemoryRuntime
    store: WeightStore
    library: Library
    events: list[Event]
    ended: list[tuple[SessionKey, LeaseId]] = field(default_factory=list)
    _requests: int = 0

    def add(self, weights_mib: int, owner: Identity = OWNER) -> ModelId:
        """A model of this size, known by its size alone."""
        table = lay_out([weights_mib * MIB])
        writer = ImageWriter(table)
        writer.write(b"%d" % weights_mib)
        digest = self.store.adopt(writer.seal(), table, str(owner))
        return self.library.add(Session(session_key(owner, "s"), owner), digest, table).id

    def model(self, model: ModelId) -> Model:
        return self.library.catalogue.get(model)

    async def acquire(self, *models: ModelId, deadline_s: float | None = None) -> Placement:
        """A lease, as the scheduler gives it: nobody has claimed it yet."""
        self._requests += 1
        name = RequestId(f"r{self._requests}")
        return await self.driver.acquire(Request(name, "f", models, deadline_s=deadline_s))

    async def hold(self, *models: ModelId, session: str = "s") -> tuple[Held, InMemoryHosted]:
        """A claimed lease, and the worker of its first model."""
        placement = await self.acquire(*models)
        workers = await self.node.workers(placement)
        assert self.node.claim(placement.lease, SessionKey(session), workers.values())
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


@asynccontextmanager
async def world(
    gpu_mib: int = 1024,
    gpus: int = 1,
    times: LeaseTimes | None = None,
    store: WeightStore | None = None,
) -> AsyncIterator[World]:
    """A node with emulated GPUs and nothing on them."""
    loop = asyncio.get_running_loop()
    loop.set_default_executor(AtOnce())
    settings = NodeSettings("node", (), leases=times or LeaseTimes())
    name = NodeId("node")
    devices = [CpuDevice(GpuId(f"node/cpu:{index}"), gpu_mib * MIB) for index in range(gpus)]
    store = store or WeightStore(64 * 1024 * MIB)
    hosts = [
        HostGpu(device, GpuSpec(device.id, name, device.memory_bytes), Ledger(device.memory_bytes))
        for device in devices
    ]
    catalogue = Catalogue()
    events: list[Event] = []
    driver = Driver(
        make_core("lalbo3"),
        LoopClock(loop),
        logging.getLogger("test"),
        recorder=lambda _, event: events.append(event),
    )
    node = Node(settings, hosts, store, catalogue)
    runtime = InMemoryRuntime(node)
    library = Library(name, store, catalogue, driver, 0)
    found = World(node, driver, runtime, store, library, events)
    node.lease_ended = lambda holder, lease: found.ended.append((holder, lease))
    driver.attach(name, node)
    node.start(runtime, driver)
    try:
        yield found
    finally:
        await node.drain(1.0)
        await runtime.close()
        driver.close()
        store.close()
