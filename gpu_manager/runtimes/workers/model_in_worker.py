"""A model in a worker: its orders, its reports, and how it leaves the worker."""

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from typing import Protocol

from common.data_handles import SECRET_BYTES, around_secret
from common.tasks import BackgroundTasks
from gpu_manager.errors import LoadFailure
from gpu_manager.runtimes.runtime import (
    BorrowedByCall,
    EmptyHost,
    HostedId,
    HostProcess,
    LentData,
    LoadOrder,
    LoadSpan,
    Observer,
    PutByWorker,
)
from gpu_manager.runtimes.workers.fork_client import ForkedWorker
from gpu_manager.runtimes.workers.image_loads import send_image, spans_of
from gpu_manager.runtimes.workers.merge_reports import merged_sums
from gpu_manager.runtimes.workers.worker_answers import wait_within
from gpu_manager.transfers.transfer_schedule import TransferRank
from gpu_manager.worker import data_orders, worker_orders
from gpu_manager.worker.calls.lease_terms import USUAL_TERMS, LeaseTerms
from torch_shim.errors import WireError

log = logging.getLogger(__name__)

# A worker that ends sends functions what only it has.
_LEAVING_S = 2.0
# One that lets a model go does that too, and then gives back its memory.
_DROPPING_S = 5.0


class Host(Protocol):
    """The worker of a model, as the model sees it."""

    worker: ForkedWorker
    shared: bool
    overhead_bytes: int

    def others(self, model: "ModelInWorker") -> bool:
        """Whether the worker has other models, which stay."""
        ...

    def stop(self) -> None:
        """Have the worker end; it sends functions first what only it has."""

    def forget(self, model: "ModelInWorker") -> None:
        """The model has left the worker."""

    async def heard(self) -> None:
        """Wait until the worker's reports up to now have been handled, or it has ended."""

    async def assign(self, assign: worker_orders.Assign | None) -> None:
        """Wait until the worker is the tenant's, by this order; raise the error if it cannot be."""


