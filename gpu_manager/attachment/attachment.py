"""A scheduler elsewhere, as a GPU manager sees it: one stream to the leader, kept up or renewed."""

import asyncio
import logging
import re
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Self

from cache_manager.model.ids import GpuId, ModelId, NodeId
from gpu_manager.attachment.leader_dialing import Dialer
from gpu_manager.attachment.leader_stream import LeaderStream
from gpu_manager.attachment.pending_calls import Call, PendingCalls
from gpu_manager.attachment.scheduling import OrderTaker
from gpu_manager.errors import BadSetting, NoScheduler
from scheduler.api import (
    BadValue,
    Demote,
    Dispatch,
    EndLease,
    Event,
    GpuDraining,
    LeaseId,
    LeaseReleased,
    ModelRegistered,
    Placement,
    Prepare,
    Request,
    RequestCancelled,
    RequestExpired,
    RequestId,
    RunFailed,
    RunFinished,
    SlotFreed,
    Status,
)
from scheduler.wire.node_stream import (
    Acquire,
    Answer,
    Ask,
    Contended,
    Given,
    NodeReport,
    Report,
    StreamTimes,
    Survey,
    Wanted,
    stream_key,
)

log = logging.getLogger(__name__)

_TIMES = StreamTimes()
# So many ended leases are remembered, lest an order that crossed their end brings one back.
_MOST_ENDED = 4096
# After a request's deadline its scheduler has so long to say so itself.
_LATE_S = 1.0
# What is safe in a URL and in a log.
_NODE = re.compile(r"[A-Za-z0-9._-]{1,253}")
_Order = Prepare | Dispatch | Demote | EndLease


