"""The processes of the gateway's bench: functions that do nothing, schedulers, gateways, load."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import cast

import httptools
import uvloop

from bench.scheduler_node import InstantNode
from gateway_ext.asgi import App, Receive, Scope, Send, answer
from gateway_ext.invoke import Invoke
from gateway_ext.leasing import Leasing
from gateway_ext.limits import InvokeSettings
from gateway_ext.meters import Meters
from gateway_ext.model import DEFAULT_NAMESPACE, Deployment, Endpoint, FunctionId
from gateway_ext.posting import Posting
from gateway_ext.serving import listen, serving
from gateway_ext.table import Functions
from gateway_ext.upstream_http import Client
from scheduler.client import SchedulerClient
from scheduler.service.access import Role, token
from scheduler.service.service import Service
from scheduler.service.settings import Settings

GPUS = 8
_SECRET = b"the secret of the gateway's bench"
_MODELS = 16
_DRAIN_S = 1.0
_REQUEST = b"POST %s HTTP/1.1\r\nhost: bench\r\ncontent-length: 2\r\n\r\nhi"


class Kind(StrEnum):
    """What answers the load."""

    BARE = "uvicorn that only answers"
    FUNCTION = "the function itself"
    PLAIN = "the gateway, a plain function"
    GPU = "the gateway, a GPU function"


@dataclass(frozen=True, slots=True)
class Load:
    """So many clients, each of which calls again as soon as it is answered."""

    clients: int
    seconds: float


@dataclass(slots=True)
class Measured:
    """What the clients saw, and the processor time that each process took for it."""

    calls_s: list[float] = field(default_factory=list)
    failed: int = 0
    elapsed_s: float = 0.0
    cpu_s: dict[str, float] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        """Calls a second."""
        return len(self.calls_s) / self.elapsed_s


class Process:
    """A process that serves; its processor time so far is its answer to anything."""

    def __init__(self, process: BaseProcess, pipe: Connection) -> None:
        self.process = process
        self.pipe = pipe
        self.port = int(pipe.recv())

    def cpu_s(self) -> float:
        """Seconds of processor time that it has taken."""
        self.pipe.send("cpu")
        return float(self.pipe.recv())


@contextmanager
def running(serve: Callable[..., None], *args: object) -> Iterator[Process]:
    """A process for as long as the context lasts."""
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, *args))
    process.start()
    theirs.close()
    try:
        yield Process(process, ours)
    finally:
        ours.close()
        process.join()


def be_function(pipe: Connection, path: str) -> None:
    """The cheapest instance that there can be, at a Unix socket."""

    async def begin(stack: AsyncExitStack) -> int:
        loop = asyncio.get_running_loop()
        server = await loop.create_unix_server(_Nothing, path, backlog=512)
        stack.callback(Path(path).unlink, missing_ok=True)
        stack.callback(server.close)
        return 0

    _be(pipe, begin)


def be_scheduler(pipe: Connection) -> None:
    """A scheduler that leads, with emulated GPUs that are ready at once."""

    async def begin(stack: AsyncExitStack) -> int:
        listener = listen("127.0.0.1", 0)
        port = int(listener.getsockname()[1])
        service = Service(Settings(), _SECRET, "bench", f"http://127.0.0.1:{port}")
        office = await stack.enter_async_context(service.lead(1))
        node = InstantNode("node", GPUS)
        node.reports = office.driver
        office.driver.attach(node.name, node)
        for event in node.truth():
            office.driver.report(event)
        await stack.enter_async_context(serving(service.app, listener, _DRAIN_S))
        return port

    _be(pipe, begin)


def be_gateway(pipe: Connection, kind: Kind, path: str, scheduler_port: int) -> None:
    """The invocation path under uvicorn, as the gateway runs it."""

    async def begin(stack: AsyncExitStack) -> int:
        listener = listen("127.0.0.1", 0)
        app = _bare if kind is Kind.BARE else await _invoke(stack, kind, path, scheduler_port)
        await stack.enter_async_context(serving(app, listener, _DRAIN_S))
        return int(listener.getsockname()[1])

    _be(pipe, begin)


async def _invoke(stack: AsyncExitStack, kind: Kind, path: str, scheduler_port: int) -> App:
    settings, functions, meters = InvokeSettings(), Functions(), Meters()
    leasing = None
    if kind is Kind.GPU:
        url = f"http://127.0.0.1:{scheduler_port}"
        posting = Posting()
        stack.callback(posting.close)
        client = SchedulerClient([url], token(_SECRET, Role.CALLER), post=posting)
        leasing = Leasing(await stack.enter_async_context(client), meters)
    for number in range(_MODELS):
        deployment = Deployment(
            FunctionId(DEFAULT_NAMESPACE, f"f{number}"),
            "bench",
            annotations={
                "com.gpufaas.enabled": str(kind is Kind.GPU),
                "com.gpufaas.model": f"{number:064x}"[::-1],
            },
        )
        functions.function_is(deployment, [Endpoint(f"i{number}", f"unix:{path}")], wanted=1)
    invoke = Invoke(functions, Client(settings), leasing, settings, meters)
    stack.push_async_callback(invoke.close)
    return invoke


async def _bare(scope: Scope, receive: Receive, send: Send) -> None:
    assert scope["type"] == "http"
    await receive()
    await answer(send, 200, b"hello")


def _be(pipe: Connection, begin: Callable[[AsyncExitStack], Awaitable[int]]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_until_closed(pipe, begin))


async def _until_closed(
    pipe: Connection, begin: Callable[[AsyncExitStack], Awaitable[int]]
) -> None:
    """Serve until the other end of the pipe is closed."""
    async with AsyncExitStack() as stack:
        pipe.send(await begin(stack))
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


class _Nothing(asyncio.Protocol):
    """Answers whatever ends with the body that all clients of this bench send."""

    _ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 5\r\n\r\nhello"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._came = b""

    def data_received(self, data: bytes) -> None:
        self._came += data
        if self._came.endswith(b"\r\n\r\nhi"):
            self._came = b""
            self._transport.write(self._ANSWER)


# -- load ---------------------------------------------------------------------------------------


def measure(load: Load, where: str, *processes: Process) -> Measured:
    """Put a load on `unix:/path` or `tcp:port`; processor times in the order of the processes."""
    before_s = [process.cpu_s() for process in processes]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        measured = runner.run(_measure(load, where))
    for number, process in enumerate(processes):
        measured.cpu_s[str(number)] = process.cpu_s() - before_s[number]
    return measured


async def _measure(load: Load, where: str) -> Measured:
    loop = asyncio.get_running_loop()
    measured = Measured()
    kind, _, at = where.partition(":")
    callers = [_Caller(number, measured, loop.create_future()) for number in range(load.clients)]
    for caller in callers:
        factory = partial(_same, caller)
        if kind == "unix":
            await loop.create_unix_connection(factory, at)
        else:
            await loop.create_connection(factory, "127.0.0.1", int(at))
    began_s = time.perf_counter()
    for caller in callers:
        caller.begin(began_s + load.seconds)
    await asyncio.gather(*(caller.over for caller in callers))
    measured.elapsed_s = time.perf_counter() - began_s
    return measured


def _same(caller: "_Caller") -> "_Caller":
    return caller


class _Caller(asyncio.Protocol):
    """One client in a closed loop."""

    def __init__(self, number: int, measured: Measured, over: asyncio.Future[None]) -> None:
        self._calls = number
        self._measured = measured
        self.over = over
        self._parser = httptools.HttpResponseParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def begin(self, until_s: float) -> None:
        """Call again and again until then."""
        self._until_s = until_s
        self._call()

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.over.done():
            self.over.set_exception(error or ConnectionError("the server closed a connection"))

    def on_message_complete(self) -> None:
        now_s = time.perf_counter()
        self._measured.calls_s.append(now_s - self._asked_s)
        if self._parser.get_status_code() != 200:  # noqa: PLR2004
            self._measured.failed += 1
        if now_s < self._until_s:
            self._call()
        else:
            self.over.set_result(None)
            self._transport.close()

    def _call(self) -> None:
        self._calls += 1
        self._asked_s = time.perf_counter()
        self._transport.write(_REQUEST % (b"/function/f%d" % (self._calls % _MODELS)))
