"""A GPU manager and the scheduler's core in one process: what `exec` and `gpu-manager` run."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from gpu_manager.api import Address, GpuManager, Identity, MakeRuntime, NodeSettings
from gpu_manager.devices.base import Device
from gpu_manager.runtime import Observer, Runtime
from gpu_manager.workers import ProcessRuntime
from scheduler.api import Status
from scheduler.core import make_core
from scheduler.service.clock import LoopClock
from scheduler.service.driver import Driver

log = logging.getLogger(__name__)

POLICY = "lalbo3"
_EVICTION = "lru"


@dataclass(frozen=True, slots=True)
class EmbeddedNode:
    """A node at work, with a scheduler of its own."""

    manager: GpuManager
    driver: Driver

    @property
    def addresses(self) -> tuple[Address, ...]:
        """Where clients find it."""
        return self.manager.addresses

    def credential(self, tenant: str, function: str) -> str:
        """What this function needs to be let in."""
        return self.manager.credentials.issue(Identity(tenant, function))

    def status(self) -> Status:
        """What the scheduler decided so far."""
        return self.driver.status()


@asynccontextmanager
async def embedded_node(
    settings: NodeSettings, policy: str = POLICY, make_runtime: MakeRuntime | None = None
) -> AsyncIterator[EmbeddedNode]:
    """Run a node; at the end it is drained, and nothing of it is left."""
    loop = asyncio.get_running_loop()
    driver = Driver(make_core(policy, _EVICTION), LoopClock(loop), logging.getLogger("scheduler"))
    try:
        async with GpuManager(settings, driver, make_runtime or processes) as manager:
            yield EmbeddedNode(manager, driver)
    finally:
        driver.close()


async def processes(observer: Observer, devices: Sequence[Device]) -> Runtime:
    """A process for each model."""
    runtime = ProcessRuntime(observer, [device.worker_device for device in devices])
    await runtime.start()
    return runtime