class Attachment:
    """Implements `Scheduling` over the network; `async with` dials, and says goodbye at the end.

    While no scheduler is reached the node goes on serving the calls of leases that it has. What it
    reports is kept, and sent when the stream goes on; a new scheduler is sent the whole state.
    """

    def __init__(
        self, urls: Sequence[str], node: NodeId, secret: bytes, times: StreamTimes = _TIMES
    ) -> None:
        if not _NODE.fullmatch(node):
            raise BadSetting("node", node, "letters, digits, '-', '_' and '.'")
        self._dialer = Dialer(urls, node, secrets.token_hex(16), stream_key(secret), times)
        self._stream = LeaderStream(self._dialer, times, self._tell_everything, self._heard)
        self._orders: OrderTaker | None = None
        self._calls = PendingCalls()
        self._registered: dict[ModelId, ModelRegistered] = {}
        self._ended: OrderedDict[LeaseId, None] = OrderedDict()
        self._drained: tuple[GpuId, ...] = ()
        self._neighbours: dict[NodeId, tuple[str, ...]] = {}

    @property
    def connected(self) -> bool:
        """Whether a scheduler is reached at the moment."""
        return self._stream.connected

    @property
    def term(self) -> int:
        """The highest term that was met."""
        return self._dialer.term

    def addresses_of(self, node: NodeId) -> tuple[str, ...]:
        """Where functions find another node, on which a request was placed."""
        return self._neighbours.get(node, ())

    def listens_at(self, *addresses: str) -> None:
        """Where functions find this node; said whenever a scheduler lets it in."""
        self._dialer.addresses = addresses

    async def attached(self) -> None:
        """Wait until a scheduler has let this node in."""
        await self._stream.begun.wait()

    # -- the node -------------------------------------------------------------------------------

    def attach(self, node: NodeId, link: OrderTaker) -> None:
        """Give this node's orders to this link, as soon as a scheduler is reached."""
        log.info("node %s looks for its scheduler", node)
        self._orders = link
        if link.addresses:
            self.listens_at(*link.addresses)
        self._stream.start()

    def drain(self, gpus: Iterable[GpuId]) -> None:
        """Have no further request placed on these GPUs, which are all of the node's."""
        self._drained = tuple(gpus)
        for gpu in self._drained:
            self._stream.say(Report(GpuDraining(gpu)))

    def detach(self, node: NodeId) -> None:
        """The node goes, once all that it said has arrived."""
        log.info("node %s leaves", node)
        self._stream.leave()

    def report(self, event: Event) -> None:
        """Tell what has happened, now or when the stream goes on."""
        if isinstance(event, ModelRegistered):
            self._registered[event.model.id] = event
        elif isinstance(event, SlotFreed):
            self._ended[event.lease] = None
            if len(self._ended) > _MOST_ENDED:
                self._ended.popitem(last=False)
        elif isinstance(event, RunFinished) and self._drained:
            return  # it may come when the GPU is gone already
        assert isinstance(event, NodeReport), f"{event} is nothing that a node reports"
        self._stream.say(Report(event))

    # -- callers --------------------------------------------------------------------------------

    async def acquire(self, request: Request) -> Placement:
        """Wait for a lease; cancelling the task cancels the request."""
        asked_s = asyncio.get_running_loop().time()

        def made(number: int) -> Call:
            return Acquire(number, _from_now(request, asked_s))

        return await self._placed(request.id, made, request.deadline_s)

    async def wanted(self, request: RequestId) -> Placement:
        """Wait for another lease after one that was released with `may_return`."""
        return await self._placed(request, lambda number: Wanted(number, request), None)

    def release(self, lease: LeaseId, *, may_return: bool = False) -> None:
        """The holder needs the GPU no more, or perhaps later again."""
        self.report(LeaseReleased(lease, may_return))

    def cancel(self, request: RequestId) -> None:
        """The caller went away."""
        self.report(RequestCancelled(request))

    async def pin(self, model: ModelId, gpu: GpuId | None = None) -> None:
        """Keep a model on one GPU, or wherever it is."""
        await self._asked(lambda number: Ask(number, "pin", model, gpu))

    async def unpin(self, model: ModelId, gpu: GpuId | None = None) -> None:
        """Let a pinned model be evicted again."""
        await self._asked(lambda number: Ask(number, "unpin", model, gpu))

    async def evict(self, model: ModelId, gpu: GpuId | None = None) -> None:
        """Take a model out of GPU memory where it is not in use."""
        await self._asked(lambda number: Ask(number, "evict", model, gpu))

    async def survey(self) -> Status:
        """This node's GPUs and the cluster's counts, as the scheduler sees them now."""
        answer = await self._asked(Survey)
        if answer.status is None:
            raise BadValue("the scheduler answered another question")
        return answer.status

    async def _placed(
        self, request: RequestId, made: Callable[[int], Call], deadline_s: float | None
    ) -> Placement:
        call = self._calls.add(made, request)
        self._stream.say(made(call.number))
        latest_s = None if deadline_s is None else deadline_s + _LATE_S
        given_up = True
        try:
            async with asyncio.timeout_at(latest_s):
                answer = await call.answer
            given_up = False
        except TimeoutError as error:
            raise RequestExpired(request, "its deadline passed", deadline_s) from error
        finally:
            answered = call.answer.done() and not call.answer.cancelled()
            failed = answered and call.answer.exception() is not None
            if self._calls.leave(call, given_up=given_up and not failed):
                self.cancel(request)
        if answer.placement is None:
            raise BadValue("the scheduler answered another question")
        if answer.addresses:
            self._neighbours[answer.placement.node] = answer.addresses
        return answer.placement

    async def _asked(self, made: Callable[[int], Call]) -> Answer:
        if not self._stream.connected:
            raise NoScheduler("no scheduler is reached at the moment")
        call = self._calls.add(made)
        try:
            self._stream.say(made(call.number))
            return await call.answer
        finally:
            self._calls.leave(call, given_up=True)

    # -- what the scheduler says ----------------------------------------------------------------

    def begin_anew(self) -> None:
        """Break off: the next stream carries the whole state, not what this one lacked."""
        self._stream.begin_anew()

    def _tell_everything(self, wishes: list[Report]) -> None:
        """A scheduler knows nothing of this node, nor of what crossed on an earlier stream."""
        assert self._orders is not None, "a stream begins when the node is attached"
        self._ended.clear()
        self._orders.contended(waiting=False)
        for event in [*self._registered.values(), *self._orders.whole_state()]:
            self.report(event)
        for leaving in [Report(GpuDraining(gpu)) for gpu in self._drained]:
            self._stream.say(leaving)
        for wish in wishes:
            self._stream.say(wish)
        for call in self._calls:
            self._stream.say(call)

    def _heard(self, message: Given | Answer | Contended) -> None:
        if isinstance(message, Given):
            self._obey(message.order)
        elif isinstance(message, Answer):
            self._calls.answered(message)
        elif self._orders is not None:
            self._orders.contended(waiting=message.waiting)

    def _obey(self, order: _Order) -> None:
        assert self._orders is not None, "orders come to attached nodes alone"
        try:
            if isinstance(order, Dispatch):
                self._grant(self._orders, order)
            elif isinstance(order, Prepare):
                self._orders.prepare(order)
            elif isinstance(order, EndLease):
                self._orders.end_lease(order)
            else:
                self._orders.demote(order)
        except Exception as error:
            log.exception("this node could not take %s", order)
            raise BadValue("an order that this node cannot take") from error

    def _grant(self, orders: OrderTaker, order: Dispatch) -> None:
        if self._drained and order.lease not in self._ended:
            self.report(RunFailed(order.lease, "its node is leaving"))
        if self._drained or order.lease in self._ended:  # sent before the end was known there
            self.report(SlotFreed(order.slot, order.lease))
            return
        orders.grant(order)
        placement = Placement(
            lease=order.lease,
            gpu=order.gpu,
            node=order.node,
            slot=order.slot,
            models=order.models,
            hit=order.hit,
            estimate=order.estimate,
        )
        for request in order.requests:
            self._calls.granted(request, placement)

    # -- the end --------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Wait for a moment until the scheduler has heard everything, then hang up."""
        await self._stream.close()


def _from_now(request: Request, asked_s: float) -> Request:
    """The request with its times as seconds from now."""
    now_s = asyncio.get_running_loop().time()
    arrived_s = asked_s if request.arrived_s is None else request.arrived_s
    deadline_s = request.deadline_s
    return request._replace(
        arrived_s=arrived_s - now_s,
        deadline_s=None if deadline_s is None else deadline_s - now_s,
    )
