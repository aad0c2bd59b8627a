"""Attaches a GPU manager to a scheduler in another process by a stream to the leader."""

import asyncio
import logging
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Self

from msgspec.structs import replace

from cache_manager.model.ids import GpuId, ModelId, NodeId, Tier
from common.latest import Latest
from common.time_limits import time_limit, time_limit_at
from gpu_manager.attachment.leader_stream import Dialer, LeaderStream
from gpu_manager.attachment.scheduling import OrderTaker
from gpu_manager.errors import BadSetting, NoScheduler
from scheduler.api import (
    BadValue,
    Dispatch,
    Event,
    GpuDraining,
    LeaseId,
    LeaseReleased,
    MemoryPressure,
    ModelDemoted,
    ModelRegistered,
    NodeSnapshot,
    Order,
    Placement,
    Request,
    RequestCancelled,
    RequestExpired,
    RequestId,
    RunFailed,
    RunFinished,
    SlotFreed,
    Status,
    hand_over,
    placement_of,
)
from scheduler.wire.node_stream import (
    PAGE_MODELS,
    Acquire,
    Answer,
    Ask,
    Contended,
    Given,
    Locate,
    NodeReport,
    Report,
    StreamTimes,
    Survey,
    Wanted,
    is_node_name,
    stream_key,
)
from scheduler.wire.refusals import error_of
from scheduler.wire.request_times import relative

log = logging.getLogger(__name__)

_TIMES = StreamTimes()
# The number of ended leases remembered: an order sent before the end must not grant one again.
_MOST_ENDED = 4096
_MOST_NODES = 4096  # whose addresses are remembered: nobody says that one is gone
# Stored models that a snapshot names: reading it must not hold the scheduler up.
_MOST_STORED = 5_000
# After a request's deadline the scheduler has this long to report the expiry itself.
_LATE_S = 1.0
# Questions and orders are answered at once, or after another scheduler has come to lead.
_ANSWERED_S = 10.0


Call = Acquire | Wanted | Ask | Survey | Locate


@dataclass(frozen=True, slots=True, eq=False)
class PendingCall:
    """One call and its future; the message has the times of this process."""

    message: Call
    request: RequestId | None
    answer: asyncio.Future[Answer]
    asked_s: float

    def as_sent(self, now_s: float) -> Call:
        if not isinstance(self.message, Acquire):
            return self.message
        return Acquire(self.message.call, relative(self.message.request, self.asked_s, now_s))


class PendingCalls:
    """Every call from its first message to its answer, over successive streams."""

    def __init__(self) -> None:
        self.next_number = count(1).__next__
        self._waiting: dict[int, PendingCall] = {}
        self._by_request: dict[RequestId, list[PendingCall]] = {}

    def __iter__(self) -> Iterator[Call]:
        """Iterate with times relative to one now: a hold-up in between would change the order."""
        now_s = asyncio.get_running_loop().time()
        return iter([call.as_sent(now_s) for call in self._waiting.values()])

    def add(self, message: Call, request: RequestId | None = None) -> PendingCall:
        loop = asyncio.get_running_loop()
        call = PendingCall(message, request, loop.create_future(), loop.time())
        self._waiting[message.call] = call
        if request is not None:
            self._by_request.setdefault(request, []).append(call)
        return call

    def set_answer(self, answer: Answer) -> None:
        """Complete a call with its answer, unless the call was cancelled."""
        call = self._waiting.pop(answer.call, None)
        if call is None or call.answer.done():
            return
        if answer.refusal is None:
            call.answer.set_result(answer)
        else:
            call.answer.set_exception(error_of(answer.refusal))

    def set_placement(self, request: RequestId, placement: Placement) -> None:
        """The scheduler's own answer comes later, and may be lost with the scheduler."""
        for call in self._by_request.get(request, ()):
            self.set_answer(Answer(call.message.call, placement))

    def remove(self, call: PendingCall, *, given_up: bool) -> bool:
        """Remove a call; return whether its request must be cancelled now."""
        self._waiting.pop(call.message.call, None)
        if call.request is None:
            return False
        same_request = self._by_request[call.request]
        same_request.remove(call)
        if not same_request:
            del self._by_request[call.request]
        return given_up and not same_request


