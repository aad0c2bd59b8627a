"""The process-per-model runtime: hosts each model in a worker process from a warm pool."""

import asyncio
import itertools
import logging
import os
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from common.liveness import LivenessTimes, until_frozen
from common.tasks import BackgroundTasks
from common.telemetry.traces import trace_of
from gpu_manager.errors import LoadFailure, NoWorker
from gpu_manager.runtimes.process.fork_client import ForkedWorker, ForkServer
from gpu_manager.runtimes.process.image_loads import load_within, send_image, spans_of
from gpu_manager.runtimes.process.worker_pool import Pool, PoolSettings
from gpu_manager.runtimes.runtime import (
    HostedId,
    HostedModel,
    HostProcess,
    LoadOrder,
    LoadSpan,
    Observer,
)
from gpu_manager.worker import worker_orders
from torch_shim.errors import WireError

log = logging.getLogger(__name__)

# If the event loop wakes later than this, the loop itself was delayed: an answer may be unread.
_DELAYED_S = 0.05
# A worker is asked for an answer while it has leases; its calls do not delay the answer.
_LIVENESS = LivenessTimes(ask_s=1.0, blocked_s=5.0)
# A worker that ends sends functions what only it has.
_LEAVING_S = 2.0
# A lease that no scheduler gives: a worker answers its end at once, whatever its calls do.
_NO_LEASE = 0
# Users that workers of different tenants run as: a range that fits a container's 16 bits too.
_FIRST_UID, _UIDS = 62_000, 3_000


@dataclass(frozen=True, slots=True)
class ProcessSettings:
    """The limits of worker processes, and the settings of their pool."""

    pool: PoolSettings = field(default_factory=PoolSettings)
    descriptors: int = 4096
    processes: int = 8192
    load_timeout_s: float = 120.0
    change_user: bool = True
    liveness: LivenessTimes = _LIVENESS


