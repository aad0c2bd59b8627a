"""A worker with the models in it: whom its reports are for, and what its end means for them."""

import asyncio
import itertools
import logging
import os
from collections import deque
from collections.abc import Callable, Sequence

from common.liveness import LivenessTimes, until_frozen
from common.telemetry.traces import trace_of
from gpu_manager.errors import LoadFailure, NoWorker
from gpu_manager.runtimes.fork_client import ForkedWorker
from gpu_manager.runtimes.hosted_model import WorkerHostedModel
from gpu_manager.runtimes.runtime import EmptyHost, LoadOrder, Observer
from gpu_manager.transfers.path import Moved
from gpu_manager.transfers.schedule import TransferRank
from gpu_manager.worker import orders
from torch_shim.errors import ConnectionLost, WireError

log = logging.getLogger(__name__)

# A model and a lease that there are not: a worker answers their end at once, whatever calls do.
_NO_MODEL, _NO_LEASE = 0, 0

# Makes the empty process of a worker that its last model has left, with this much memory.
Keep = Callable[[LoadOrder, ForkedWorker, int], EmptyHost]


class HostingWorker:
    """A worker of one tenant on one GPU, from its first model until it is empty, or has ended.

    A `shared` one takes further models; each has a number there.
    """

    def __init__(
        self,
        order: LoadOrder,
        worker: ForkedWorker,
        observer: Observer,
        keep: Keep,
        *,
        shared: bool,
        is_assigned: bool,
    ) -> None:
        """The order is that of the first model; an emptied worker is assigned already."""
        self.worker = worker
        self.shared = shared
        self.tenant, self.gpu = order.tenant, order.gpu
        self.overhead_bytes = 0
        self._turns, self._slots, self._link = order.turns, order.slots, order.link
        self._observer = observer
        self._keep = keep
        self._numbers = itertools.count(worker.models + 1)
        self._models: dict[int, WorkerHostedModel] = {}
        self._answering: deque[asyncio.Future[None]] = deque()
        self._is_empty = self._ends = False
        self.broken_by: list[WorkerHostedModel] = []
        loop = asyncio.get_running_loop()
        self._assigned: asyncio.Future[None] = loop.create_future()
        if is_assigned:
            self._assigned.set_result(None)
        self.over = loop.create_task(self._listen())
        self._watching: asyncio.Task[None] | None = None

    @property
    def is_open(self) -> bool:
        """Whether further models may come: the worker neither ends nor is left by its last one."""
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
        self.worker.models = number = next(self._numbers)
        model = WorkerHostedModel(order, number, self, self._observer, begin_s)
        self._models[number] = model
        return model

    async def assign(self, assign: orders.Assign | None) -> None:
        if assign is not None:
            turns = () if self._turns is None else (self._turns,)
            gates: tuple[int, ...] = ()
            if self._link is not None:
                gates, speed = self._link.gates, self._link.speed
                assign = assign._replace(link=[float(speed.bytes_per_s), float(speed.block)])
            assign = assign._replace(slots=self._slots)
            await self.worker.send(assign, (*gates, *turns))
        await asyncio.shield(self._assigned)

    def watch(self, times: LivenessTimes) -> None:
        """Kill the worker as soon as it is frozen, from now on until its end."""
        self._watching = asyncio.get_running_loop().create_task(self._watch(times))

    def others(self, model: WorkerHostedModel) -> bool:
        return any(not each.leaves for each in self._models.values() if each is not model)

    async def heard(self) -> None:
        if self.over.done() or self.worker.exited.done():
            return
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._answering.append(answer)
        self.worker.send_now(orders.EndCalls(_NO_MODEL, _NO_LEASE))
        await asyncio.wait({answer, self.over}, return_when=asyncio.FIRST_COMPLETED)

    def stop(self) -> None:
        self._ends = True
        self.worker.send_now(orders.StopWorker())

    def forget(self, model: WorkerHostedModel) -> None:
        self._models.pop(model.number, None)

    def end(self) -> None:
        """Kill the worker without a report; not one that is empty, which is others' to end."""
        self._ends = True
        if self._is_empty:
            return
        for model in self.models:
            model.leaves = True
        self.worker.kill("the runtime is closed")

    async def _listen(self) -> None:
        """Handle the worker's reports until it is empty or exits; then complete what waits."""
        cause = "it closed its stream"
        try:
            while not self._is_empty:
                order, descriptors = await self.worker.receive()
                try:
                    self._handle(order, descriptors)
                finally:
                    for descriptor in descriptors:
                        os.close(descriptor)
        except (WireError, NoWorker) as error:
            cause = str(error)
            await self.worker.wait_for_exit(cause)
        self._close(self.worker.cause or cause)

    def _handle(self, order: orders.WorkerOrder, descriptors: Sequence[int]) -> None:
        if isinstance(order, orders.Ready):
            self._note_ready(order)
        elif isinstance(order, orders.Note):
            self._note(order)
        elif isinstance(order, orders.BytesMoved):
            self._note_moved(order)
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

    def _note_moved(self, order: orders.BytesMoved) -> None:
        if self._link is None:
            return
        for sums, told in zip(self._link.sums, order, strict=True):
            for rank, moved in zip(TransferRank, told, strict=False):
                if len(moved) == len(Moved._fields):
                    sums.add(rank, *moved)

    def _dropped(self, order: orders.ModelDropped) -> None:
        model = self._models.get(order.model)
        if model is None:
            return
        left = None
        if len(self._models) == 1:
            stays, self._ends = model.keeps_worker and not self._ends, True
            if stays:
                self._is_empty = True
                left = self._keep(model.order, self.worker, order.memory_bytes)
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
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None  # a cancelled task refers to all that it worked with
        self._fail_all(ConnectionLost(cause))
        for model in self.models:
            model.close(cause)

    async def _watch(self, times: LivenessTimes) -> None:
        why = await until_frozen(self.worker.pid, self._answers, times)
        self.worker.kill(f"it {why}")

    async def _answers(self) -> bool:
        """Whether the worker answers, if calls may wait for it."""
        if self.suspects and self.is_open:
            await self.heard()
        return True
