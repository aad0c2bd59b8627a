"""A model in a process of its own: its orders, its reports, and how it leaves the process."""

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from typing import Any

from common.liveness import LivenessTimes, until_frozen
from common.tasks import BackgroundTasks
from common.telemetry.traces import trace_of
from gpu_manager.errors import NoWorker
from gpu_manager.runtimes.process.empty_process import EmptyProcess
from gpu_manager.runtimes.process.fork_client import ForkedWorker
from gpu_manager.runtimes.process.image_loads import send_image, spans_of
from gpu_manager.runtimes.runtime import HostedId, HostProcess, LoadOrder, LoadSpan, Observer
from gpu_manager.worker import worker_orders
from torch_shim.errors import WireError

log = logging.getLogger(__name__)

# If the event loop wakes later than this, the loop itself was delayed: an answer may be unread.
_DELAYED_S = 0.05
# A worker that ends sends functions what only it has.
_LEAVING_S = 2.0
# One that is emptied does that too, and then gives back its memory.
_EMPTYING_S = 5.0
# A lease that no scheduler gives: a worker answers its end at once, whatever its calls do.
_NO_LEASE = 0

# Makes the empty process of a worker that this model has left, with this much memory.
Keep = Callable[[LoadOrder, ForkedWorker, int], EmptyProcess]


