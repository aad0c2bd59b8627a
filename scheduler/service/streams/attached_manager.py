"""One attached GPU manager: sends orders and takes reports, over one line after another."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from msgspec import structs

from cache_manager.model.ids import GpuId, ModelId, NodeId
from common.frame_line import FrameLine
from common.tasks import BackgroundTasks
from scheduler.model.actions import (
    Demote,
    DemoteStored,
    Dispatch,
    EndContext,
    EndLease,
    Order,
)
from scheduler.model.errors import BadValue, SchedulerError
from scheduler.model.events import Event, LiveLease, NodeHeard, NodeSilent, NodeSnapshot
from scheduler.model.values import LeaseId, Placement
from scheduler.service.driver import Driver
from scheduler.wire.cluster_status import Status
from scheduler.wire.node_stream import (
    ACKNOWLEDGED_AT_ONCE,
    MOST_UNSENT_BYTES,
    Acquire,
    Answer,
    Ask,
    Beat,
    Contended,
    Down,
    DownChannel,
    Given,
    Leave,
    Locate,
    Report,
    Resume,
    Superseded,
    Survey,
    Wanted,
)
from scheduler.wire.refusals import refusal
from scheduler.wire.request_times import absolute

log = logging.getLogger(__name__)

NodeCall = Acquire | Wanted | Ask | Survey | Locate


@dataclass(frozen=True, slots=True)
class Leader:
    """What all streams of one leader's nodes work with."""

    driver: Driver
    term: Callable[[], int]
    now_s: Callable[[], float]
    met: Callable[[int], None]  # a manager has met this term, earlier or elsewhere
    addresses: Callable[[NodeId], tuple[str, ...]]  # where a node's manager listens


