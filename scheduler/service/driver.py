"""The core on real time: takes events from callers and nodes, and carries out what it decides."""

from asyncio import CancelledError, Future, get_running_loop
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from logging import Logger
from types import MappingProxyType
from typing import NamedTuple

from cache_manager.model import GpuId, ModelId, NodeId
from scheduler import events
from scheduler.actions import (
    Action,
    Demote,
    Dispatch,
    EndLease,
    Finish,
    Prepare,
    Refuse,
    SetTimer,
)
from scheduler.api import Acquired, Ended, Placement
from scheduler.core import Core
from scheduler.errors import (
    Cancelled,
    Expired,
    Failed,
    GivenBack,
    QueueFull,
    Refused,
    RequestEnded,
    TooLarge,
)
from scheduler.events import Event, GpuJoined, NodeSnapshot, RunFailed
from scheduler.model import AfterLoss, LeaseId, Outcome, Request, RequestId, SlotId
from scheduler.ports import Clock, NodeLink
from scheduler.requests import Standing
from scheduler.service.callers import Callers
from scheduler.service.contention import Contention
from scheduler.service.journal import Journal
from scheduler.service.links import Links
from scheduler.service.survey import gpus_of
from scheduler.service.timers import Timers
from scheduler.status import Counts, Status

Recorder = Callable[[float, Event], None]
Observer = Callable[[float, Event, Sequence[Action]], None]

_STOPPING = "the scheduler is stopping"


