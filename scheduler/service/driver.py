"""The core on real time: takes events from callers and nodes, and carries out what it decides."""

import time
from asyncio import CancelledError, Future, get_running_loop
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from logging import Logger
from types import MappingProxyType
from typing import NamedTuple

from cache_manager.model.ids import GpuId, ModelId, NodeId
from common.clock import Cancellable, Clock
from scheduler.cluster.request_queue import Standing
from scheduler.core.core import Core
from scheduler.model import errors, events
from scheduler.model.actions import (
    Action,
    Demote,
    DemoteStored,
    Dispatch,
    EndContext,
    EndLease,
    Finish,
    Order,
    Prepare,
    Recall,
    Refuse,
    SetTimer,
)
from scheduler.model.values import (
    AfterLoss,
    LeaseId,
    Placement,
    Request,
    RequestId,
    RequestOutcome,
    SlotId,
)
from scheduler.service.event_log import DecisionLog
from scheduler.service.survey import gpus_of
from scheduler.wire.cluster_status import DecisionCounts, Status
from scheduler.wire.node_link import NodeLink, hand_over, placement_of

Observer = Callable[[float, events.Event, Sequence[Action]], None]

_STOPPING = "the scheduler is stopping"


class _Reported(NamedTuple):
    """An event, and the callback for its refusal, or None once it was handled."""

    event: events.Event
    handled: Callable[[errors.EventRefused | None], None] | None = None


class MonotonicClock:
    """The machine's monotonic time: a loop's own may be coarse (uvloop counts milliseconds)."""

    def now_s(self) -> float:
        return time.monotonic()

    def call_at(self, when_s: float, callback: Callable[[], None]) -> Cancellable:
        return get_running_loop().call_later(max(0.0, when_s - time.monotonic()), callback)


def nobody_keeps(_lease: LeaseId) -> None:
    """Without callers' streams no request names a caller that keeps leases."""


def as_reported(snapshot: events.NodeSnapshot) -> Iterable[events.Event]:
    return (snapshot,)


