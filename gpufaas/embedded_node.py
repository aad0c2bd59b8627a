"""A GPU manager with the scheduler's core in one process, for `exec` and `gpu-manager`."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from common.addresses import Address
from gpu_manager.api import FunctionIdentity, GpuManager, MakeRuntime, NodeSettings
from gpu_manager.devices.gpu_device import GpuDevice
from gpu_manager.emulated.memory_pool import PoolNotBuilt, pool_library
from gpu_manager.runtimes.process import ProcessRuntime, ProcessSettings
from gpu_manager.runtimes.runtime import Observer, Runtime
from gpu_manager.runtimes.stream import sharing_processes
from gpu_manager.runtimes.worker_pool import PoolSettings
from gpufaas.options.gpu_node import POLICY
from scheduler.api import Status
from scheduler.composition import make_core
from scheduler.core.core import Core
from scheduler.service.driver import Driver, MonotonicClock

log = logging.getLogger(__name__)

_EVICTION = "lru"


@dataclass(frozen=True, slots=True)
class EmbeddedNode:
    """A running node with its own scheduler."""

    manager: GpuManager
    driver: Driver
    core: Core

    @property
    def addresses(self) -> tuple[Address, ...]:
        return self.manager.addresses

    def credential(self, tenant: str, function: str) -> str:
        return self.manager.credentials.issue(FunctionIdentity(tenant, function))

    def status(self) -> Status:
        return self.driver.status()


# What has models share processes, if anything does.
_SHARING: tuple[Callable[[ProcessRuntime, str, Path | None], Runtime], ...] = (sharing_processes,)


@asynccontextmanager
async def embedded_node(
    settings: NodeSettings, policy: str = POLICY, make_runtime: MakeRuntime | None = None
) -> AsyncIterator[EmbeddedNode]:
    """Run a node within the context; at the end it is drained and closed."""
    core = make_core(policy, _EVICTION)
    driver = Driver(core, MonotonicClock(), logging.getLogger("scheduler"))
    try:
        async with GpuManager(
            settings, driver, make_runtime or worker_processes(settings)
        ) as manager:
            yield EmbeddedNode(manager, driver, core)
    finally:
        driver.close()


def worker_processes(settings: NodeSettings) -> MakeRuntime:
    """Return what makes a node's runtime: worker processes for each model, or each tenant."""
    emulation = settings.emulation
    pool = PoolSettings(context_s=emulation.context_s, context_bytes=emulation.context_bytes)
    spare = settings.spare_contexts
    if spare is not None:
        pool = replace(pool, least=min(pool.least, spare), most=spare, most_cuda=spare)

    async def make(observer: Observer, devices: Sequence[GpuDevice]) -> Runtime:
        kinds = [device.worker_device for device in devices]
        emulated = all(device.kind == "cpu" for device in devices)
        library = await asyncio.to_thread(_built_pool) if emulated else None
        processes = ProcessSettings(pool=pool, pool_library=library)
        alone = ProcessRuntime(observer, kinds, processes)
        sharing = (share(alone, settings.runtime, settings.spill) for share in _SHARING)
        return next(sharing, alone)

    return make


def _built_pool() -> Path | None:
    """The library by which models share an emulated GPU's process; None where it cannot be made."""
    try:
        return pool_library()
    except (PoolNotBuilt, OSError) as error:
        log.warning("every model has a process of its own: the pool is not built: %s", error)
        return None
