"""A worker with the models in it: loads, orders, reports, and what its end means for them."""

import asyncio
import itertools
import logging
import os
import socket
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

from msgspec import structs

from common.tasks import BackgroundTasks
from common.telemetry.traces import trace_of
from common.time_limits import time_limit
from gpu_manager.devices.loads import TransferRank
from gpu_manager.errors import LoadFailure, NoWorker
from gpu_manager.runtimes.fork_client import ForkedWorker
from gpu_manager.runtimes.runtime import (
    EmptyHost,
    HostedId,
    HostedModel,
    HostProcess,
    LoadOrder,
    LoadSpan,
    MergedSums,
    Observer,
)
from gpu_manager.worker import orders
from torch_shim.errors import ConnectionLost, WireError

log = logging.getLogger(__name__)

# A model and a lease that there are not: a worker answers their end at once, whatever calls do.
_NO_MODEL, _NO_LEASE = 0, 0
# A worker that ends sends functions what only it has.
_LEAVING_S = 2.0
# One that lets a model go does that too, and then gives back its memory.
_DROPPING_S = 5.0


class EmptiedWorker(EmptyHost):
    """A worker that its last model has left; it belongs to the model's tenant for good."""

    def __init__(self, worker: ForkedWorker, memory_bytes: int) -> None:
        self.host = HostProcess(worker.pid)
        self.memory_bytes = memory_bytes
        self.closed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.is_ending = False  # by order
        self._worker = worker

    async def end(self) -> None:
        if not self.closed.done():
            self.is_ending = True
            self._worker.kill("its context is not needed any more")
            await asyncio.shield(self.closed)