class HostedProcess:
    """A model in a separate process."""

    def __init__(
        self, order: LoadOrder, worker: ForkedWorker, observer: Observer, begin_s: float
    ) -> None:
        """`begin_s` is when the worker was asked for."""
        self._order = order
        self._worker = worker
        self._host = HostProcess(worker.pid)
        self._observer = observer
        self._memory_bytes = 0
        self._load_s = 0.0
        self._begin_s = begin_s
        self._load_spans = [LoadSpan("worker", begin_s, asyncio.get_running_loop().time())]
        self._admitted: set[int] = set()
        self._ending: dict[int, asyncio.Future[None]] = {}
        self._watching: asyncio.Task[None] | None = None
        self._pressures = BackgroundTasks(log, f"finding memory for {order.model}")
        self._exit_expected = False
        self._closed: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def order(self) -> LoadOrder:
        """The order by which the model was loaded."""
        return self._order

    @property
    def id(self) -> HostedId:
        """The worker's name: the worker runs only this model."""
        return HostedId(self._worker.name)

    @property
    def host(self) -> HostProcess:
        """The worker's process."""
        return self._host

    @property
    def worker(self) -> ForkedWorker:
        """The worker, which runs only this model."""
        return self._worker

    @property
    def memory_bytes(self) -> int:
        """The GPU memory that the worker last reported."""
        return self._memory_bytes

    @property
    def load_s(self) -> float:
        """The duration of the load."""
        return self._load_s

    @property
    def load_spans(self) -> Sequence[LoadSpan]:
        """The parts of the load: the worker, its context if it had none, the transfer."""
        return self._load_spans

    @property
    def closed(self) -> asyncio.Future[str]:
        """Done when the process has ended."""
        return self._closed

    async def load(self, assign: worker_orders.Assign) -> None:
        """Load the model in the worker; raise LoadFailure or NoWorker if that fails.

        The weights are on their way while the worker makes its context, and is assigned.
        """
        order, worker = self._order, self._worker
        await send_image(worker, order)
        await worker.send(assign)
        ready = await worker.answer(worker_orders.Ready)
        for missing in ready.missing:
            log.warning(
                "worker %s of %s runs without this protection: %s",
                worker.name,
                order.model,
                missing,
            )
        answer = await worker.answer(worker_orders.ImageLoaded)
        self._memory_bytes, self._load_s = answer.memory_bytes, answer.load_s
        self._load_spans = [*self._load_spans, *spans_of(answer, self._begin_s)]

    def watch(self, times: LivenessTimes) -> None:
        """Kill the worker as soon as it is frozen, from now on until its end."""
        self._watching = asyncio.get_running_loop().create_task(self._watch(times))

    def admit(self, lease: int, owner: str, *, several: bool = False) -> None:
        """Admit calls of this session, or of this function's sessions, under this lease."""
        self._admitted.add(lease)
        self._worker.send_now(worker_orders.AdmitCalls(lease, owner, several))

    async def end(self, lease: int, grace_s: float = 2.0) -> None:
        """Admit no further call of the lease, and wait until none is in flight."""
        if self._closed.done():
            return
        try:
            await _wait_within(self._end_calls(lease), grace_s)
        except TimeoutError:
            self._worker.kill(f"a call of lease {lease} outlived its grace of {grace_s} s")
            await asyncio.shield(self._closed)

    def channel(self, session: str, function: str, end: socket.socket) -> None:
        """Pass a data channel to the worker."""
        self._worker.send_now(worker_orders.OpenChannel(session, function), [end.fileno()])
        end.close()

    def limit(self, limit_bytes: int) -> None:
        """Change the memory that the model may use."""
        self._worker.send_now(worker_orders.SetLimit(limit_bytes, 0, False))

    async def unload(self) -> int:
        """End the process: only its exit is certain to release all memory.

        It may send functions first what only it has, such as the cache of a text under way.
        """
        self._exit_expected = True
        self._worker.send_now(worker_orders.StopWorker())
        try:
            await _wait_within(self._closed, _LEAVING_S)
        except TimeoutError:
            self._worker.kill("unloaded")
        await asyncio.shield(self._closed)
        return self._memory_bytes

    async def listen(self) -> None:
        """Handle the worker's reports until it exits; then complete everything that waits."""
        cause = "it closed its stream"
        try:
            while True:
                self._handle(await self._worker.receive())
        except (WireError, NoWorker) as error:
            cause = str(error)
        await self._worker.wait_for_exit(cause)
        self._close()

    def abandon(self) -> None:
        """Kill the worker after a failed load, without reporting its exit."""
        self._exit_expected = True
        self._worker.kill("the load failed")

    def _end_calls(self, lease: int) -> "asyncio.Future[None]":
        """Order the end of a lease's calls, once; done when none is in flight."""
        ending = self._ending.get(lease)
        if ending is None:
            ending = self._ending[lease] = asyncio.get_running_loop().create_future()
            self._worker.send_now(worker_orders.EndCalls(lease))
        return ending

    async def _watch(self, times: LivenessTimes) -> None:
        why = await until_frozen(self._worker.pid, self._answers, times)
        self._worker.kill(f"it {why}")

    async def _answers(self) -> bool:
        """Whether the worker answers, if calls may wait for it."""
        if self._admitted and not self._closed.done():
            await asyncio.wait({self._end_calls(_NO_LEASE)})
        return True

    def _close(self) -> None:
        cause = self._worker.cause
        if self._watching is not None:
            self._watching.cancel()
        for ending in self._ending.values():
            ending.set_result(None)
        self._ending.clear()
        self._pressures.cancel()
        self._closed.set_result(cause)
        if not self._exit_expected:
            log.warning("worker %s of %s: %s", self._worker.name, self._order.model, cause)
            self._observer.died(self, cause)

    def _handle(self, order: worker_orders.WorkerOrder) -> None:
        if isinstance(order, worker_orders.CallsRan):
            self._memory_bytes = max(self._memory_bytes, order.peak_bytes)
            peak_bytes = self._memory_bytes
            self._observer.ran(self, order.lease, order.batch, order.run_s, peak_bytes, order.calls)
        elif isinstance(order, worker_orders.CallsClaimed):
            self._observer.claimed(self, order.lease, order.session)
        elif isinstance(order, worker_orders.CallsEnded):
            self._admitted.discard(order.lease)
            ending = self._ending.pop(order.lease, None)
            if ending is not None:
                ending.set_result(None)
        elif isinstance(order, worker_orders.Pressure):
            self._pressures.start(self._relieve(order))
        elif isinstance(order, worker_orders.Note):
            trace = trace_of(order.trace)
            known = {} if trace is None else {"trace_id": trace.trace_id}
            text, model = order.text, self._order.model
            log.info("worker %s of %s: %.500s", self._worker.name, model, text, extra=known)

    async def _relieve(self, order: worker_orders.Pressure) -> None:
        relief = await self._observer.pressure(self, order.lease, order.need_bytes)
        self._worker.send_now(
            worker_orders.SetLimit(relief.limit_bytes, order.number, relief.retry)
        )


