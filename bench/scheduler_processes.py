"""The processes of the scheduler's bench: servers of several kinds, and clients of a few lines."""

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import uvloop

from bench.scheduler_node import InstantNode
from gpu_manager.attachment import Attachment
from scheduler.service.access import Role, token
from scheduler.service.app import Asgi
from scheduler.service.hot import Receive, Scope, Send
from scheduler.service.service import Service
from scheduler.service.serving import listen, serving
from scheduler.service.settings import Serving, Settings

GPUS = 8
MODELS = 8
_SECRET = b"the secret of the scheduler's bench"
_STREAM_NODE_S = 5.0


class Kind(StrEnum):
    """What answers the clients."""

    BARE = "uvicorn that only answers"
    OURS = "the scheduler"
    PLAIN = "the scheduler, decisions without candidates"
    STREAM = "the scheduler, its node on a stream"


@dataclass(frozen=True, slots=True)
class Load:
    """So many clients, each of which acquires and releases for so many seconds."""

    clients: int
    seconds: float


@dataclass(slots=True)
class Measured:
    """Pairs of acquire and release, and the seconds that each acquire took."""

    pairs: int = 0
    elapsed_s: float = 0.0
    server_s: float = 0.0
    acquires_s: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Pairs a second."""
        return self.pairs / self.elapsed_s

    @property
    def cpu_s(self) -> float:
        """The server's processor time for each pair."""
        return self.server_s / self.pairs


class Child:
    """A process that does what it is told through a pipe."""

    def __init__(self, process: BaseProcess, pipe: Connection) -> None:
        self._process = process
        self._pipe = pipe

    def ask(self, order: object) -> object:
        """One order and its answer."""
        self._pipe.send(order)
        return self._pipe.recv()


class Server(Child):
    """Answers at a port; its processor time so far is its answer to anything."""

    port: int

    def cpu_s(self) -> float:
        """Seconds of processor time that it has taken."""
        seconds = self.ask("cpu")
        assert isinstance(seconds, float)
        return seconds


class Clients(Child):
    """Measures a load."""

    def measure(self, server: Server, load: Load) -> Measured:
        """What the clients saw, and what it cost the server."""
        before_s = server.cpu_s()
        measured = self.ask((server.port, load))
        assert isinstance(measured, Measured)
        measured.server_s = server.cpu_s() - before_s
        return measured


@contextmanager
def server(kind: Kind) -> Iterator[Server]:
    """A server process for as long as the context lasts."""
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(kind, theirs))
    process.start()
    found = Server(process, ours)
    found.port = ours.recv()
    node = context.Process(target=_stream_node, args=(found.port,))
    try:
        if kind is Kind.STREAM:
            node.start()
            time.sleep(_STREAM_NODE_S)
        yield found
    finally:
        if kind is Kind.STREAM:
            node.terminate()
            node.join()
        ours.close()
        process.join()


@contextmanager
def clients() -> Iterator[Clients]:
    """A process of clients for as long as the context lasts."""
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_be_clients, args=(theirs,))
    process.start()
    try:
        yield Clients(process, ours)
    finally:
        ours.close()
        process.join()


# -- servers ------------------------------------------------------------------------------------


def _serve(kind: Kind, pipe: Connection) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_answer(kind, pipe))


async def _answer(kind: Kind, pipe: Connection) -> None:
    """Until the other end of the pipe is closed."""
    async with AsyncExitStack() as stack:
        listener = listen("127.0.0.1", 0)
        port = listener.getsockname()[1]
        app: Asgi = _bare
        if kind is not Kind.BARE:
            slots = 0 if kind is Kind.PLAIN else GPUS
            settings = Settings(scheduler=Serving(explain_slots=slots))
            service = Service(settings, _SECRET, "bench", f"http://127.0.0.1:{port}")
            office = await stack.enter_async_context(service.lead(1))
            app = service.app
            if kind is not Kind.STREAM:
                node = InstantNode("node", GPUS)
                node.reports = office.driver
                office.driver.attach(node.name, node)
                for event in node.truth():
                    office.driver.report(event)
        await stack.enter_async_context(serving(app, listener))
        pipe.send(port)
        ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(pipe.fileno(), _reply, pipe, ended)
        await ended.wait()


def _reply(pipe: Connection, ended: asyncio.Event) -> None:
    try:
        pipe.recv()
        pipe.send(time.process_time())
    except EOFError:
        asyncio.get_running_loop().remove_reader(pipe.fileno())
        ended.set()


_LEASE = json.dumps({"lease": 1, "filled": "x" * 380}).encode()
_HEADERS = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(_LEASE))]


async def _bare(scope: Scope, receive: Receive, send: Send) -> None:
    """As many bytes as ours, and no thought behind them."""
    await receive()
    if scope["path"] == "/acquire":
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        await send({"type": "http.response.body", "body": _LEASE})
    else:
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})


def _stream_node(port: int) -> None:
    """A GPU manager's end, in a process of its own; until it is terminated."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_attach(port))


async def _attach(port: int) -> None:
    node = InstantNode("node", GPUS)
    attachment = Attachment([f"http://127.0.0.1:{port}"], node.name, _SECRET)
    node.reports = attachment
    attachment.attach(node.name, node)
    await asyncio.Event().wait()


# -- clients ------------------------------------------------------------------------------------


def _be_clients(pipe: Connection) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        while True:
            try:
                port, load = pipe.recv()
            except EOFError:
                return
            pipe.send(runner.run(_measure(port, load)))


async def _measure(port: int, load: Load) -> Measured:
    measured = Measured()
    began_s = time.perf_counter()
    until_s = began_s + load.seconds
    await asyncio.gather(
        *(_client(port, number, until_s, measured) for number in range(load.clients))
    )
    measured.elapsed_s = time.perf_counter() - began_s
    return measured


async def _client(port: int, number: int, until_s: float, measured: Measured) -> None:
    """Writes HTTP itself: a client library would cost more than what is measured."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    bearer = token(_SECRET, Role.CALLER).encode()

    async def post(path: bytes, body: bytes) -> bytes:
        head = b"POST %s HTTP/1.1\r\nhost: bench\r\nauthorization: Bearer %s\r\n"
        length = b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
        writer.write(head % (path, bearer) + length + body)
        answer = (await reader.readuntil(b"\r\n\r\n")).lower()
        if answer.startswith(b"http/1.1 204"):
            return b""
        assert answer.startswith(b"http/1.1 200"), answer
        _, _, rest = answer.partition(b"content-length: ")
        return await reader.readexactly(int(rest[: rest.index(b"\r")]))

    asked = 0
    while (now_s := time.perf_counter()) < until_s:
        asked += 1
        model = (number + asked) % MODELS
        request = b'{"request":"c%d-%d","function":"bench/f","models":["m%d"]}'
        answer = await post(b"/acquire", request % (number, asked, model))
        measured.acquires_s.append(time.perf_counter() - now_s)
        await post(b"/release", b'{"lease":%d}' % json.loads(answer)["lease"])
        measured.pairs += 1
    writer.close()