class AttachedManager:
    """A NodeLink that outlives its line; `run` identifies the manager process.

    Messages are kept while there is no line, and sent over the next one.
    """

    def __init__(self, node: NodeId, run: str, leader: Leader) -> None:
        self.node = node
        self.run = run
        self.left = False
        self.last_message_s = 0.0
        self._loop = asyncio.get_running_loop()
        self._leader = leader
        self._driver = leader.driver
        self._channel = DownChannel()
        self._calling = BackgroundTasks(log, f"a call of node {node}")
        self._open_calls: set[int] = set()
        self._line: FrameLine | None = None
        self._before: AttachedManager | None = None
        self._attached = False
        self._waiting = False
        self._silent = False
        self._grace: asyncio.TimerHandle | None = None

    # -- lines ----------------------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        return self._line is not None

    @property
    def seen(self) -> int:
        return self._channel.seen

    def unsent(self, resume: Resume) -> list[bytes] | None:
        """Messages that a returning manager lacks; None if its stream has to begin again."""
        if self._channel.overfull:
            return None
        try:
            return self._channel.kept_after(resume.seen)
        except BadValue:
            return None

    def connect(self, line: FrameLine, unsent: list[bytes]) -> None:
        """Use this line from now on, and no earlier one."""
        self.disconnect()
        if self._grace is not None:
            self._grace.cancel()
        self._line = line
        self.last_message_s = self._loop.time()
        for data in unsent:
            line.send(data)
        if self._waiting:
            self.contended(waiting=True)
        if self._silent:  # after the kept messages, so that later decisions follow them
            self._silent = False
            self._driver.report(NodeHeard(self.node))

    def disconnect(self) -> None:
        if self._line is not None:
            self._line.hang_up()
            self._line = None

    def line_ended(self, line: FrameLine, grace_s: float, over: Callable[[], None]) -> None:
        """This line has ended: call `over` after the grace, unless another one connects."""
        if self._line is line:
            self._line = None
            self._silent = self._attached
            self._driver.report(NodeSilent(self.node))
            self._grace = self._loop.call_later(grace_s, over)

    def replace(self, before: "AttachedManager") -> None:
        """Replace an earlier stream, whose open orders end with the manager's first snapshot.

        Until then the node gets no new order, also if its last line has not ended yet.
        """
        self._before = before.last_attached()
        if before.connected:
            self._driver.report(NodeSilent(self.node))
        before.close()

    def last_attached(self) -> "AttachedManager | None":
        """The stream whose orders may not have arrived: this one, or the one it replaced."""
        return self if self._attached else self._before

    def unconfirmed_ends(self) -> list[EndLease]:
        """Ends of leases that were ordered here and may not have arrived."""
        inherited = [] if self._before is None else self._before.unconfirmed_ends()
        orders = self._channel.unacknowledged_orders()
        return inherited + [order for order in orders if isinstance(order, EndLease)]

    def close(self) -> None:
        self.disconnect()
        self._calling.cancel()
        if self._grace is not None:
            self._grace.cancel()

    # -- orders of the driver -------------------------------------------------------------------

    def grant(self, order: Dispatch) -> None:
        self._send_order(structs.replace(order, explanation=None))

    def _send_order(self, order: Order) -> None:
        self._send(Given(self._leader.term(), order))

    prepare = demote = end_context = demote_stored = end_lease = _send_order

    def contended(self, *, waiting: bool) -> None:
        self._waiting = waiting
        if self._line is not None:
            self._line.send(self._channel.pack_hint(Contended(waiting)))

    def beat(self) -> None:
        """Send a heartbeat; hang up on a manager that does not acknowledge or read messages."""
        if self._line is not None:
            self._line.send(self._channel.pack_hint(Beat()))
            if self._channel.overfull or self._line.unsent_bytes > MOST_UNSENT_BYTES:
                log.warning("node %s does not keep up", self.node)
                self._line.hang_up()

    def _send(self, message: Down) -> None:
        data = self._channel.pack(message)
        if self._line is not None:
            self._line.send(data)

    # -- messages of the manager ------------------------------------------------------------------

    def take(self, frame: bytes) -> None:
        """Take a message in; BadValue if the frame holds none. After the last one, hang up."""
        message = self._channel.unpack(frame)
        self.last_message_s = self._loop.time()
        if isinstance(message, Report):
            self._report(message.event)
        elif isinstance(message, Leave):
            self.left = True
            self.beat()
            self.disconnect()
        elif isinstance(message, Superseded):
            self._leader.met(message.term)
        elif message is not None and not isinstance(message, Beat):
            self._begin(message)
        if self._channel.unconfirmed >= ACKNOWLEDGED_AT_ONCE:
            self.beat()

    def _report(self, event: Event) -> None:
        if not isinstance(event, NodeSnapshot):
            self._driver.report(event)
            return
        if event.node != self.node:
            raise BadValue(f"node {self.node} reports as node {event.node[:80]}")
        if not self._attached:
            self._attached = True
            self._driver.attach(self.node, self)
        self._driver.report(amended(event, self._channel.unacknowledged_orders()))
        before, self._before = self._before, None
        for order in [] if before is None else before.unconfirmed_ends():
            self.end_lease(order)

    # -- calls of the manager -------------------------------------------------------------------

    def _begin(self, call: NodeCall) -> None:
        if call.call in self._open_calls:
            raise BadValue(f"call {call.call} is pending already")
        self._open_calls.add(call.call)
        task = self._calling.start(self._serve(call))
        task.add_done_callback(lambda _: self._open_calls.discard(call.call))

    async def _serve(self, call: NodeCall) -> None:
        try:
            answer = await self._answered(call)
        except SchedulerError as error:
            answer = Answer(call.call, refusal=refusal(error))
        self._send(answer)

    async def _answered(self, call: NodeCall) -> Answer:
        driver, number = self._driver, call.call
        if isinstance(call, Acquire):
            request = absolute(call.request, self._leader.now_s())
            return self._placed(number, await driver.acquire(request))
        if isinstance(call, Wanted):
            return self._placed(number, await driver.wanted(call.request))
        if isinstance(call, Survey):
            return Answer(number, status=self._survey())
        if isinstance(call, Locate):
            return Answer(number, addresses=self._leader.addresses(call.node))
        await self._obey(call)
        return Answer(number)

    def _placed(self, number: int, placement: Placement) -> Answer:
        """The placement, with the addresses of a node that the caller may not know."""
        away = placement.node != self.node
        addresses = self._leader.addresses(placement.node) if away else ()
        return Answer(number, placement, addresses=addresses)

    def _obey(self, call: Ask) -> Coroutine[Any, Any, None]:
        orders = {"pin": self._driver.pin, "unpin": self._driver.unpin, "evict": self._driver.evict}
        if call.do not in orders:
            raise BadValue(f"no such order: {call.do[:80]!r}")
        return orders[call.do](call.model, call.gpu)

    def _survey(self) -> Status:
        """Counts of the whole cluster, and the GPUs of this node."""
        status = self._driver.status()
        gpus = tuple(gpu for gpu in status.gpus if gpu.node == self.node)
        return replace(status, gpus=gpus)