class WorkerHostedModel(HostedModel):
    """One model, from the order to load it until it has left its worker, or the worker ends."""

    def __init__(
        self,
        order: LoadOrder,
        number: int,
        host: "HostingWorker",
        observer: Observer,
        begin_s: float,
    ) -> None:
        """`begin_s` is when the worker was asked for."""
        loop = asyncio.get_running_loop()
        self.number = number
        self.order = order
        self.hosting = host
        self.worker = host.worker  # it may run other models of the tenant, too
        self.id = HostedId(f"{self.worker.name}.{number}")
        self.host: HostProcess = HostProcess(host.worker.pid)
        self._observer = observer
        self.memory_bytes = self.overhead_bytes = 0
        self.load_s = 0.0
        self._begin_s = begin_s
        self.load_spans = [LoadSpan("worker", begin_s, loop.time())]
        self._loaded: asyncio.Future[orders.ImageLoaded] = loop.create_future()
        self._admitted: set[int] = set()
        self._ending: dict[int, asyncio.Future[None]] = {}
        self._pressures = BackgroundTasks(log, f"finding memory for {order.model}")
        self.leaves = False
        self.keeps_worker = False
        self._left: EmptyHost | None = None
        # Done when the model has left the worker, or the worker has ended.
        self.closed: asyncio.Future[str] = loop.create_future()

    @property
    def runs_calls(self) -> bool:
        return bool(self._admitted)

    # -- the load -------------------------------------------------------------------------------

    async def load(self, assign: orders.Assign | None) -> None:
        """Load the model in its worker; raise LoadFailure or a WireError if that fails.

        The weights are on their way while the worker makes its context, and is assigned; `assign`
        makes it the tenant's, unless it is that already.
        """
        urgency = self.order.urgency
        told_ahead = urgency.is_ahead
        await send_image(self.worker, self.number, self.order, shared=self.hosting.shared)
        urgency.listen(self._hurry)
        try:
            if told_ahead:
                self._hurry(urgency.rank)
            await self.hosting.assign(assign)
            answer = await asyncio.shield(self._loaded)
        finally:
            urgency.ignore(self._hurry)
        self.overhead_bytes = self.hosting.overhead_bytes
        self.memory_bytes, self.load_s = answer.memory_bytes, answer.load_s
        self.load_spans = [*self.load_spans, *spans_of(answer, self._begin_s)]

    def fail(self, error: WireError | LoadFailure) -> None:
        if not self._loaded.done():
            self._loaded.set_exception(error)
            self._loaded.exception()  # a load that was given up does not ask for it

    def abandon(self) -> None:
        """Leave the worker without a report: the load has failed, or nobody wants it."""
        if self.closed.done() or self.leaves:
            return
        self.leaves = True
        if self.hosting.others(self):
            self._drop()
        else:
            self.worker.kill("the load failed")

    # -- calls ----------------------------------------------------------------------------------

    def admit(self, admission: orders.Admission) -> None:
        self._admitted.add(admission.lease)
        self.send(orders.AdmitCalls(self.number, admission))

    async def end(self, lease: int, grace_s: float = 2.0) -> None:
        if self.leaves or self.closed.done():
            await asyncio.shield(self.closed)  # no call goes on when the model has left
            return
        try:
            await wait_within(self._end_calls(lease), grace_s)
        except TimeoutError:
            self.worker.kill(f"a call of lease {lease} outlived its grace of {grace_s} s")
            await asyncio.shield(self.closed)

    def ask_computed(self, lease: int) -> None:
        self.send(orders.AskComputed(self.number, lease))

    def channel(self, session: str, function: str, end: socket.socket) -> None:
        self.send(orders.OpenChannel(self.number, session, function), [end.fileno()])
        end.close()

    def limit(self, limit_bytes: int, together_bytes: int = 0) -> None:
        self.send(orders.SetLimit(self.number, limit_bytes, together_bytes, 0, False))

    def send(
        self,
        order: orders.WorkerOrder,
        descriptors: Sequence[int] = (),
        *,
        while_leaving: bool = False,
    ) -> None:
        if not (self.closed.done() or (self.leaves and not while_leaving)):
            self.worker.send_now(order, descriptors)

    async def heard(self) -> None:
        await self.hosting.heard()

    # -- how it leaves --------------------------------------------------------------------------

    async def unload(self) -> int:
        """Have the model leave; the worker ends if it has no other one.

        Functions are sent first what only the worker has, such as the cache of a text under way.
        """
        if self.hosting.others(self):
            await self._leave(self._drop, _DROPPING_S)
        else:
            await self._leave(self.hosting.stop, _LEAVING_S)
        return self.memory_bytes

    async def empty(self) -> EmptyHost | None:
        """Have the worker let the model go and keep its context; None if no empty one is left.

        The functions are sent what only the worker has, as when it ends.
        """
        self.keeps_worker = True
        await self._leave(self._drop, _DROPPING_S)
        return self._left

    def has_left(self, left: EmptyHost | None) -> None:
        """The worker has let the model go; `left` is the worker if it is empty and stays so."""
        self._left = left
        self.close("emptied" if left is not None else "it has left its worker")

    def close(self, cause: str) -> None:
        for ending in self._ending.values():
            ending.set_result(None)
        self._ending.clear()
        self._pressures.cancel()
        self.hosting.forget(self)
        self.closed.set_result(cause)
        if not self.leaves:
            log.warning("worker %s of %s: %s", self.worker.name, self.order.model, cause)
            self._observer.died(self, cause)

    def _drop(self) -> None:
        self.worker.send_now(orders.DropModel(self.number))

    async def _leave(self, order: Callable[[], None], within_s: float) -> None:
        """Have the model leave the worker, and wait until it has; kill one that is slow."""
        if self.closed.done():
            return
        self.leaves = True
        order()
        try:
            await wait_within(self.closed, within_s)
        except TimeoutError:
            self.worker.kill(f"{self.order.model} did not leave it in time")
        await asyncio.shield(self.closed)

    # -- reports of the worker ------------------------------------------------------------------

    def handle(self, order: orders.WorkerOrder, descriptors: Sequence[int] = ()) -> None:
        """Handle a report about this model; the caller closes the descriptors."""
        if isinstance(order, orders.ImageLoaded):
            if not self._loaded.done():
                self._loaded.set_result(order)
        elif isinstance(order, orders.ImageLoadFailed):
            out_of_memory = order.out_of_memory
            self.fail(LoadFailure(self.worker.name, order.detail, out_of_memory=out_of_memory))
        elif isinstance(order, orders.CallsRan):
            self.memory_bytes = max(self.memory_bytes, order.peak_bytes)
            self._observer.ran(self, structs.replace(order, peak_bytes=self.memory_bytes))
        elif isinstance(order, orders.CallsMerged):
            sums = order.groups, order.calls, order.compared
            singly = {str(why): times for why, times in order.singly.items()}
            self._observer.merged(self, MergedSums(*sums, singly, order.never))
        elif isinstance(order, orders.CallsClaimed):
            self._observer.claimed(self, order.lease, order.session)
        elif isinstance(order, orders.CallsComputed):
            self._observer.computed(self, order.lease, order.computed_s)
        elif isinstance(order, orders.CallsEnded):
            self._calls_ended(order)
        elif isinstance(order, orders.Pressure):
            self._pressures.start(self._relieve(order))
        else:
            for feature in self._observer.features:
                feature.reported(self, order, descriptors)

    def _calls_ended(self, order: orders.CallsEnded) -> None:
        self._observer.computed(self, order.lease, order.computed_s)
        self._admitted.discard(order.lease)
        ending = self._ending.pop(order.lease, None)
        if ending is not None:
            ending.set_result(None)

    def _hurry(self, rank: TransferRank) -> None:
        if rank is TransferRank.AWAITED:
            self.send(orders.HurryLoad(self.number))

    def _end_calls(self, lease: int) -> "asyncio.Future[None]":
        """Order the end of a lease's calls, once; done when none is in flight."""
        ending = self._ending.get(lease)
        if ending is None:
            ending = self._ending[lease] = asyncio.get_running_loop().create_future()
            self.worker.send_now(orders.EndCalls(self.number, lease))
        return ending

    async def _relieve(self, order: orders.Pressure) -> None:
        relief = await self._observer.pressure(self, order.lease, order.need_bytes)
        limits = relief.limit_bytes, relief.together_bytes
        self.send(orders.SetLimit(self.number, *limits, order.number, relief.retry))