class Attachment:
    """Implements `Scheduling` over the network; `async with` closes the stream at the end.

    While no scheduler is reached, the node continues to serve calls under the leases that it has.
    Its reports are queued and sent when the stream resumes; a new scheduler gets the whole state.
    """

    def __init__(
        self, urls: Sequence[str], node: NodeId, secret: bytes, times: StreamTimes = _TIMES
    ) -> None:
        if not is_node_name(node):
            raise BadSetting("node", node, "letters, digits, '-', '_' and '.'")
        self._dialer = Dialer(urls, node, secrets.token_hex(16), stream_key(secret), times)
        self._stream = LeaderStream(
            self._dialer,
            times,
            self._model_pages,
            self._send_whole_state,
            self._tier_pages,
            self._receive,
        )
        self._orders: OrderTaker | None = None
        self._calls = PendingCalls()
        self._registered: dict[ModelId, ModelRegistered] = {}
        self._unreported: dict[ModelId, ModelRegistered] = {}
        self._unreported_tiers: dict[ModelId, ModelDemoted] = {}
        self._ended = Latest[LeaseId, None](_MOST_ENDED)
        self._drained: tuple[GpuId, ...] = ()
        self._neighbours = Latest[NodeId, tuple[str, ...]](_MOST_NODES)

    @property
    def connected(self) -> bool:
        return self._stream.connected

    @property
    def term(self) -> int:
        return self._dialer.term

    def addresses_of(self, node: NodeId) -> tuple[str, ...]:
        return self._neighbours.get(node, ())

    def set_addresses(self, *addresses: str) -> None:
        """Set this node's addresses for functions, which are sent with every Hello."""
        self._dialer.addresses = addresses

    async def attached(self) -> None:
        """Wait until a scheduler has accepted this node."""
        await self._stream.begun.wait()

    # -- the node -------------------------------------------------------------------------------

    def attach(self, node: NodeId, link: OrderTaker) -> None:
        log.info("node %s connects to its scheduler", node)
        self._orders = link
        self._stream.start()

    def drain(self, gpus: Iterable[GpuId]) -> None:
        """Stop placement of requests on these GPUs, which are all of the node's."""
        self._drained = tuple(gpus)
        for gpu in self._drained:
            self._stream.send(Report(GpuDraining(gpu)))

    def detach(self, node: NodeId) -> None:
        """Leave the scheduler after all queued reports have been received."""
        log.info("node %s leaves", node)
        self._stream.leave()

    def report(self, event: Event) -> None:
        """Send an event, now or when the stream resumes."""
        if isinstance(event, ModelRegistered):
            event = _with_known(event, self._registered.get(event.model.id))
            self._registered[event.model.id] = event
            if not self._stream.introduced:
                self._unreported[event.model.id] = event
        elif isinstance(event, NodeSnapshot):
            event = self._as_reported(event)
        elif isinstance(event, ModelDemoted):
            self._unreported_tiers.pop(event.model, None)
            if event.tier is Tier.ABSENT:
                self._forget(event.model)
        elif isinstance(event, SlotFreed):
            self._ended[event.lease] = None
        elif isinstance(event, RunFinished | MemoryPressure) and self._drained:
            return  # the scheduler may have removed the GPU already
        assert isinstance(event, NodeReport), f"{event} is not an event that a node reports"
        self._stream.send(Report(event))
        if self._unreported_tiers:
            self._stream.send_later_pages()

    def _as_reported(self, snapshot: NodeSnapshot) -> NodeSnapshot:
        """Take as many stored models as one message holds: others are sent later."""
        node, stored = snapshot.node, snapshot.stored
        later = stored[_MOST_STORED:]
        self._unreported_tiers = {
            model: ModelDemoted(node, None, model, tier) for model, tier in later
        }
        gpus = tuple(
            replace(state, draining=True) if state.gpu.id in self._drained else state
            for state in snapshot.gpus
        )
        return replace(snapshot, gpus=gpus, stored=stored[:_MOST_STORED])

    def _tier_pages(self) -> Iterator[list[Report]]:
        while self._unreported_tiers:
            models = list(islice(self._unreported_tiers, PAGE_MODELS))
            yield [Report(self._unreported_tiers.pop(model)) for model in models]

    def _forget(self, model: ModelId) -> None:
        """Forget a model whose weights have left this node: it is registered when they return."""
        self._registered.pop(model, None)
        self._unreported.pop(model, None)

    # -- callers --------------------------------------------------------------------------------

    async def acquire(self, request: Request) -> Placement:
        message = Acquire(self._calls.next_number(), request)
        return await self._place(request.id, message, request.deadline_s)

    async def wanted(self, request: RequestId) -> Placement:
        return await self._place(request, Wanted(self._calls.next_number(), request), None)

    def release(
        self, lease: LeaseId, request: RequestId | None = None, *, may_return: bool = False
    ) -> None:
        self.report(LeaseReleased(lease, may_return, request))

    def cancel(self, request: RequestId) -> None:
        self.report(RequestCancelled(request))

    async def pin(self, model: ModelId, gpu: GpuId | None = None) -> None:
        await self._ask(Ask(self._calls.next_number(), "pin", model, gpu))

    async def unpin(self, model: ModelId, gpu: GpuId | None = None) -> None:
        await self._ask(Ask(self._calls.next_number(), "unpin", model, gpu))

    async def evict(self, model: ModelId, gpu: GpuId | None = None) -> None:
        await self._ask(Ask(self._calls.next_number(), "evict", model, gpu))

    async def locate(self, node: NodeId) -> tuple[str, ...]:
        """Ask the scheduler for a node's addresses, which may have changed; none if unknown."""
        answer = await self._ask(Locate(self._calls.next_number(), node))
        return answer.addresses

    async def survey(self) -> Status:
        answer = await self._ask(Survey(self._calls.next_number()))
        if answer.status is None:
            raise BadValue("the scheduler's answer contains no status")
        return answer.status

    async def _place(
        self, request: RequestId, message: Call, deadline_s: float | None
    ) -> Placement:
        call = self._calls.add(message, request)
        self._stream.send(call.as_sent(call.asked_s))
        latest_s = None if deadline_s is None else deadline_s + _LATE_S
        given_up = True
        try:
            async with time_limit_at(latest_s):
                answer = await call.answer
            given_up = False
        except TimeoutError as error:
            raise RequestExpired(request, "its deadline passed", deadline_s) from error
        finally:
            answered = call.answer.done() and not call.answer.cancelled()
            failed = answered and call.answer.exception() is not None
            if self._calls.remove(call, given_up=given_up and not failed):
                self.cancel(request)
        if answer.placement is None:
            raise BadValue("the scheduler's answer contains no placement")
        if answer.addresses:
            self._neighbours[answer.placement.node] = answer.addresses
        return answer.placement

    async def _ask(self, message: Call) -> Answer:
        if not self._stream.connected:
            raise NoScheduler("no scheduler is reached at the moment")
        call = self._calls.add(message)
        try:
            self._stream.send(message)
            async with time_limit(_ANSWERED_S):
                return await call.answer
        except TimeoutError as error:
            why = f"the scheduler has not answered within {_ANSWERED_S:g} s"
            raise NoScheduler(f"{why}; an order may still be carried out") from error
        finally:
            self._calls.remove(call, given_up=True)

    # -- messages from the scheduler ------------------------------------------------------------

    def _model_pages(self) -> Iterator[list[Report]]:
        """The registered models, also those that are registered while the pages are sent."""
        self._unreported = dict(self._registered)
        while self._unreported:
            models = list(islice(self._unreported, PAGE_MODELS))
            yield [Report(self._unreported.pop(model)) for model in models]

    def _send_whole_state(self, unseen: list[Report]) -> None:
        """Report everything but the models to a scheduler without state of this node.

        `unseen` are releases and cancellations that an earlier scheduler may not have received.
        """
        assert self._orders is not None, "a stream begins when the node is attached"
        self._ended.clear()
        for event in self._orders.whole_state():
            self.report(event)
        for report in unseen:
            self._stream.send(report)
        for call in self._calls:
            self._stream.send(call)

    def _receive(self, message: Given | Answer | Contended) -> None:
        if isinstance(message, Given):
            self._carry_out(message.order)
        elif isinstance(message, Answer):
            self._calls.set_answer(message)
        elif self._orders is not None:
            self._orders.contended(waiting=message.waiting)

    def _carry_out(self, order: Order) -> None:
        assert self._orders is not None, "only attached nodes receive orders"
        try:
            if not isinstance(order, Dispatch):
                hand_over(self._orders, order)
            elif not self._is_refused(order):
                self._orders.grant(order)
                for request in order.requests:
                    self._calls.set_placement(request, placement_of(order))
        except Exception as error:
            log.exception("this node could not carry out %s", order)
            raise BadValue("an order that this node cannot carry out") from error

    def _is_refused(self, order: Dispatch) -> bool:
        """Whether a lease has ended already, or its node is leaving: the order was sent before."""
        is_ended = order.lease in self._ended
        if self._drained and not is_ended:
            self.report(RunFailed(order.lease, "its node is leaving"))
        if self._drained or is_ended:
            self.report(SlotFreed(order.slot, order.lease))
        return bool(self._drained) or is_ended

    # -- the end --------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Wait briefly until the scheduler has received all messages, then close the stream."""
        await self._stream.close()


def _with_known(event: ModelRegistered, before: ModelRegistered | None) -> ModelRegistered:
    if before is None:
        return event
    spec, earlier = event.model, before.model
    merged = replace(
        spec,
        memory_bytes=earlier.memory_bytes if spec.memory_bytes is None else spec.memory_bytes,
        weights_bytes=spec.weights_bytes or earlier.weights_bytes,
        features=spec.features or earlier.features,
    )
    return ModelRegistered(merged)
