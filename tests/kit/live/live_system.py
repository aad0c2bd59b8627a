"""The whole scheduler on emulated GPUs, over its streams or in one process."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Protocol

from cache_manager.model.ids import ModelId, NodeId
from gpu_manager.attachment.attachment import Attachment
from scheduler.composition import make_core
from scheduler.model.events import ModelRegistered
from scheduler.model.values import GpuSpec, LeaseId, Placement, Request, RequestId
from scheduler.service.access import ApiRole, token
from scheduler.service.driver import Driver
from scheduler.service.history.recorder import RunRecorder
from scheduler.service.http.app import listen, make_app, serving
from scheduler.service.scheduler_service import SchedulerService
from scheduler.settings import Serving, Settings
from scheduler.sim.model_catalogue import BATCH, SimModel
from tests.kit.live.emulated_node import EmulatedNode
from tests.kit.loop_clock import LoopClock
from tests.kit.nodes.attaching import attach_in_process
from tests.kit.worlds.waiting_caller import WaitingCaller

_SECRET = b"the secret of the live bench"
_LOG = logging.getLogger("bench.live")


class LeaseCalls(Protocol):
    """How callers acquire and release leases."""

    async def acquire(self, request: Request) -> Placement:
        """Wait for a lease."""
        ...

    def release(self, lease: LeaseId) -> None:
        """Give a lease back."""
        ...


@dataclass(frozen=True, slots=True)
class AnsweredRequest:
    """One request as its caller saw it; times are those of the event loop."""

    arrived_s: float
    done_s: float
    lease: LeaseId
    hit: bool

    @property
    def latency_s(self) -> float:
        """From its arrival until its inference was done."""
        return self.done_s - self.arrived_s


@dataclass(slots=True)
class LiveSystem:
    """A scheduler with its nodes, and the requests that it answered."""

    leasing: LeaseCalls
    driver: Driver
    nodes: Mapping[NodeId, EmulatedNode]
    answered: list[AnsweredRequest] = field(default_factory=list)

    async def ask(self, name: str, model: ModelId, before_s: float = 0.0) -> None:
        """One invocation: a lease, `before_s` of the function's own work, then its GPU work."""
        loop = asyncio.get_running_loop()
        arrived_s = loop.time()
        placement = await self.leasing.acquire(Request(RequestId(name), model, (model,), BATCH))
        if before_s:
            await asyncio.sleep(before_s)
        await self.nodes[placement.node].call(placement.lease)
        answered = AnsweredRequest(arrived_s, loop.time(), placement.lease, placement.hit)
        self.answered.append(answered)
        self.leasing.release(placement.lease)

    async def at_rest(self) -> None:
        """Wait until every slot is free again."""
        while any(slot.leases for gpu in self.driver.status().gpus for slot in gpu.slots):
            await asyncio.sleep(0.005)


@dataclass(frozen=True, slots=True)
class Setup:
    """A scheduler's policy, and the GPUs and models that it has; a recording, if it is named."""

    policy: str
    gpus: Sequence[GpuSpec]
    models: Sequence[SimModel]
    record: Path | None = None

    def nodes(self, now_s: Callable[[], float]) -> dict[NodeId, EmulatedNode]:
        """The nodes of these GPUs, by this clock."""
        by_node: dict[NodeId, list[GpuSpec]] = defaultdict(list)
        for gpu in self.gpus:
            by_node[gpu.node].append(gpu)
        return {
            name: EmulatedNode(name, gpus, self.models, now_s) for name, gpus in by_node.items()
        }


@asynccontextmanager
async def live(setup: Setup) -> AsyncIterator[LiveSystem]:
    """The real service: streams of callers and of nodes, all on loopback in this process."""
    async with AsyncExitStack() as stack:
        recorder = None if setup.record is None else RunRecorder(setup.record)
        if recorder is not None:
            stack.callback(recorder.close)
        listener = listen("127.0.0.1", 0)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        settings = Settings(policy=setup.policy, scheduler=Serving())
        service = SchedulerService(settings, _SECRET, "live", url, recorder)
        server = serving(make_app(service), listener, streams=service.serve_stream)
        await stack.enter_async_context(server)
        office = await stack.enter_async_context(service.lead(1))
        _register(office.driver, setup.models)
        nodes = setup.nodes(monotonic)
        for node in nodes.values():
            await stack.enter_async_context(_on_a_stream(node, url))
        client = WaitingCaller([url], token(_SECRET, ApiRole.CALLER))
        await stack.enter_async_context(client)
        while len(office.driver.status().gpus) < len(setup.gpus):
            await asyncio.sleep(0.01)
        yield LiveSystem(_OverStream(client), office.driver, nodes)


@asynccontextmanager
async def ideal(setup: Setup) -> AsyncIterator[LiveSystem]:
    """The driver alone; on virtual time only loads and runs take time."""
    clock = LoopClock(asyncio.get_running_loop())
    driver = Driver(make_core(setup.policy), clock, _LOG)
    _register(driver, setup.models)
    nodes = setup.nodes(clock.now_s)
    for node in nodes.values():
        attach_in_process(driver, node)
    yield LiveSystem(_InProcess(driver), driver, nodes)
    driver.close()


@asynccontextmanager
async def _on_a_stream(node: EmulatedNode, url: str) -> AsyncIterator[None]:
    attachment = Attachment([url], node.name, _SECRET)
    node.reports = attachment
    attachment.attach(node.name, node)
    try:
        yield
    finally:
        attachment.detach(node.name)
        await attachment.close()


def _register(driver: Driver, models: Iterable[SimModel]) -> None:
    for model in models:
        driver.report(ModelRegistered(model.spec()))


class _OverStream:
    """Leases as a gateway asks for them."""

    def __init__(self, client: WaitingCaller) -> None:
        self._client = client

    async def acquire(self, request: Request) -> Placement:
        return (await self._client.acquire(request)).placement

    def release(self, lease: LeaseId) -> None:
        self._client.release(lease)


class _InProcess:
    """Leases by calls of the driver."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    async def acquire(self, request: Request) -> Placement:
        return await self._driver.acquire(request)

    def release(self, lease: LeaseId) -> None:
        self._driver.release(lease)