class HostedProcess:
    """A model in a separate process."""

    def __init__(
        self,
        order: LoadOrder,
        worker: ForkedWorker,
        observer: Observer,
        keep: Keep,
        begin_s: float,
    ) -> None:
        """`begin_s` is when the worker was asked for."""
        self._order = order
        self._name = worker.name
        self._keep = keep
        self._worker = worker
        self._host = HostProcess(worker.pid)
        self._observer = observer
        self._memory_bytes = self._overhead_bytes = 0
        self._load_s = 0.0
        self._begin_s = begin_s
        self._load_spans = [LoadSpan("worker", begin_s, asyncio.get_running_loop().time())]
        self._admitted: set[int] = set()
        self._ending: dict[int, asyncio.Future[None]] = {}
        self._watching: asyncio.Task[None] | None = None
        self._pressures = BackgroundTasks(log, f"finding memory for {order.model}")
        self._exit_expected = False
        self._emptying = False
        self._left: EmptyProcess | None = None
        self._closed: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def order(self) -> LoadOrder:
        """The order by which the model was loaded."""
        return self._order

    @property
    def id(self) -> HostedId:
        """The name that the worker has while it runs this model."""
        return HostedId(self._name)

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
    def overhead_bytes(self) -> int:
        """What the worker reported when it was assigned to the tenant; else 0."""
        return self._overhead_bytes

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

    async def load(self, assign: worker_orders.Assign | None) -> None:
        """Load the model in the worker; raise LoadFailure or NoWorker if that fails.

        The weights are on their way while the worker makes its context, and is assigned. `assign`
        makes the worker the tenant's, unless it is that already.
        """
        await send_image(self._worker, self._order)
        if assign is not None:
            await self._assign(assign)
        answer = await self._worker.answer(worker_orders.ImageLoaded)
        self._memory_bytes, self._load_s = answer.memory_bytes, answer.load_s
        self._load_spans = [*self._load_spans, *spans_of(answer, self._begin_s)]

    async def _assign(self, assign: worker_orders.Assign) -> None:
        worker, model = self._worker, self._order.model
        await worker.send(assign)
        ready = await worker.answer(worker_orders.Ready)
        self._overhead_bytes = ready.overhead_bytes
        for missing in ready.missing:
            log.warning(
                "worker %s of %s runs without this protection: %s", worker.name, model, missing
            )

    def watch(self, times: LivenessTimes) -> None:
        """Kill the worker as soon as it is frozen, from now on until its end."""
        self._watching = asyncio.get_running_loop().create_task(self._watch(times))

    def admit(self, lease: int, owner: str, *, several: bool = False) -> None:
        """Admit calls of this session, or of this function's sessions, under this lease."""
        self._admitted.add(lease)
        self._send(worker_orders.AdmitCalls(lease, owner, several))

    async def end(self, lease: int, grace_s: float = 2.0) -> None:
        """Admit no further call of the lease, and wait until none is in flight."""
        if self._emptying or self._closed.done():
            await asyncio.shield(self._closed)  # no call goes on when the model has left
            return
        try:
            await _wait_within(self._end_calls(lease), grace_s)
        except TimeoutError:
            self._worker.kill(f"a call of lease {lease} outlived its grace of {grace_s} s")
            await asyncio.shield(self._closed)

    def channel(self, session: str, function: str, end: socket.socket) -> None:
        """Pass a data channel to the worker."""
        self._send(worker_orders.OpenChannel(session, function), [end.fileno()])
        end.close()

    def limit(self, limit_bytes: int) -> None:
        """Change the memory that the model may use."""
        self._send(worker_orders.SetLimit(limit_bytes, 0, False))

    async def unload(self) -> int:
        """End the process: only its exit is certain to release all memory.

        It may send functions first what only it has, such as the cache of a text under way.
        """
        await self._leave(worker_orders.StopWorker(), _LEAVING_S, "unloaded")
        return self._memory_bytes

    async def empty(self) -> EmptyProcess | None:
        """Have the worker let the model go and keep its context; None if it has ended instead.

        The functions are sent what only the worker has, as when it ends.
        """
        self._emptying = True
        await self._leave(worker_orders.EmptyWorker(), _EMPTYING_S, "it was not empty in time")
        return self._left

    async def _leave(
        self, order: worker_orders.StopWorker | worker_orders.EmptyWorker, within_s: float, why: str
    ) -> None:
        """Have the model leave the worker, and wait until it has; kill one that is slow."""
        if self._closed.done():
            return
        self._exit_expected = True
        self._worker.send_now(order)
        try:
            await _wait_within(self._closed, within_s)
        except TimeoutError:
            self._worker.kill(why)
        await asyncio.shield(self._closed)

    async def listen(self) -> None:
        """Handle the worker's reports until it is empty or exits; then complete what waits."""
        cause = "it closed its stream"
        try:
            while self._left is None:
                self._handle(await self._worker.receive())
        except (WireError, NoWorker) as error:
            cause = str(error)
            await self._worker.wait_for_exit(cause)
        self._close()

    def abandon(self) -> None:
        """Kill the worker without reporting its exit, unless the model has left it."""
        if self._closed.done():
            return
        self._exit_expected = True
        self._worker.kill("the load failed")

    def _send(self, order: worker_orders.WorkerOrder, descriptors: Sequence[int] = ()) -> None:
        """Send an order about this model, unless the model leaves: the worker may be another's."""
        if not (self._emptying or self._closed.done()):
            self._worker.send_now(order, descriptors)

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
        if self._admitted and not (self._emptying or self._closed.done()):
            await asyncio.wait({self._end_calls(_NO_LEASE)})
        return True

    def _close(self) -> None:
        cause = "emptied" if self._left is not None else self._worker.cause
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
        elif isinstance(order, worker_orders.ContextCleared) and self._emptying:
            self._left = self._keep(self._order, self._worker, order.memory_bytes)
        elif isinstance(order, worker_orders.Pressure):
            self._pressures.start(self._relieve(order))
        elif isinstance(order, worker_orders.Note):
            trace = trace_of(order.trace)
            known = {} if trace is None else {"trace_id": trace.trace_id}
            text, model = order.text, self._order.model
            log.info("worker %s of %s: %.500s", self._worker.name, model, text, extra=known)

    async def _relieve(self, order: worker_orders.Pressure) -> None:
        relief = await self._observer.pressure(self, order.lease, order.need_bytes)
        self._send(worker_orders.SetLimit(relief.limit_bytes, order.number, relief.retry))


async def _wait_within(answer: asyncio.Future[Any], grace_s: float) -> None:
    """Wait for an answer; raise TimeoutError if the worker is late, not if this process is."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + grace_s
    while not (await asyncio.wait({answer}, timeout=deadline_s - loop.time()))[0]:
        late_s = loop.time() - deadline_s
        if late_s < _DELAYED_S:
            raise TimeoutError
        deadline_s = loop.time() + min(late_s, grace_s)