class _Reported(NamedTuple):
    """An event, and who wants to know that it was handled, or why it was refused."""

    event: Event
    handled: Callable[[Refused | None], None] | None = None


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
        recorder: Recorder | None = None,
        observer: Observer | None = None,
    ) -> None:
        self._core = core
        self._clock = clock
        self._log = log
        self._recorder = recorder
        self._observer = observer
        self._events: deque[_Reported] = deque()
        self._handling = False
        self._closed = False
        self._callers = Callers()
        self._journal = Journal(log)
        self._links = Links(log)
        self._timers = Timers(clock, self.report)
        self._contention = Contention(clock, self._links, self._drain)
        self._undelivered: set[LeaseId] = set()

    # -- nodes ----------------------------------------------------------------------------------

    def attach(self, node: NodeId, link: NodeLink) -> None:
        """Give this node's orders to this link; its GPUs are used once it has reported them."""
        self._log.info("node %s is attached", node)
        self._links.attach(node, link)
        self._contention.joined(node)
        self._drain()

    @property
    def connected(self) -> bool:
        """Always: for nodes in this process."""
        return not self._closed

    def detach(self, node: NodeId, running: AfterLoss = AfterLoss.FAIL) -> None:
        """The node is gone with its GPUs; `running` is for requests that hold leases there.

        What waits again holds no lease: its caller has to acquire it once more, or cancel it.
        """
        if node in self._links:
            self._log.info("node %s is detached", node)
            self._links.lose(node, running)
            self._drain()

    def report(self, event: Event) -> None:
        """Take one event in, from a node or on behalf of somebody."""
        self._submit(_Reported(event))

    # -- callers --------------------------------------------------------------------------------

    async def acquire(self, request: Request) -> Placement:
        """Wait for a lease; see `Scheduler.acquire`."""
        event = events.RequestArrived(request)
        if self._gives_back(request.id):
            raise Refused(event, "it has given its lease back")
        return await self._placement(request, event)

    async def wanted(self, request: RequestId) -> Placement:
        """Wait for another lease after an early return; see `Scheduler.wanted`."""
        event = events.LeaseWanted(request)
        pending = self._core.requests.get(request)
        if pending is None:
            raise Refused(event, "this request has ended")
        return await self._placement(pending.request, event)

    def release(self, lease: LeaseId, *, may_return: bool = False) -> None:
        """The holder needs the GPU no more, or (with `may_return`) perhaps later again."""
        self.report(events.LeaseReleased(lease, may_return))

    def cancel(self, request: RequestId) -> None:
        """The caller went away: the request ends, wherever it is."""
        self.report(events.RequestCancelled(request))

    # -- administration: each raises Refused where it cannot be done ------------------------------

    async def pin(self, model: ModelId, gpu: GpuId | None = None) -> None:
        """Keep a model on one GPU, loading it if need be, or wherever it is now."""
        await self._ask(events.PinAsked(model, gpu))

    async def unpin(self, model: ModelId, gpu: GpuId | None = None) -> None:
        """Let a pinned model be evicted again, on one GPU or everywhere."""
        await self._ask(events.UnpinAsked(model, gpu))

    async def prefetch(self, model: ModelId, gpu: GpuId | None = None) -> None:
        """Load a model ahead of its requests; the load goes on after this returns."""
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
        """GPUs with their residents and leases, queues and counts, as they are now."""
        placer = self._core.placer
        waiting = self._core.cluster.waiting.count
        return Status(
            now_s=self._clock.now_s(),
            policy=placer.policy_name,
            gpus=gpus_of(self._core),
            nodes=self._links.nodes(),
            waiting=waiting,
            waiting_locally=placer.queued - waiting,
            counts=self.counts(),
        )

    def counts(self) -> Counts:
        """What was decided since the start."""
        return self._journal.counts()

    async def survey(self) -> Status:
        """The status, for those to whom a scheduler elsewhere would have to be asked."""
        return self.status()

    def close(self) -> None:
        """Take no further event, set no timer; whoever waits is told that the scheduler stops."""
        self._closed = True
        self._timers.close()
        self._contention.close()
        for request in self._callers.requests():
            self._callers.answer(Ended(request, Outcome.CANCELLED, _STOPPING))
        for event, handled in self._events:
            if handled is not None:
                handled(Refused(event, _STOPPING))
        self._events.clear()

    # -- waiting --------------------------------------------------------------------------------

    async def _placement(self, request: Request, event: Event) -> Placement:
        if self._closed:
            raise Cancelled(request.id, _STOPPING)
        call = self._callers.join(request.id)
        try:
            self._submit(_Reported(event, call.handled))
            answer = await call.waiter
        except CancelledError:
            if self._callers.leave(request.id, call):
                self.report(events.RequestCancelled(request.id))
            raise
        except BaseException:
            self._callers.leave(request.id, call)
            raise
        if isinstance(answer, Ended):
            raise self._error(request, answer)
        return answer.placement

    def _gives_back(self, request: RequestId) -> bool:
        """Whether the request holds no lease any more, or one that is only waited for to end."""
        pending = self._core.requests.get(request)
        if pending is None or pending.lease is None:
            return False
        lease = self._core.placer.leases.get(pending.lease)
        return pending.standing is Standing.PAUSED or (lease is not None and lease.released)

    def _error(self, request: Request, ended: Ended) -> RequestEnded:
        outcome, reason = ended.outcome, ended.reason
        if outcome is Outcome.QUEUE_FULL:
            return QueueFull(request.id, reason, self._core.placer.queued)
        if outcome is Outcome.TOO_LARGE:
            cluster = self._core.cluster
            needed_bytes = cluster.bundle(request.models).bytes
            return TooLarge(request.id, reason, needed_bytes, cluster.largest_bytes)
        if outcome is Outcome.EXPIRED:
            return Expired(request.id, reason, request.deadline_s)
        if outcome is Outcome.CANCELLED:
            return Cancelled(request.id, reason)
        if outcome is Outcome.FAILED:
            return Failed(request.id, reason)
        return GivenBack(request.id, "its last lease was released for good")

    async def _ask(self, event: Event) -> None:
        """Have one order obeyed; it may be handled a moment later."""
        answered: Future[Refused | None] = get_running_loop().create_future()

        def handled(refused: Refused | None) -> None:
            if not answered.done():  # else nobody waits for it any more
                answered.set_result(refused)

        if self._closed:
            raise Refused(event, _STOPPING)
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
        """Handle everything that was reported, and what follows from it, unless that goes on."""
        if self._handling:
            return
        self._handling = True
        try:
            while not self._closed:
                self._lose_nodes()
                if self._events:
                    self._handle(self._events.popleft())
                elif not self._contention.tell(waiting=self._core.placer.queued > 0):
                    break
        finally:
            self._handling = False

    def _handle(self, reported: _Reported) -> None:
        event, now = reported.event, self._clock.now_s()
        refused: Refused | None = None
        if self._from_stranger(event):
            actions: list[Action] = [Refuse(event, "this node is not attached")]
        else:
            if self._recorder is not None:
                self._recorder(now, event)
            self._journal.happened(event)
            actions = self._core.handle(event, now)
            if self._observer is not None:
                self._observer(now, event, actions)
        for action in actions:
            if isinstance(action, Refuse):
                refused = Refused(event, action.reason)
            self._journal.decided(action)
            self._carry_out(action)
        if reported.handled is not None:
            reported.handled(refused)

    def _from_stranger(self, event: Event) -> bool:
        """Whether a node brings GPUs to which no link leads."""
        if isinstance(event, GpuJoined):
            return event.gpu.node not in self._links
        return (
            isinstance(event, NodeSnapshot) and bool(event.gpus) and event.node not in self._links
        )

    # -- carrying out -----------------------------------------------------------------------------

    def _carry_out(self, action: Action) -> None:
        if isinstance(action, Dispatch):
            self._dispatch(action)
        elif isinstance(action, Prepare | Demote):
            self._order(action.gpu, action)
        elif isinstance(action, EndLease):
            self._end_lease(action.slot, action)
        elif isinstance(action, Finish):
            self._timers.ended(action.request)
            self._callers.answer(Ended(action.request, action.outcome, action.reason))
        elif isinstance(action, SetTimer):
            self._timers.set(action)

    def _dispatch(self, action: Dispatch) -> None:
        """The node first: no caller may hold a lease of which its node was not told."""
        if not self._links.give(action.node, action):
            self._undelivered.add(action.lease)
            return
        placement = Placement(
            lease=action.lease,
            gpu=action.gpu,
            node=action.node,
            slot=action.slot,
            models=action.models,
            hit=action.hit,
            estimate=action.estimate,
        )
        for request in action.requests:
            self._callers.answer(Acquired(request, placement))

    def _order(self, gpu_id: GpuId, order: Prepare | Demote) -> None:
        gpu = self._core.cluster.gpus.get(gpu_id)
        if gpu is not None:  # else it left in this very step, and there is nobody to tell
            self._links.give(gpu.spec.node, order)

    def _end_lease(self, slot_id: SlotId, order: EndLease) -> None:
        slot = self._core.cluster.slots.get(slot_id)
        if slot is not None:
            self._links.give(slot.gpu.spec.node, order)

    # -- losses ---------------------------------------------------------------------------------

    def _lose_nodes(self) -> None:
        """Tell the core of lost nodes before anything else, so that it places nothing there."""
        while self._links.lost:
            node, running = self._links.lost.popitem()
            losses = self._losses(node, running)
            self._events.extendleft(_Reported(event) for event in reversed(losses))

    def _losses(self, node: NodeId, running: AfterLoss) -> list[Event]:
        """What the core must hear: requests that were never told of their lease wait again."""
        leases = self._core.placer.leases
        self._undelivered &= leases.keys()
        losses: list[Event] = []
        if running is AfterLoss.FAIL:
            losses += [
                RunFailed(lease.id, f"node {node} was lost")
                for lease in leases.values()
                if lease.slot.gpu.spec.node == node
                and lease.requests
                and lease.id not in self._undelivered
            ]
        losses.append(NodeSnapshot(node, (), (), AfterLoss.REQUEUE))
        return losses