class Driver:
    """Drives one core, for callers and for the nodes that are attached.

    Everything here runs on one event loop. Events are handled one after the other in the order in
    which they come, also those that are reported while an earlier one is being handled.
    """

    def __init__(
        self,
        core: Core,
        clock: Clock,
        log: Logger,
        observer: Observer | None = None,
        recall: Callable[[LeaseId], None] = nobody_keeps,
        restore: Callable[[events.NodeSnapshot], Iterable[events.Event]] = as_reported,
    ) -> None:
        """`recall` tells the caller that keeps a lease to give it back.

        `restore` adds to a node's report what an earlier leader knew of the node.
        """
        self._core = core
        self._clock = clock
        self._log = log
        self._observer = observer
        self._recall = recall
        self._restore = restore
        self._events: deque[_Reported] = deque()
        self._handling = False
        self._closed = False
        self._callers = WaitingCallers()
        self._journal = DecisionLog(log)
        self._links = NodeLinks(log)
        self._timers = Timers(clock, self.report)
        self._contention = Contention(clock, self._links, self._drain)
        self._undelivered: set[LeaseId] = set()

    # -- nodes ----------------------------------------------------------------------------------

    def attach(self, node: NodeId, link: NodeLink) -> None:
        """Give this node's orders to this link; its GPUs are used once it has reported them."""
        self._log.info("node %s is attached", node)
        self._links.attach(node, link)
        if self._contention.waiting:
            self._links.contended_at(node, waiting=True)
        self._drain()

    @property
    def connected(self) -> bool:
        """Always: for nodes in this process."""
        return not self._closed

    def detach(self, node: NodeId) -> None:
        """The node is gone with its GPUs; requests that hold leases there fail."""
        if node in self._links:
            self._log.info("node %s is detached", node)
            self._links.lose(node)
            self._drain()

    def report(self, event: events.Event) -> None:
        if isinstance(event, events.NodeSnapshot):
            for restored in self._restore(event):
                self._submit(_Reported(restored))
        else:
            self._submit(_Reported(event))

    # -- callers --------------------------------------------------------------------------------

    async def acquire(self, request: Request) -> Placement:
        """Wait for a lease; a second call with the same id waits for the same answer.

        Raises a RequestEnded if the request ends without a lease, EventRefused if it is invalid.
        Cancelling the task cancels the request.
        """
        event = events.RequestArrived(request)
        if self._gives_back(request.id):
            raise errors.EventRefused(event, "it has given its lease back")
        return await self._placement(request, event)

    async def wanted(self, request: RequestId) -> Placement:
        """Wait for another lease after one that was released with `may_return`.

        The request goes to the front of the queue. Errors and cancellation are those of `acquire`.
        """
        event = events.LeaseWanted(request)
        pending = self._core.requests.get(request)
        if pending is None:
            raise errors.EventRefused(event, "this request has ended")
        return await self._placement(pending.request, event)

    def release(
        self, lease: LeaseId, request: RequestId | None = None, *, may_return: bool = False
    ) -> None:
        """Give a lease back; with `may_return` its request may ask for another one later.

        Of a lease that several requests have, only the named one gives it back; without a name,
        all of them do.
        """
        self.report(events.LeaseReleased(lease, may_return, request))

    def cancel(self, request: RequestId) -> None:
        """The caller went away: end the request, wherever it is; an ended one stays as it is."""
        self.report(events.RequestCancelled(request))

    # -- administration: each method raises EventRefused if the order cannot be carried out --------

    async def pin(self, model: ModelId, gpu: GpuId | None = None) -> None:
        """Keep a model on one GPU, loading it there if needed, or wherever it is now."""
        await self._ask(events.PinAsked(model, gpu))

    async def unpin(self, model: ModelId, gpu: GpuId | None = None) -> None:
        """Let a pinned model be evicted again, on one GPU or everywhere."""
        await self._ask(events.UnpinAsked(model, gpu))

    async def prefetch(self, model: ModelId, gpu: GpuId | None = None) -> None:
        """Load a model ahead of its requests; the load continues after this returns."""
        await self._ask(events.PrefetchAsked(model, gpu))

    async def evict(self, model: ModelId, gpu: GpuId | None = None) -> None:
        """Take a model out of GPU memory, wherever it is not in use."""
        await self._ask(events.EvictAsked(model, gpu))

    async def set_policy(
        self, policy: str, parameters: Mapping[str, float] = MappingProxyType({})
    ) -> None:
        """Decide by this policy from now on; no request is lost."""
        await self._ask(events.PolicySet(policy, parameters))

    def status(self) -> Status:
        placer = self._core.placer
        waiting = self._core.cluster.waiting.count
        return Status(
            now_s=self._clock.now_s(),
            policy=placer.policy_name,
            gpus=gpus_of(self._core),
            nodes=self._links.nodes(),
            waiting=waiting,
            waiting_locally=self._core.cluster.queued - waiting - self._core.cluster.held,
            counts=self.counts(),
        )

    def counts(self) -> DecisionCounts:
        return self._journal.counts()

    async def survey(self) -> Status:
        """The status; asynchronous, as with a scheduler in another process."""
        return self.status()

    async def locate(self, node: NodeId) -> tuple[str, ...]:
        """No addresses: whoever calls the driver itself is the only node."""
        del node
        return ()

    def close(self) -> None:
        """Take no further event, set no timer; waiting callers get Cancelled."""
        self._closed = True
        self._timers.close()
        self._contention.close()
        for request in self._callers.requests():
            self._callers.answer(request, Finish(request, RequestOutcome.CANCELLED, _STOPPING))
        for event, handled in self._events:
            if handled is not None:
                handled(errors.EventRefused(event, _STOPPING))
        self._events.clear()

    # -- waiting --------------------------------------------------------------------------------

    async def _placement(self, request: Request, event: events.Event) -> Placement:
        if self._closed:
            raise errors.RequestWithdrawn(request.id, _STOPPING)
        waiter, together = self._callers.join(request.id)

        def handled(refused: errors.EventRefused | None) -> None:
            if refused is not None and not waiter.done():  # it is raised in this task alone
                waiter.set_exception(refused)

        try:
            self._submit(_Reported(event, handled))
            answer = await waiter
        except CancelledError:
            if self._callers.leave(request.id, waiter, together):
                self.report(events.RequestCancelled(request.id))
            raise
        except BaseException:
            self._callers.leave(request.id, waiter, together)
            raise
        if isinstance(answer, Finish):
            raise error_of(request, answer, self._core)
        return answer

    def _gives_back(self, request: RequestId) -> bool:
        """Whether the request holds no lease any more, or one whose end was ordered."""
        pending = self._core.requests.get(request)
        if pending is None or pending.lease is None:
            return False
        lease = self._core.leases.get(pending.lease)
        return pending.standing is Standing.PAUSED or (lease is not None and lease.released)

    async def _ask(self, event: events.Event) -> None:
        answered: Future[errors.EventRefused | None] = get_running_loop().create_future()

        def handled(refused: errors.EventRefused | None) -> None:
            if not answered.done():  # else the caller has gone
                answered.set_result(refused)

        if self._closed:
            raise errors.EventRefused(event, _STOPPING)
        self._submit(_Reported(event, handled))
        refused = await answered
        if refused is not None:
            raise refused

    # -- one event after the other ----------------------------------------------------------------

    def _submit(self, reported: _Reported) -> None:
        if not self._closed:
            self._events.append(reported)
            self._drain()

    def _drain(self) -> None:
        """Handle all events, and those that follow from them, unless an outer call does so."""
        if self._handling:
            return
        self._handling = True
        try:
            while not self._closed:
                self._lose_nodes()
                if self._events:
                    self._handle(self._events.popleft())
                elif not self._contention.notify(waiting=self._core.cluster.contending > 0):
                    break
        finally:
            self._handling = False

    def _handle(self, reported: _Reported) -> None:
        event, now = reported.event, self._clock.now_s()
        refused: errors.EventRefused | None = None
        if self._from_stranger(event):
            actions: list[Action] = [Refuse(event, "this node is not attached")]
        else:
            self._journal.happened(event)
            actions = self._core.handle(event, now)
            if self._observer is not None:
                self._observer(now, event, actions)
        for action in actions:
            if isinstance(action, Refuse):
                refused = errors.EventRefused(event, action.reason)
            self._journal.decided(action)
            self._carry_out(action)
        if reported.handled is not None:
            reported.handled(refused)

    def _from_stranger(self, event: events.Event) -> bool:
        """Whether the event brings GPUs of a node that is not attached."""
        if isinstance(event, events.GpuJoined):
            return event.gpu.node not in self._links
        return (
            isinstance(event, events.NodeSnapshot)
            and bool(event.gpus)
            and event.node not in self._links
        )

    # -- carrying out -----------------------------------------------------------------------------

    def _carry_out(self, action: Action) -> None:
        if isinstance(action, Dispatch):
            self._dispatch(action)
        elif isinstance(action, Prepare | Demote | EndContext):
            self._order(action.gpu, action)
        elif isinstance(action, DemoteStored):
            if action.node in self._links:
                self._links.give(action.node, action)
        elif isinstance(action, EndLease):
            self._end_lease(action.slot, action)
        elif isinstance(action, Finish):
            self._timers.ended(action.request)
            self._callers.answer(action.request, action)
        elif isinstance(action, SetTimer):
            self._timers.set(action)
        elif isinstance(action, Recall):
            self._recall(action.lease)

    def _dispatch(self, action: Dispatch) -> None:
        """Order the node first: no caller may hold a lease that its node does not know."""
        if not self._links.give(action.node, action):
            self._undelivered.add(action.lease)
            return
        placement = placement_of(action)
        for request in action.requests:
            self._callers.answer(request, placement)

    def _order(self, gpu_id: GpuId, order: Prepare | Demote | EndContext) -> None:
        gpu = self._core.cluster.gpus.get(gpu_id)
        if gpu is not None:  # else the GPU left in the same step
            self._links.give(gpu.spec.node, order)

    def _end_lease(self, slot_id: SlotId, order: EndLease) -> None:
        slot = self._core.cluster.slots.get(slot_id)
        if slot is not None:
            self._links.give(slot.gpu.spec.node, order)

    # -- losses ---------------------------------------------------------------------------------

    def _lose_nodes(self) -> None:
        """Report lost nodes to the core before any other event, so that it places nothing there."""
        while self._links.lost:
            losses = self._losses(self._links.lost.pop())
            self._events.extendleft(_Reported(event) for event in reversed(losses))

    def _losses(self, node: NodeId) -> list[events.Event]:
        """The events of a lost node; requests whose lease was never delivered wait again."""
        leases = self._core.leases
        self._undelivered &= leases.keys()
        failures = [
            events.RunFailed(lease.id, f"node {node} was lost")
            for lease in leases.values()
            if lease.slot.gpu.spec.node == node
            and lease.requests
            and lease.id not in self._undelivered
        ]
        return [*failures, events.NodeSnapshot(node, (), (), AfterLoss.REQUEUE)]