@dataclass
class _Books:
    """One GPU's residents, empty processes and leases, as its manager's books will be."""

    context_bytes: int
    residents: dict[ModelId, int]
    contexts: dict[ModelId, int]
    loading: dict[ModelId, None]
    leases: dict[LeaseId, LiveLease] = field(default_factory=dict)


def amended(snapshot: NodeSnapshot, orders: Iterable[Order]) -> NodeSnapshot:
    """The snapshot as if the node had taken these orders before it made the snapshot.

    A manager changes its books as soon as an order arrives, and reports a lease's end only later:
    its later reports fit the amended snapshot.
    """
    books = {
        state.gpu.id: _Books(
            state.gpu.context_bytes,
            dict(state.residents),
            dict(state.contexts),
            dict.fromkeys(state.loading),
            {live.lease: live for live in state.leases},
        )
        for state in snapshot.gpus
    }
    for order in orders:
        _enter(order, books)
    gpus = tuple(
        structs.replace(
            state,
            residents=tuple(books[state.gpu.id].residents.items()),
            leases=tuple(books[state.gpu.id].leases.values()),
            contexts=tuple(books[state.gpu.id].contexts.items()),
            loading=tuple(books[state.gpu.id].loading),
        )
        for state in snapshot.gpus
    )
    return structs.replace(snapshot, gpus=gpus)


def _enter(order: Order, books: dict[GpuId, _Books]) -> None:
    if isinstance(order, EndLease | DemoteStored) or order.gpu not in books:
        return  # a lease is in force, and weights are stored, until their manager reports the end
    gpu_books = books[order.gpu]
    if isinstance(order, Demote):
        was_there = gpu_books.residents.pop(order.model, None) is not None
        gpu_books.loading.pop(order.model, None)
        if was_there and order.keeps_context:
            gpu_books.contexts[order.model] = gpu_books.context_bytes
    elif isinstance(order, EndContext):
        gpu_books.contexts.pop(order.model, None)
    elif isinstance(order, Dispatch):
        gpu_books.leases[order.lease] = LiveLease(
            order.lease,
            order.slot,
            order.models,
            order.requests,
            order.more_slots,
            order.configuration,
            order.own,
        )
    else:
        for victim in order.victims:
            gpu_books.residents.pop(victim, None)
            gpu_books.loading.pop(victim, None)
        for left in (*order.emptied, *(load.emptied for load in order.loads)):
            if left is not None:
                gpu_books.contexts.pop(left, None)
        gpu_books.residents.update((load.model, load.memory_bytes) for load in order.loads)
        gpu_books.loading.update(dict.fromkeys(load.model for load in order.loads))
        if order.prefetch:
            models = tuple(load.model for load in order.loads)
            gpu_books.leases[order.lease] = LiveLease(order.lease, order.slot, models)
