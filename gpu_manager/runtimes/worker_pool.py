"""The warm pool: workers that wait for a model; their number follows recent demand.

Besides those with a context it has some that are forked and nothing more: they hold no memory of a
GPU, serve every device, and save the load that takes one the time of a fork.
"""

import asyncio
import functools
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from common.time_limits import time_limit
from gpu_manager.errors import NoWorker
from gpu_manager.runtimes.fork_client import ForkedWorker, ForkServer
from gpu_manager.worker import orders
from torch_shim.errors import WireError

log = logging.getLogger(__name__)

_SPARE_BYTES = 64 << 20  # that a spare worker takes
_PAUSE_S, _MOST_DOUBLINGS = 0.1, 7  # up to 13 s between spare workers that die


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """How many workers wait for each device.

    The number is that of the models loaded in the last `window_s`, but at least `least` and at most
    `most` (`most_cuda` for a real GPU, on which a spare worker holds a context). The workers of all
    devices together fit into `memory_bytes`. Emulated GPUs' contexts take `context_s` and
    `context_bytes`. So many more processes are `forked` ahead, without a device.
    """

    least: int = 1
    most: int = 4
    most_cuda: int = 1
    forked: int = 1
    window_s: float = 10.0
    memory_bytes: int = 1 << 30
    refill_delay_s: float = 0.1  # so that the load that took a worker runs first
    context_s: float = 0.0  # that an emulated GPU's context takes
    context_bytes: int = 0


class Pool:
    """Hands out spare workers, and replaces those taken or dead."""

    def __init__(
        self, server: ForkServer, devices: tuple[str, ...], settings: PoolSettings
    ) -> None:
        self._server = server
        self._settings = settings
        self._spares: dict[str, deque[ForkedWorker]] = {device: deque() for device in devices}
        self._loads: dict[str, deque[float]] = {device: deque() for device in devices}
        self._forked: deque[ForkedWorker] = deque()
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        self._deaths = 0  # of spare workers, since one was of use

    @property
    def ready(self) -> dict[str, int]:
        return {device: len(spares) for device, spares in self._spares.items()}

    @property
    def forked(self) -> int:
        return len(self._forked)

    def spares(self, device: str) -> Sequence[ForkedWorker]:
        """Return the workers for this device that are ready, the next one first."""
        return tuple(self._spares.get(device, ()))

    def start(self) -> None:
        """Keep the pool filled from now on; without effect if it is already."""
        if self._task is None and not self._closed:
            self._task = asyncio.get_running_loop().create_task(self._maintain())

    async def take(self, device: str, model: str, *, fresh: bool = False) -> ForkedWorker:
        """Return a warmed worker, else one that begins to make its context; a new one if `fresh`.

        The first one starts the pool, if nothing else has.
        """
        loop = asyncio.get_running_loop()
        spares = self._spares.setdefault(device, deque())
        self._loads.setdefault(device, deque()).append(loop.time())
        loop.call_later(self._settings.refill_delay_s, self._refill)
        worker = None if fresh else _living(spares)
        if worker is not None:
            self._deaths = 0
            return worker
        try:
            return await self._warm(None if fresh else _living(self._forked), device)
        except (WireError, OSError) as error:
            raise NoWorker(model, str(error)) from error

    async def close(self) -> None:
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for spares in (*self._spares.values(), self._forked):
            while spares:
                await self._discard(spares.pop())

    def _refill(self) -> None:
        self.start()
        self._wake.set()

    async def _maintain(self) -> None:
        while True:
            self._wake.clear()
            for device, spares in self._spares.items():
                make = functools.partial(self._warm, None, device)
                await self._adjust(spares, self._wanted(device), make)
            await self._adjust(self._forked, self._settings.forked, self._server.fork)
            try:
                async with time_limit(self._settings.window_s):
                    await self._wake.wait()
            except TimeoutError:
                continue  # the demand may have fallen: adjust the number of spares

    async def _adjust(
        self,
        spares: deque[ForkedWorker],
        wanted: int,
        make: Callable[[], Awaitable[ForkedWorker]],
    ) -> None:
        while len(spares) > wanted:
            await self._discard(spares.popleft())
        while len(spares) < wanted:
            try:
                worker = await make()
            except (NoWorker, WireError, OSError) as error:
                log.warning("no spare worker: %s", error)
                return
            spares.append(worker)
            worker.exited.add_done_callback(functools.partial(self._died, spares, worker))

    def _died(
        self, spares: deque[ForkedWorker], worker: ForkedWorker, _: "asyncio.Future[None]"
    ) -> None:
        if worker in spares:
            log.warning("a spare worker died")
            spares.remove(worker)
            worker.close()
            # One that dies of its GPU dies again: each next one is made later.
            pause_s = self._settings.refill_delay_s + _PAUSE_S * (2**self._deaths - 1)
            self._deaths = min(self._deaths + 1, _MOST_DOUBLINGS)
            asyncio.get_running_loop().call_later(pause_s, self._wake.set)

    def _wanted(self, device: str) -> int:
        settings = self._settings
        recent = self._loads[device]
        now_s = asyncio.get_running_loop().time()
        while recent and recent[0] < now_s - settings.window_s:
            recent.popleft()
        affordable = settings.memory_bytes // _SPARE_BYTES // len(self._spares)
        most = min(settings.most if device == "cpu" else settings.most_cuda, affordable)
        return min(most, max(settings.least, len(recent)))

    async def _warm(self, worker: ForkedWorker | None, device: str) -> ForkedWorker:
        settings = self._settings
        worker = await self._server.fork() if worker is None else worker
        await worker.send(orders.Warm(device, settings.context_s, settings.context_bytes))
        return worker

    async def _discard(self, worker: ForkedWorker) -> None:
        worker.kill("not needed any more")
        await worker.wait_for_exit("not needed any more")


def _living(spares: deque[ForkedWorker]) -> ForkedWorker | None:
    while spares:
        worker = spares.popleft()
        if not worker.exited.done():
            return worker
    return None