class ProcessRuntime:
    """Hosts every model in a separate process."""

    def __init__(
        self,
        observer: Observer,
        devices: Iterable[str],
        settings: ProcessSettings = ProcessSettings(),
    ) -> None:
        self._observer = observer
        self._settings = settings
        kinds = tuple(dict.fromkeys(devices))
        emulated = all(kind == "cpu" for kind in kinds)
        self._server = ForkServer(emulated=emulated, liveness=settings.liveness)
        self._pool = Pool(self._server, kinds, settings.pool)
        self._uids: dict[str, int] = {}
        self._numbers = itertools.count()
        self._hosted: dict[HostedProcess, asyncio.Task[None]] = {}

    def prepare(self) -> None:
        """Start the fork server, which imports torch, and fill the pool, in the background."""
        self._pool.start()

    @property
    def spares(self) -> dict[str, int]:
        """The number of workers ready for a model, by device."""
        return self._pool.ready

    @property
    def hosted(self) -> Sequence[HostedProcess]:
        """The models that have a worker now."""
        return tuple(self._hosted)

    @property
    def server_pid(self) -> int | None:
        """The id of the process that forks workers; None if it does not run."""
        return self._server.pid

    def spare_workers(self, device: str) -> Sequence[ForkedWorker]:
        """Return the workers for this device that are ready for a model, the next one first."""
        return self._pool.spares(device)

    async def load(self, order: LoadOrder) -> HostedModel:
        """Load a model in a worker from the pool; if the worker is lost, use another one."""
        try:
            return await self._load(order, fresh=False)
        except WireError as error:
            log.warning("a worker was lost while it loaded %s: %s", order.model, error)
        try:
            return await self._load(order, fresh=True)
        except WireError as error:
            raise NoWorker(order.model, f"lost twice while loading: {error}") from error

    async def _load(self, order: LoadOrder, *, fresh: bool) -> HostedProcess:
        begin_s = asyncio.get_running_loop().time()
        worker = await self._pool.take(order.device, order.model, fresh=fresh)
        hosted = HostedProcess(order, worker, self._observer, begin_s)
        hosted.watch(self._settings.liveness)
        loaded = False
        try:
            loading = hosted.load(self._assign(order.tenant))
            await load_within(self._settings.load_timeout_s, order, loading)
            loaded = True
        except TimeoutError as error:
            detail = f"no answer in {self._settings.load_timeout_s:g} s"
            raise LoadFailure(order.model, detail) from error
        finally:
            if not loaded:
                hosted.abandon()
            listening = asyncio.get_running_loop().create_task(hosted.listen())
            self._hosted[hosted] = listening
            listening.add_done_callback(lambda _: self._hosted.pop(hosted, None))
        return hosted

    async def close(self) -> None:
        """Kill every worker and the fork server, and wait for their exit."""
        await self._pool.close()
        for hosted in list(self._hosted):
            hosted.abandon()
        await asyncio.gather(*self._hosted.values())
        await self._server.close()

    def _assign(self, tenant: str) -> worker_orders.Assign:
        uid = 0
        if self._settings.change_user and os.geteuid() == 0:
            uid = self._uids.setdefault(tenant, _FIRST_UID + len(self._uids) % _UIDS)
        return worker_orders.Assign(uid, self._settings.descriptors, self._settings.processes)


async def _wait_within(answer: asyncio.Future[Any], grace_s: float) -> None:
    """Wait for an answer; raise TimeoutError if the worker is late, not if this process is."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + grace_s
    while not (await asyncio.wait({answer}, timeout=deadline_s - loop.time()))[0]:
        late_s = loop.time() - deadline_s
        if late_s < _DELAYED_S:
            raise TimeoutError
        deadline_s = loop.time() + min(late_s, grace_s)
