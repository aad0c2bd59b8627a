"""Schedulers and GPU managers' ends in one process, over real sockets that a test can cut."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Self

from cache_manager.model.ids import NodeId
from common.http.asgi import Receive, Scope, Send, send_text
from common.http.server_protocol import AcceptedLine, StreamHandler
from common.stream_upgrade import StreamRequest
from gpu_manager.attachment.attachment import Attachment
from gpufaas.stack.held_ports import HeldPort
from scheduler.core.core import Core
from scheduler.model.events import Event, NodeSnapshot
from scheduler.model.values import CoreSettings, StandingTerms
from scheduler.service.driver import Driver
from scheduler.service.http.app import listen, serving
from scheduler.service.streams.nodes import NodeStreams, turn_away
from scheduler.wire.node_link import NodeLink
from scheduler.wire.node_stream import StreamTimes, node_of_path
from tests.kit.cores.builders import a_core, gpu
from tests.kit.loop_clock import LoopClock
from tests.kit.nodes.fake_node import FakeNode

SECRET = b"a secret of the cluster"
LOG = logging.getLogger("tests.kit.worlds.cluster_in_process")
# Some tenths of what is used in earnest.
TIMES = StreamTimes(
    beat_s=0.1, silence_s=0.8, greeting_s=1.0, grace_s=1.0, most_retry_s=0.1, probe_s=0.1
)


class ReportingNode(FakeNode):
    """A fake node that can report its whole state to a restarted scheduler."""

    def whole_state(self) -> list[NodeSnapshot]:
        """As a real node's: of a lease that was prepared and not granted it knows nothing."""
        self.leases = {key: lease for key, lease in self.leases.items() if lease.granted}
        return [self.snapshot()]


def a_node(name: str = "n0", *, gpus: int = 1, load_s: float = 0.0) -> ReportingNode:
    """A node with these GPUs of 8 GiB, `<node>.<number>` each."""
    specs = tuple(gpu(f"{name}.{number}", node=name) for number in range(gpus))
    return ReportingNode(NodeId(name), specs, load_s)


@dataclass
class Scheduler:
    """One scheduler behind a port: the core, its driver, and the streams' end."""

    core: Core
    driver: Driver
    streams: NodeStreams
    url: str
    events: list[Event]
    fenced: list[int]
    server: AsyncExitStack

    @property
    def nodes(self) -> dict[NodeId, bool]:
        """The nodes that are attached; False if the node's stream is broken at present."""
        return {name: node.connected for name, node in self.streams.attached.items()}

    async def stop(self) -> None:
        """As a process that ends: its nodes are hung up on, and nothing is decided any more."""
        await self.streams.close()
        self.driver.close()
        await self.server.aclose()


async def a_scheduler(
    term: int = 1,
    *,
    port: int = 0,
    secret: bytes = SECRET,
    times: StreamTimes = TIMES,
    leases: int = 1 << 32,
    policy: str = "lalbo3",
) -> Scheduler:
    """A scheduler that leads in this term."""
    terms = StandingTerms(60.0, 1000)
    settings = CoreSettings(first_lease=term * leases, standing=terms)
    core = a_core(policy, gpus=(), settings=settings)
    events: list[Event] = []
    fenced: list[int] = []
    clock = LoopClock(asyncio.get_running_loop())
    driver = Driver(core, clock, LOG, lambda _, event, _actions: events.append(event))
    streams = NodeStreams(driver, lambda: term, secret, LOG, times=times, fenced=fenced.append)

    async def serve(request: StreamRequest, line: AcceptedLine) -> None:
        node = node_of_path(request.path)
        assert node is not None
        await streams.serve(line, node)

    server, url = await _serve(serve, port)
    return Scheduler(core, driver, streams, url, events, fenced, server)


@asynccontextmanager
async def a_standby(leader: str | None) -> AsyncIterator[str]:
    """The URL of a scheduler that does not lead."""

    async def serve(request: StreamRequest, line: AcceptedLine) -> None:
        del request
        await turn_away(line, leader)

    server, url = await _serve(serve, 0)
    async with server:
        yield url


async def _serve(streams: StreamHandler, port: int) -> tuple[AsyncExitStack, str]:
    listener = listen("127.0.0.1", port or HeldPort().keep())
    server = AsyncExitStack()
    await server.enter_async_context(serving(_nothing, listener, streams=streams))
    return server, f"http://127.0.0.1:{listener.getsockname()[1]}"


async def _nothing(scope: Scope, receive: Receive, send: Send) -> None:
    del receive
    await send_text(send, 404, scope["path"])


@dataclass
class Wire:
    """A TCP relay between a manager and a scheduler, which can be cut, frozen and healed."""

    url: str
    target: tuple[str, int]
    up: bool = True
    frozen: bool = False
    connections: int = 0
    bytes_up: int = 0
    _server: asyncio.Server | None = None
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)
    _thawed: asyncio.Event = field(default_factory=asyncio.Event)

    @classmethod
    @asynccontextmanager
    async def to(cls, url: str) -> AsyncIterator[Self]:
        """A wire whose own URL leads to that one."""
        host, _, port = url.removeprefix("http://").partition(":")
        wire = cls("", (host, int(port)))
        wire._thawed.set()
        wire._server = await asyncio.start_server(wire._relay, "127.0.0.1", 0)
        wire.url = f"http://127.0.0.1:{wire._server.sockets[0].getsockname()[1]}"
        try:
            yield wire
        finally:
            wire._server.close()
            wire.thaw()
            wire.cut()

    def cut(self) -> None:
        """Break every connection, in the midst of whatever it carries."""
        for writer in list(self._writers):
            writer.transport.abort()

    def down(self) -> None:
        """Cut, and let nobody through until `heal`."""
        self.up = False
        self.cut()

    def heal(self) -> None:
        """Let connections through again."""
        self.up = True

    def freeze(self) -> None:
        """Carry nothing any more, and close nothing, as a network that loses every packet."""
        self._thawed.clear()

    def thaw(self) -> None:
        """Carry on."""
        self._thawed.set()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self.up:
            writer.transport.abort()
            return
        self.connections += 1
        try:
            far_reader, far_writer = await asyncio.open_connection(*self.target)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, far_writer}
        await asyncio.gather(self._carry(reader, far_writer), self._carry(far_reader, writer))
        self._writers -= {writer, far_writer}

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(65536):
                await self._thawed.wait()
                writer.write(data)
                await writer.drain()
        writer.transport.abort()


@asynccontextmanager
async def attached(
    node: ReportingNode, *urls: str, secret: bytes = SECRET, times: StreamTimes = TIMES
) -> AsyncIterator[Attachment]:
    """A manager's end that looks for a scheduler at these URLs; at the end it leaves."""
    attachment = Attachment(urls, node.name, secret, times)
    node.reports = attachment
    attachment.attach(node.name, node)
    try:
        yield attachment
    finally:
        attachment.detach(node.name)
        await attachment.close()


def leases_of(scheduler: Scheduler) -> set[int]:
    """Every lease that the scheduler counts as in force."""
    gpus = scheduler.driver.status().gpus
    return {lease.id for found in gpus for slot in found.slots for lease in slot.leases}


def link_is_typed(node: ReportingNode) -> NodeLink:
    """A fake node is a NodeLink: mypy checks it here."""
    return node