class HostingWorker:
    """A worker of one tenant on one GPU, from its first model until it has ended.

    A `shared` one takes further models; each has a number there. `left` is set while it is empty.
    """

    def __init__(
        self, order: LoadOrder, worker: ForkedWorker, observer: Observer, *, shared: bool
    ) -> None:
        """The order is that of the first model."""
        self.worker = worker
        self.shared = shared
        self.tenant, self.gpu = order.tenant, order.gpu
        self.overhead_bytes = 0
        self._turns, self._slots, self._paths = order.turns, order.slots, order.paths
        self._observer = observer
        self._numbers = itertools.count(1)
        self._models: dict[int, WorkerHostedModel] = {}
        self._answering: deque[asyncio.Future[None]] = deque()
        self.left: EmptiedWorker | None = None
        self._ends = False
        self.broken_by: list[WorkerHostedModel] = []
        loop = asyncio.get_running_loop()
        self._assigned: asyncio.Future[None] = loop.create_future()
        self.over = loop.create_task(self._listen())

    @property
    def is_open(self) -> bool:
        """Whether further models may come: the worker neither ends nor was left by its last one."""
        return not (self._ends or self.over.done() or self.worker.exited.done())

    @property
    def models(self) -> list[WorkerHostedModel]:
        return list(self._models.values())

    @property
    def suspects(self) -> list[WorkerHostedModel]:
        """The models whose calls may be under way, and may break the worker."""
        return [model for model in self._models.values() if model.runs_calls]

    def add(self, order: LoadOrder, begin_s: float) -> WorkerHostedModel:
        """One more model for this worker, to be loaded; `begin_s` is when a worker was wanted."""
        number = next(self._numbers)
        model = WorkerHostedModel(order, number, self, self._observer, begin_s)
        self._models[number] = model
        return model

    def take(self, model: str, *, shared: bool) -> bool:
        """Let this model come next, which finds the worker empty; False if that has ended."""
        left = self.left
        if left is None or self.over.done() or self.worker.exited.done():
            return False
        self.left, self._ends, self.shared = None, False, shared
        left.closed.set_result(f"{model} has taken it")
        return True

    async def assign(self, assign: orders.Assign | None) -> None:
        """Wait until the worker is the tenant's, by this order; raise the error if it cannot be."""
        if assign is not None:
            turns = () if self._turns is None else (self._turns,)
            link = list(self._paths.numbers)
            assign = structs.replace(assign, link=link, slots=self._slots)
            await self.worker.send(assign, (*self._paths.descriptors, *turns))
        await asyncio.shield(self._assigned)

    def others(self, model: WorkerHostedModel) -> bool:
        """Whether the worker has other models, which stay."""
        return any(not each.leaves for each in self._models.values() if each is not model)

    async def heard(self) -> None:
        """Wait until the worker's reports up to now have been handled, or it has ended."""
        if self.over.done() or self.worker.exited.done():
            return
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._answering.append(answer)
        self.worker.send_now(orders.EndCalls(_NO_MODEL, _NO_LEASE))
        await asyncio.wait({answer, self.over}, return_when=asyncio.FIRST_COMPLETED)

    async def answers(self) -> bool:
        """Whether the worker answers, if calls may wait for it."""
        if self.suspects and self.is_open:
            await self.heard()
        return True

    def stop(self) -> None:
        """Have the worker end; it sends functions first what only it has."""
        self._ends = True
        self.worker.send_now(orders.StopWorker())

    def forget(self, model: WorkerHostedModel) -> None:
        """The model has left the worker."""
        self._models.pop(model.number, None)

    def end(self) -> None:
        """Kill the worker without a report."""
        self._ends = True
        if self.left is not None:
            self.left.is_ending = True
        for model in self.models:
            model.leaves = True
        self.worker.kill("the runtime is closed")

    async def _listen(self) -> None:
        """Handle the worker's reports until it exits; then complete what waits."""
        cause = "it closed its stream"
        try:
            while True:
                order, descriptors = await self.worker.receive()
                try:
                    self._handle(order, descriptors)
                finally:
                    for descriptor in descriptors:
                        os.close(descriptor)
        except (WireError, NoWorker) as error:
            cause = str(error) if self.left is None else "it ended"
            await self.worker.wait_for_exit(cause)
        self._close(self.worker.cause or cause)

    def _handle(self, order: orders.WorkerOrder, descriptors: Sequence[int]) -> None:
        if isinstance(order, orders.Ready):
            self._note_ready(order)
        elif isinstance(order, orders.Note):
            self._note(order)
        elif isinstance(order, orders.BytesMoved):
            self._paths.note_moved(order.to_gpu, order.to_host)
        elif isinstance(order, orders.ModelDropped):
            self._dropped(order)
        elif isinstance(order, orders.ImageLoadFailed) and order.model == _NO_MODEL:
            self._fail_all(LoadFailure(self.worker.name, order.detail))
        elif isinstance(order, orders.CallsEnded) and order.model == _NO_MODEL:
            if self._answering:
                self._answering.popleft().set_result(None)
        else:
            model = self._models.get(getattr(order, "model", _NO_MODEL))
            if model is None:
                log.info("unexpected report of worker %s: %.300r", self.worker.name, order)
            else:
                model.handle(order, descriptors)

    def _note_ready(self, order: orders.Ready) -> None:
        self.overhead_bytes = order.overhead_bytes
        for missing in order.missing:
            log.warning("worker %s runs without this protection: %s", self.worker.name, missing)
        if not self._assigned.done():
            self._assigned.set_result(None)

    def _note(self, order: orders.Note) -> None:
        trace = trace_of(order.trace)
        known = {} if trace is None else {"trace_id": trace.trace_id}
        names = ", ".join(model.order.model for model in self._models.values())
        log.info("worker %s of %s: %.500s", self.worker.name, names, order.text, extra=known)

    def _dropped(self, order: orders.ModelDropped) -> None:
        model = self._models.get(order.model)
        if model is None:
            return
        left = None
        if len(self._models) == 1:
            stays, self._ends = model.keeps_worker and not self._ends, True
            if stays:
                left = self.left = EmptiedWorker(self.worker, order.memory_bytes)
            else:
                self.worker.kill("no model is left in it")
        model.has_left(left)

    def _fail_all(self, error: LoadFailure | WireError) -> None:
        if not self._assigned.done():
            self._assigned.set_exception(error)
            self._assigned.exception()  # a load that was given up does not ask for it
        for model in self.models:
            model.fail(error)

    def _close(self, cause: str) -> None:
        self.broken_by = [] if self._ends else self.suspects  # an end by order is nobody's fault
        self._ends = True
        self._fail_all(ConnectionLost(cause))
        for model in self.models:
            model.close(cause)
        left, self.left = self.left, None
        if left is not None:
            left.closed.set_result(cause)
            if not left.is_ending:
                log.warning("the empty worker %s ended: %s", self.worker.name, cause)
                self._observer.context_lost(left, cause)