# A lease, or how the request ended without one.
Answer = Placement | Finish
Waiter = Future[Answer]


class WaitingCallers:
    """Answers every task that waits for a request, once; several may wait for the same one."""

    def __init__(self) -> None:
        self._waiting: dict[RequestId, list[Waiter]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def join(self, request: RequestId) -> tuple[Waiter, list[Waiter]]:
        """One task's wait, and the waits of all that joined for the same answer."""
        waiter: Waiter = get_running_loop().create_future()
        together = self._waiting.setdefault(request, [])
        together.append(waiter)
        return waiter, together

    def answer(self, request: RequestId, answer: Answer) -> None:
        """Answer all tasks that wait for the request; a later task waits for the next answer."""
        for waiter in self._waiting.pop(request, ()):
            if not waiter.done():
                waiter.set_result(answer)

    def leave(self, request: RequestId, waiter: Waiter, together: list[Waiter]) -> bool:
        """Remove a waiting task; whether its request is left without a waiting or answered task."""
        together.remove(waiter)
        answered = waiter.done() and not waiter.cancelled() and waiter.exception() is None
        if together or (answered and isinstance(waiter.result(), Finish)):
            return False  # others wait, or it had ended before the task was resumed
        if self._waiting.get(request) is together:
            del self._waiting[request]
        return True

    def requests(self) -> list[RequestId]:
        return list(self._waiting)


REPEAT_S = 0.1


class NodeLinks:
    """One link for each attached node; `lost` holds nodes whose GPUs the core still counts on."""

    def __init__(self, log: Logger) -> None:
        self._log = log
        self._links: dict[NodeId, NodeLink] = {}
        self.lost: list[NodeId] = []

    def __contains__(self, node: NodeId) -> bool:
        return node in self._links

    def nodes(self) -> tuple[NodeId, ...]:
        """The nodes that are attached, in the order in which they attached."""
        return tuple(self._links)

    def attach(self, node: NodeId, link: NodeLink) -> None:
        self._links[node] = link

    def lose(self, node: NodeId) -> None:
        """Send this node no more orders."""
        self._links.pop(node, None)
        if node not in self.lost:
            self.lost.append(node)

    def give(self, node: NodeId, order: Order) -> bool:
        """Hand one order over; False if the node is lost, also if the link fails now."""
        link = self._links.get(node)
        if link is None:
            self.lose(node)
            return False
        try:
            hand_over(link, order)
        except Exception:  # noqa: BLE001 - a fault of one link must not stop the other nodes
            self._failed(node, order)
            return False
        return True

    def contended(self, *, waiting: bool) -> None:
        for node in self.nodes():
            self.contended_at(node, waiting=waiting)

    def contended_at(self, node: NodeId, *, waiting: bool) -> None:
        link = self._links.get(node)
        if link is None:  # it was lost while other nodes were notified
            return
        try:
            link.contended(waiting=waiting)
        except Exception:  # noqa: BLE001 - as above
            self._failed(node, "contended")

    def _failed(self, node: NodeId, order: object) -> None:
        self._log.exception("node %s is lost: its link failed at %s", node, order)
        self.lose(node)


class Contention:
    """Notifies on every change, and every `REPEAT_S` while requests wait."""

    def __init__(self, clock: Clock, links: NodeLinks, wake: Callable[[], None]) -> None:
        self._clock = clock
        self._links = links
        self._wake = wake
        self.waiting = False
        self._due = False
        self._timer: Cancellable | None = None

    def notify(self, *, waiting: bool) -> bool:
        """Notify all nodes after a change or when due; whether they were notified."""
        if waiting == self.waiting and not (waiting and self._due):
            return False
        self.waiting = waiting
        self._set_timer()
        self._links.contended(waiting=waiting)
        return True

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set_timer(self) -> None:
        self.close()
        self._due = False
        if self.waiting:
            when_s = self._clock.now_s() + REPEAT_S
            self._timer = self._clock.call_at(when_s, self._again)

    def _again(self) -> None:
        self._timer = None
        self._due = True
        self._wake()


class Timers:
    """Reports every event at its time; an event that is set twice is reported once."""

    def __init__(self, clock: Clock, report: Callable[[events.Event], None]) -> None:
        self._clock = clock
        self._report = report
        self._set: dict[SetTimer, Cancellable] = {}
        self._deadlines: dict[RequestId, SetTimer] = {}

    def __len__(self) -> int:
        return len(self._set)

    def set(self, order: SetTimer) -> None:
        if order in self._set:
            return
        if isinstance(order.event, events.DeadlinePassed):
            self._deadlines[order.event.request] = order
        self._set[order] = self._clock.call_at(order.at_s, lambda: self._due(order))

    def ended(self, request: RequestId) -> None:
        """Drop the deadline of this request."""
        order = self._deadlines.pop(request, None)
        if order is not None:
            self._set.pop(order).cancel()

    def close(self) -> None:
        for timer in self._set.values():
            timer.cancel()
        self._set.clear()
        self._deadlines.clear()

    def _due(self, order: SetTimer) -> None:
        del self._set[order]
        if isinstance(order.event, events.DeadlinePassed):
            self._deadlines.pop(order.event.request, None)
        self._report(order.event)


def error_of(request: Request, ended: Finish, core: Core) -> errors.RequestEnded:
    outcome, reason = ended.outcome, ended.reason
    if outcome is RequestOutcome.QUEUE_FULL:
        wait_s = core.lifecycle.expected_wait_s(request.function)
        return errors.QueueFull(request.id, reason, core.cluster.queued, wait_s)
    if outcome is RequestOutcome.OVER_QUOTA:
        return errors.OverQuota(request.id, reason, ended.again_s or 0.0)
    if outcome is RequestOutcome.TOO_LARGE:
        cluster = core.cluster
        needed_bytes = cluster.bundle(request.models).bytes
        return errors.ModelsTooLarge(request.id, reason, needed_bytes, cluster.largest_bytes)
    if outcome is RequestOutcome.EXPIRED:
        return errors.RequestExpired(request.id, reason, request.deadline_s)
    if outcome is RequestOutcome.CANCELLED:
        return errors.RequestWithdrawn(request.id, reason)
    if outcome is RequestOutcome.FAILED:
        return errors.RequestFailed(request.id, reason)
    return errors.GivenBack(request.id, "its last lease was released for good")
