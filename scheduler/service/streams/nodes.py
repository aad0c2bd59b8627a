"""The scheduler's end of the node streams: GPU managers attach, reconnect and leave."""

import asyncio
import secrets
import time
from collections.abc import Callable
from logging import DEBUG, WARNING, Logger

from cache_manager.model.ids import NodeId
from common.frame_line import LineBroken
from common.http.server_protocol import AcceptedLine
from common.telemetry.stranger_log import StrangerLog
from common.time_limits import time_limit
from scheduler.model.errors import BadValue
from scheduler.service.driver import Driver
from scheduler.service.streams.attached_manager import AttachedManager, Leader
from scheduler.wire.codec import VERSION, other_version, pack
from scheduler.wire.node_stream import (
    MAX_MESSAGE_BYTES,
    Challenge,
    Hello,
    StreamTimes,
    TurnedAway,
    Welcome,
    is_proven,
    proven,
    read_greeting,
    stream_key,
)

_TIMES = StreamTimes()


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
        times: StreamTimes = _TIMES,
        fenced: Callable[[int], None] | None = None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._driver = driver
        self._term = term
        self._key = stream_key(secret)
        self._log = log
        self._strangers = StrangerLog(log)
        self._times = times
        self._fenced = fenced
        self._leader = Leader(driver, term, now_s, self._note_term, self.addresses)
        self._run = secrets.token_hex(16)
        # The nodes that have a stream, or had one lately.
        self.attached: dict[NodeId, AttachedManager] = {}
        self._addresses: dict[NodeId, tuple[str, ...]] = {}
        self._closed = False

    def addresses(self, node: NodeId) -> tuple[str, ...]:
        """Where a node's GPU manager listens for functions, by its own report."""
        return self._addresses.get(node, ())

    def listens_at(self, node: NodeId, addresses: tuple[str, ...]) -> None:
        self._addresses[node] = addresses

    async def serve(self, line: AcceptedLine, name: NodeId) -> None:
        hello = None
        try:
            async with time_limit(self._times.greeting_s):
                hello = await self._greet(line, name)
            line.confirm()
            line.max_frame_bytes = MAX_MESSAGE_BYTES
            await self._serve_stream(line, self._resume_or_begin(name, hello, line))
        except _Refused as error:
            self._strangers.warn("turned node %s away: %s", name, error)
            line.send(pack(TurnedAway(str(error))))
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

    async def _greet(self, line: AcceptedLine, name: NodeId) -> Hello:
        nonce = secrets.token_hex(16)
        challenge = Challenge(VERSION, nonce, self._term(), self._run)
        line.send(pack(proven(challenge, self._key, name)))
        hello = read_greeting(await line.receive())
        if not isinstance(hello, Hello):
            raise BadValue("it sent no Hello")
        if hello.version != VERSION:
            raise _Refused(other_version(hello.version, "this GPU manager", "the scheduler"))
        if hello.node != name or not is_proven(hello, self._key, nonce):
            raise _Refused("it does not know the cluster's secret")
        self._note_term(hello.term)
        if hello.term > self._term() or self._closed:
            raise _Refused(f"this scheduler no longer leads: term {hello.term} has begun")
        return hello

    def _note_term(self, term: int) -> None:
        """A manager has met a leader of this term, earlier or elsewhere."""
        if term > self._term() and self._fenced is not None:
            self._fenced(term)

    def _resume_or_begin(self, name: NodeId, hello: Hello, line: AcceptedLine) -> AttachedManager:
        earlier = self.attached.get(name)
        if earlier is not None and earlier.connected and earlier.run != hello.run:
            raise _Refused("another manager is attached under this name")
        self.listens_at(name, hello.addresses)
        unsent = None
        if earlier is not None and earlier.run == hello.run and hello.resume is not None:
            unsent = earlier.unsent(hello.resume) if hello.resume.run == self._run else None
        if earlier is None or unsent is None:
            node = AttachedManager(name, hello.run, self._leader)
            if earlier is not None:
                node.replace(earlier)
            self.attached[name] = node
            welcome = Welcome(resumed=False)
        else:
            node, welcome = earlier, Welcome(resumed=True, seen=earlier.seen)
        line.send(pack(proven(welcome, self._key, name, hello.nonce)))
        node.connect(line, unsent or [])
        self._log.info(
            "the stream of node %s %s", name, "resumes" if unsent is not None else "begins"
        )
        return node

    # -- the stream -----------------------------------------------------------------------------

    async def _serve_stream(self, line: AcceptedLine, node: AttachedManager) -> None:
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

    def _stream_ended(self, line: AcceptedLine, node: AttachedManager) -> None:
        if self.attached.get(node.node) is not node:
            return
        if node.left:
            self._give_up(node)
        else:
            node.line_ended(line, self._times.grace_s, lambda: self._give_up(node))

    def _give_up(self, node: AttachedManager) -> None:
        if self.attached.get(node.node) is node:
            del self.attached[node.node]
            self._addresses.pop(node.node, None)
            node.close()
            self._driver.detach(node.node)


async def turn_away(line: AcceptedLine, leader: str | None) -> None:
    line.send(pack(TurnedAway("it does not lead", leader)))
    await line.flush()


async def _beat(node: AttachedManager, times: StreamTimes, patience: asyncio.Timeout) -> None:
    """Send heartbeats, and extend the deadline from the last message of the other end."""
    while True:
        await asyncio.sleep(times.beat_s)
        patience.reschedule(node.last_message_s + times.silence_s)
        node.beat()