# If the event loop wakes later than this, the loop itself was delayed: an answer may be unread.
_DELAYED_S = 0.05


async def wait_within(answer: asyncio.Future[Any], grace_s: float) -> None:
    """Wait for an answer; raise TimeoutError if the worker is late, not if this process is."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + grace_s
    while not (await asyncio.wait({answer}, timeout=deadline_s - loop.time()))[0]:
        late_s = loop.time() - deadline_s
        if late_s < _DELAYED_S:
            raise TimeoutError
        deadline_s = loop.time() + min(late_s, grace_s)


async def send_image(worker: ForkedWorker, number: int, order: LoadOrder, *, shared: bool) -> None:
    """Have the worker load the image of this order, also while the image arrives."""
    load = orders.LoadImage(
        number,
        order.digest,
        [list(entry) for entry in order.table],
        order.total_bytes,
        order.limit_bytes,
        order.emulation.load_s,
        order.emulation.run_s,
        order.arrival is not None,
        shared,
        order.gpu_share,
        order.merged,
        order.together_bytes,
        order.urgency.is_ahead,
    )
    if order.arrival is None:
        await worker.send(load, [order.image])
        return
    pipe = order.arrival.follow()
    try:
        await worker.send(load, [order.image, pipe])
    finally:
        os.close(pipe)


async def load_within(
    timeout_s: float, order: LoadOrder, work: Coroutine[None, None, None]
) -> None:
    """Do the work of a load; raise TimeoutError if it takes longer than the image and this time."""
    loading = asyncio.ensure_future(work)
    try:
        if order.arrival is not None:
            over = asyncio.ensure_future(order.arrival.over())
            await asyncio.wait({loading, over}, return_when=asyncio.FIRST_COMPLETED)
            over.cancel()
        async with time_limit(timeout_s):
            await loading
    finally:
        loading.cancel()
        await asyncio.wait({loading})


def spans_of(loaded: orders.ImageLoaded, begin_s: float) -> Iterator[LoadSpan]:
    """Return what a worker says of its load; a context that it had before is no part of it."""
    for phase, times in (("context", loaded.context), ("transfer", loaded.transfer)):
        if len(times) == len(("begin", "end")) and begin_s < times[1]:
            yield LoadSpan(phase, max(begin_s, times[0]), times[1])
