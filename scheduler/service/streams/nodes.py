"""The scheduler's end of the node streams: GPU managers attach, reconnect and leave."""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field, replace
from logging import DEBUG, WARNING, Logger
from typing import Any

from msgspec import structs

from cache_manager.model.ids import GpuId, ModelId, NodeId
from common.frame_line import FrameLine, LineBroken
from common.http.server_protocol import AcceptedLine
from common.tasks import BackgroundTasks
from common.telemetry.stranger_log import StrangerLog
from common.time_limits import time_limit
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
from scheduler.service.request_bounds import check_exit_rule
from scheduler.wire import node_stream as wire
from scheduler.wire.cluster_status import Status
from scheduler.wire.codec import VERSION, other_version, pack
from scheduler.wire.node_link import live_lease_of
from scheduler.wire.refusals import refusal
from scheduler.wire.request_times import absolute

log = logging.getLogger(__name__)

_TIMES = wire.StreamTimes()


class _Refused(Exception):
    """A manager is turned away; the text is sent to it."""


class NodeStreams:
    """Attaches to a driver every GPU manager that knows the cluster's secret.

    A node whose stream breaks keeps its GPUs and leases for a grace, and is detached after it.
    `fenced` is called when a manager has met a higher term than this scheduler's, which then no
    longer leads. Close the streams before the driver, else managers receive the cancellation of
    their requests.
    """

    def __init__(
        self,
        driver: Driver,
        term: Callable[[], int],
        secret: bytes,
        log: Logger,
        *,
        times: wire.StreamTimes = _TIMES,
        fenced: Callable[[int], None] | None = None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.driver = driver
        self.term = term
        self.now_s = now_s
        self._key = wire.stream_key(secret)
        self._log = log
        self._strangers = StrangerLog(log)
        self._times = times
        self._fenced = fenced
        self._run = secrets.token_hex(16)
        # The nodes that have a stream, or had one lately.
        self.attached: dict[NodeId, AttachedManager] = {}
        # Where each node's GPU manager listens for functions, by its own report.
        self.addresses: dict[NodeId, tuple[str, ...]] = {}
        self._closed = False

    async def serve(self, line: AcceptedLine, name: NodeId) -> None:
        hello = None
        try:
            async with time_limit(self._times.greeting_s):
                hello = await self._greet(line, name)
            line.confirm()
            line.max_frame_bytes = wire.MAX_MESSAGE_BYTES
            await self._serve_stream(line, self._resume_or_begin(name, hello, line))
        except _Refused as error:
            self._strangers.warn("turned node %s away: %s", name, error)
            line.send(pack(wire.TurnedAway(str(error))))
            await line.flush()
        except (LineBroken, BadValue) as error:
            level = DEBUG if hello is None else WARNING  # managers probe for the leader
            self._log.log(level, "the stream of node %s: %s", name, error)
        except TimeoutError:
            warn = self._strangers.warn if hello is None else self._log.warning
            warn("node %s was silent for too long", name)
            line.abort()  # a silent end would not close its own

    async def close(self) -> None:
        """Hang up on every manager; managers keep their state and look for the next leader."""
        self._closed = True
        for node in self.attached.values():
            node.close()
        self.attached.clear()

    # -- the greeting ---------------------------------------------------------------------------

    async def _greet(self, line: AcceptedLine, name: NodeId) -> wire.Hello:
        nonce = secrets.token_hex(16)
        challenge = wire.Challenge(VERSION, nonce, self.term(), self._run)
        line.send(pack(wire.proven(challenge, self._key, name)))
        hello = wire.read_greeting(await line.receive())
        if not isinstance(hello, wire.Hello):
            raise BadValue("it sent no Hello")
        if hello.version != VERSION:
            raise _Refused(other_version(hello.version, "this GPU manager", "the scheduler"))
        if hello.node != name or not wire.is_proven(hello, self._key, nonce):
            raise _Refused("it does not know the cluster's secret")
        self.note_term(hello.term)
        if hello.term > self.term() or self._closed:
            raise _Refused(f"this scheduler no longer leads: term {hello.term} has begun")
        return hello

    def note_term(self, term: int) -> None:
        """A manager has met a leader of this term, earlier or elsewhere."""
        if term > self.term() and self._fenced is not None:
            self._fenced(term)

    def _resume_or_begin(
        self, name: NodeId, hello: wire.Hello, line: AcceptedLine
    ) -> "AttachedManager":
        earlier = self.attached.get(name)
        if earlier is not None and earlier.connected and earlier.run != hello.run:
            raise _Refused("another manager is attached under this name")
        self.addresses[name] = hello.addresses
        unsent = None
        if earlier is not None and earlier.run == hello.run and hello.resume is not None:
            unsent = earlier.unsent(hello.resume) if hello.resume.run == self._run else None
        if earlier is None or unsent is None:
            node = AttachedManager(name, hello.run, self)
            if earlier is not None:
                node.replace(earlier)
            self.attached[name] = node
            welcome = wire.Welcome(resumed=False)
        else:
            node, welcome = earlier, wire.Welcome(resumed=True, seen=earlier.seen)
        line.send(pack(wire.proven(welcome, self._key, name, hello.nonce)))
        node.connect(line, unsent or [])
        self._log.info(
            "the stream of node %s %s", name, "resumes" if unsent is not None else "begins"
        )
        return node

    # -- the stream -----------------------------------------------------------------------------

    async def _serve_stream(self, line: AcceptedLine, node: "AttachedManager") -> None:
        loop = asyncio.get_running_loop()
        beats: asyncio.Task[None] | None = None
        try:
            async with time_limit(self._times.silence_s) as patience:
                beats = loop.create_task(_beat(node, self._times, patience))
                await line.pump(node.take)
        except LineBroken:
            if not node.left:
                raise
            self._log.info("node %s leaves", node.node)
        except BadValue:
            self._give_up(node)  # a resumed stream would repeat the bad message
            raise
        finally:
            if beats is not None:
                beats.cancel()
            self._stream_ended(line, node)

    def _stream_ended(self, line: AcceptedLine, node: "AttachedManager") -> None:
        if self.attached.get(node.node) is not node:
            return
        if node.left:
            self._give_up(node)
        else:
            node.line_ended(line, self._times.grace_s, lambda: self._give_up(node))

    def _give_up(self, node: "AttachedManager") -> None:
        if self.attached.get(node.node) is node:
            del self.attached[node.node]
            self.addresses.pop(node.node, None)
            node.close()
            self.driver.detach(node.node)


async def turn_away(line: AcceptedLine, leader: str | None) -> None:
    line.send(pack(wire.TurnedAway("it does not lead", leader)))
    await line.flush()


async def _beat(
    node: "AttachedManager", times: wire.StreamTimes, patience: asyncio.Timeout
) -> None:
    """Send heartbeats, and extend the deadline from the last message of the other end."""
    while True:
        await asyncio.sleep(times.beat_s)
        patience.reschedule(node.last_message_s + times.silence_s)
        node.beat()


NodeCall = wire.Acquire | wire.Wanted | wire.Ask | wire.Survey | wire.Locate


class AttachedManager:
    """A NodeLink that outlives its line; `run` identifies the manager process.

    Messages are kept while there is no line, and sent over the next one.
    """

    def __init__(self, node: NodeId, run: str, streams: NodeStreams) -> None:
        self.node = node
        self.run = run
        self.left = False
        self.last_message_s = 0.0
        self._loop = asyncio.get_running_loop()
        self._streams = streams
        self._driver = streams.driver
        self._channel = wire.DownChannel()
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

    def unsent(self, resume: wire.Resume) -> list[bytes] | None:
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
        self._send(wire.Given(self._streams.term(), order))

    prepare = demote = end_context = demote_stored = end_lease = _send_order

    def contended(self, *, waiting: bool) -> None:
        self._waiting = waiting
        if self._line is not None:
            self._line.send(self._channel.pack_hint(wire.Contended(waiting)))

    def beat(self) -> None:
        """Send a heartbeat; hang up on a manager that does not acknowledge or read messages."""
        if self._line is not None:
            self._line.send(self._channel.pack_hint(wire.Beat()))
            if self._channel.overfull or self._line.unsent_bytes > wire.MOST_UNSENT_BYTES:
                log.warning("node %s does not keep up", self.node)
                self._line.hang_up()

    def _send(self, message: wire.Down) -> None:
        data = self._channel.pack(message)
        if self._line is not None:
            self._line.send(data)

    # -- messages of the manager ------------------------------------------------------------------

    def take(self, frame: bytes) -> None:
        """Take a message in; BadValue if the frame holds none. After the last one, hang up."""
        message = self._channel.unpack(frame)
        self.last_message_s = self._loop.time()
        if isinstance(message, wire.Report):
            self._report(message.event)
        elif isinstance(message, wire.Leave):
            self.left = True
            self.beat()
            self.disconnect()
        elif isinstance(message, wire.Superseded):
            self._streams.note_term(message.term)
        elif message is not None and not isinstance(message, wire.Beat):
            self._begin(message)
        if self._channel.unconfirmed >= wire.ACKNOWLEDGED_AT_ONCE:
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
            answer = wire.Answer(call.call, refusal=refusal(error))
        self._send(answer)

    async def _answered(self, call: NodeCall) -> wire.Answer:
        driver, number = self._driver, call.call
        if isinstance(call, wire.Acquire):
            request = absolute(check_exit_rule(call.request), self._streams.now_s())
            return self._placed(number, await driver.acquire(request))
        if isinstance(call, wire.Wanted):
            return self._placed(number, await driver.wanted(call.request))
        if isinstance(call, wire.Survey):
            return wire.Answer(number, status=self._survey())
        if isinstance(call, wire.Locate):
            return wire.Answer(number, addresses=self._streams.addresses.get(call.node, ()))
        await self._obey(call)
        return wire.Answer(number)

    def _placed(self, number: int, placement: Placement) -> wire.Answer:
        """The placement, with the addresses of a node that the caller may not know."""
        away = placement.node != self.node
        addresses = self._streams.addresses.get(placement.node, ()) if away else ()
        return wire.Answer(number, placement, addresses=addresses)

    def _obey(self, call: wire.Ask) -> Coroutine[Any, Any, None]:
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
        gpu_books.leases[order.lease] = live_lease_of(order)
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