class ModelInWorker:
    """One model, from the order to load it until it has left its worker, or the worker ends."""

    def __init__(
        self, order: LoadOrder, number: int, host: Host, observer: Observer, begin_s: float
    ) -> None:
        """`begin_s` is when the worker was asked for."""
        loop = asyncio.get_running_loop()
        self.number = number
        self._order = order
        self._host = host
        self._worker = host.worker
        self._process = HostProcess(host.worker.pid)
        self._observer = observer
        self._memory_bytes = 0
        self._load_s = 0.0
        self._begin_s = begin_s
        self._load_spans = [LoadSpan("worker", begin_s, loop.time())]
        self._loaded: asyncio.Future[worker_orders.ImageLoaded] = loop.create_future()
        self._admitted: set[int] = set()
        self._ending: dict[int, asyncio.Future[None]] = {}
        self._pressures = BackgroundTasks(log, f"finding memory for {order.model}")
        self.leaves = False
        self.keeps_worker = False
        self._left: EmptyHost | None = None
        self._closed: asyncio.Future[str] = loop.create_future()

    @property
    def order(self) -> LoadOrder:
        """The order by which the model was loaded."""
        return self._order

    @property
    def id(self) -> HostedId:
        """The worker's name and the model's number there."""
        return HostedId(f"{self._worker.name}.{self.number}")

    @property
    def host(self) -> HostProcess:
        """The worker's process."""
        return self._process

    @property
    def worker(self) -> ForkedWorker:
        """The worker, which may run other models of the tenant, too."""
        return self._worker

    @property
    def memory_bytes(self) -> int:
        """The GPU memory that the worker last reported for this model."""
        return self._memory_bytes

    @property
    def overhead_bytes(self) -> int:
        """What the worker reported when it was assigned to the tenant; else 0."""
        return self._host.overhead_bytes

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
        """Done when the model has left the worker, or the worker has ended."""
        return self._closed

    @property
    def runs_calls(self) -> bool:
        """Whether calls of a lease may be under way."""
        return bool(self._admitted)

    # -- the load -------------------------------------------------------------------------------

    async def load(self, assign: worker_orders.Assign | None) -> None:
        """Load the model in its worker; raise LoadFailure or a WireError if that fails.

        The weights are on their way while the worker makes its context, and is assigned; `assign`
        makes it the tenant's, unless it is that already.
        """
        urgency = self._order.urgency
        told_ahead = urgency.is_ahead
        await send_image(self._worker, self.number, self._order, shared=self._host.shared)
        urgency.listen(self._hurry)
        try:
            if told_ahead:
                self._hurry(urgency.rank)
            await self._host.assign(assign)
            answer = await asyncio.shield(self._loaded)
        finally:
            urgency.ignore(self._hurry)
        self._memory_bytes, self._load_s = answer.memory_bytes, answer.load_s
        self._load_spans = [*self._load_spans, *spans_of(answer, self._begin_s)]

    def fail(self, error: WireError | LoadFailure) -> None:
        """End a load that still waits."""
        if not self._loaded.done():
            self._loaded.set_exception(error)
            self._loaded.exception()  # a load that was given up does not ask for it

    def abandon(self) -> None:
        """Leave the worker without a report: the load has failed, or nobody wants it."""
        if self._closed.done() or self.leaves:
            return
        self.leaves = True
        if self._host.others(self):
            self._drop()
        else:
            self._worker.kill("the load failed")

    # -- calls ----------------------------------------------------------------------------------

    def admit(
        self,
        lease: int,
        owner: str,
        *,
        several: bool = False,
        divided: bool = False,
        terms: LeaseTerms = USUAL_TERMS,
    ) -> None:
        """Admit calls of this session, or of this function's sessions, under this lease."""
        self._admitted.add(lease)
        self._send(worker_orders.admitting(self.number, lease, owner, (several, divided), terms))

    async def end(self, lease: int, grace_s: float = 2.0) -> None:
        """Admit no further call of the lease, and wait until none is in flight."""
        if self.leaves or self._closed.done():
            await asyncio.shield(self._closed)  # no call goes on when the model has left
            return
        try:
            await wait_within(self._end_calls(lease), grace_s)
        except TimeoutError:
            self._worker.kill(f"a call of lease {lease} outlived its grace of {grace_s} s")
            await asyncio.shield(self._closed)

    def ask_computed(self, lease: int) -> None:
        """Have the worker say for how long calls have run under this lease."""
        self._send(worker_orders.AskComputed(self.number, lease))

    def channel(self, session: str, function: str, end: socket.socket) -> None:
        """Pass a data channel to the worker."""
        self._send(worker_orders.OpenChannel(self.number, session, function), [end.fileno()])
        end.close()

    def limit(self, limit_bytes: int, together_bytes: int = 0) -> None:
        """Change the memory that the model may use, and all models of the worker together."""
        self._send(worker_orders.SetLimit(self.number, limit_bytes, together_bytes, 0, False))

    # -- data of functions ----------------------------------------------------------------------

    def hand_over(self, handle: str, size_bytes: int, descriptor: int) -> None:
        """Have the worker copy data to this memory."""
        self._send(data_orders.HandOver(self.number, handle, size_bytes), [descriptor])

    def withdraw(self, handle: str) -> None:
        """Have the worker let data go, which is in no later call's way."""
        self._send(data_orders.WithdrawData(self.number, handle))

    def grant(self, node: str, size_bytes: int, pieces: int) -> None:
        """Let functions put so much more without asking."""
        before, behind = around_secret(node, self.id)
        handle = before, SECRET_BYTES, behind
        self._send(data_orders.GrantData(self.number, *handle, size_bytes, pieces))

    def recall_grant(self) -> None:
        """Let nothing more be put without asking; the worker says what is left."""
        self._send(data_orders.RecallGrant(self.number))

    async def heard(self) -> None:
        """Wait until the worker's reports up to now have been handled, or it has ended."""
        await self._host.heard()

    def lend(self, handle: str) -> None:
        """Have the worker let another process open data."""
        self._send(data_orders.LendData(self.number, handle))

    def given_back(self, handle: str) -> None:
        """Another process uses data of the worker once less; also while the model leaves."""
        if not self._closed.done():
            self._worker.send_now(data_orders.DataGivenBack(self.number, handle))

    def borrowed(self, handle: str, found: BorrowedByCall | None) -> None:
        """Answer the worker's wish for another one's data."""
        if found is None:
            self._send(data_orders.DataBorrowed(self.number, handle, False, 0, 0, b"", b"", False))
            return
        size_bytes, offset, token = found.lent.size_bytes, found.lent.offset, found.lent.token
        place = self.number, handle, True, size_bytes, offset, token
        descriptors = [] if found.lent.descriptor is None else [found.lent.descriptor]
        self._send(data_orders.DataBorrowed(*place, found.about, found.same_gpu), descriptors)

    # -- how it leaves --------------------------------------------------------------------------

    async def unload(self) -> int:
        """Have the model leave; the worker ends if it has no other one.

        Functions are sent first what only the worker has, such as the cache of a text under way.
        """
        if self._host.others(self):
            await self._leave(self._drop, _DROPPING_S)
        else:
            await self._leave(self._host.stop, _LEAVING_S)
        return self._memory_bytes

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
        """The model is gone; complete what waits for it."""
        for ending in self._ending.values():
            ending.set_result(None)
        self._ending.clear()
        self._pressures.cancel()
        self._host.forget(self)
        self._closed.set_result(cause)
        if not self.leaves:
            log.warning("worker %s of %s: %s", self._worker.name, self._order.model, cause)
            self._observer.died(self, cause)

    def _drop(self) -> None:
        self._worker.send_now(worker_orders.DropModel(self.number))

    async def _leave(self, order: Callable[[], None], within_s: float) -> None:
        """Have the model leave the worker, and wait until it has; kill one that is slow."""
        if self._closed.done():
            return
        self.leaves = True
        order()
        try:
            await wait_within(self._closed, within_s)
        except TimeoutError:
            self._worker.kill(f"{self._order.model} did not leave it in time")
        await asyncio.shield(self._closed)

    # -- reports of the worker ------------------------------------------------------------------

    def handle(self, order: worker_orders.WorkerOrder, descriptors: Sequence[int] = ()) -> None:
        """Handle a report about this model; the caller closes the descriptors."""
        if isinstance(order, worker_orders.ImageLoaded):
            if not self._loaded.done():
                self._loaded.set_result(order)
        elif isinstance(order, worker_orders.ImageLoadFailed):
            out_of_memory = order.out_of_memory
            self.fail(LoadFailure(self._worker.name, order.detail, out_of_memory=out_of_memory))
        elif isinstance(order, worker_orders.CallsRan):
            if order.session:
                self._observer.called(self, order.lease, order.session, order.run_s)
            self._memory_bytes = max(self._memory_bytes, order.peak_bytes)
            peak_bytes, held_bytes = self._memory_bytes, order.held_bytes
            ran = order.lease, order.batch, order.run_s, peak_bytes, order.calls, held_bytes
            self._observer.ran(self, *ran, together=max(1, order.together))
            self._observer.usage.used(self, order.metrics)
        elif isinstance(order, worker_orders.CallsMerged):
            self._observer.merged(self, merged_sums(order))
        elif isinstance(order, worker_orders.CallsClaimed):
            self._observer.claimed(self, order.lease, order.session)
        elif isinstance(order, worker_orders.CallsComputed):
            self._observer.computed(self, order.lease, order.computed_s)
        elif isinstance(order, worker_orders.CallsEnded):
            self._calls_ended(order)
        elif isinstance(order, worker_orders.Pressure):
            self._pressures.start(self._relieve(order))
        else:
            self._handle_data(order, descriptors)

    def _calls_ended(self, order: worker_orders.CallsEnded) -> None:
        self._observer.computed(self, order.lease, order.computed_s)
        self._admitted.discard(order.lease)
        ending = self._ending.pop(order.lease, None)
        if ending is not None:
            ending.set_result(None)

    def _handle_data(self, order: worker_orders.WorkerOrder, descriptors: Sequence[int]) -> None:
        data = self._observer.data
        if isinstance(order, data_orders.HandedOver):
            data.handed_over(self, order.handle, done=order.done)
        elif isinstance(order, data_orders.BorrowData):
            data.wanted(self, order.handle)
        elif isinstance(order, data_orders.DataGivenBack):
            data.given_back(self, order.handle)
        elif isinstance(order, data_orders.DataPut):
            lifetime_s = order.lifetime_s[0] if order.lifetime_s else None
            put = PutByWorker(
                order.session, order.handle, order.size_bytes, order.about, lifetime_s
            )
            data.was_put(self, put)
        elif isinstance(order, data_orders.GrantLeft):
            data.grant_left(self, order.size_bytes, order.pieces)
        elif isinstance(order, data_orders.DataLent):
            data.lent(self, order.handle, _lent(order, descriptors))

    def _hurry(self, rank: TransferRank) -> None:
        if rank is TransferRank.AWAITED:
            self._send(worker_orders.HurryLoad(self.number))

    def _send(self, order: worker_orders.WorkerOrder, descriptors: Sequence[int] = ()) -> None:
        """Send an order about this model, unless the model leaves."""
        if not (self.leaves or self._closed.done()):
            self._worker.send_now(order, descriptors)

    def _end_calls(self, lease: int) -> "asyncio.Future[None]":
        """Order the end of a lease's calls, once; done when none is in flight."""
        ending = self._ending.get(lease)
        if ending is None:
            ending = self._ending[lease] = asyncio.get_running_loop().create_future()
            self._worker.send_now(worker_orders.EndCalls(self.number, lease))
        return ending

    async def _relieve(self, order: worker_orders.Pressure) -> None:
        relief = await self._observer.pressure(self, order.lease, order.need_bytes)
        limits = relief.limit_bytes, relief.together_bytes
        self._send(worker_orders.SetLimit(self.number, *limits, order.number, relief.retry))


def _lent(order: data_orders.DataLent, descriptors: Sequence[int]) -> LentData | None:
    """What the worker lends: memory by one descriptor, or by a token of a driver."""
    if not order.done or len(descriptors) + bool(order.token) != 1:
        return None
    descriptor = descriptors[0] if descriptors else None
    return LentData(order.size_bytes, order.offset, order.token, descriptor)
