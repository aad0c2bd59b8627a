"""The invocation path on a real HTTP server, with functions and leases that a test controls."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from cache_manager.model.ids import GpuId, NodeId
from common.http import asgi
from common.http.asgi import Receive, Scope, Send
from common.http.client import HttpClient
from common.http.server import listen, serving
from common.telemetry.traces import TraceContext
from gateway_ext.calls.exchange import InvokeSettings
from gateway_ext.calls.function_table import Function, Functions
from gateway_ext.calls.invoke import Invoke
from gateway_ext.calls.lease_pool import LeasePool
from gateway_ext.metrics import GatewayMeters
from gateway_ext.model import DEFAULT_NAMESPACE, NO_TROUBLES, Deployment, FunctionId, Troubles
from scheduler.api import (
    Estimate,
    LeaseId,
    LeaseUsed,
    OwnerTerms,
    Placement,
    Request,
    RequestId,
    SchedulerError,
    SlotId,
    StandingTerms,
)
from scheduler.client.lease_client import LeaseClient
from scheduler.wire.caller_stream import Granted
from tests.kit.fakes.fake_function import FakeFunction


def a_deployment(
    exec_timeout: str = "", *, namespace: str = DEFAULT_NAMESPACE, **options: str
) -> Deployment:
    """The function `echo`; keyword arguments are annotations of ours: `concurrency="2"`."""
    return Deployment(
        FunctionId(namespace, "echo"),
        "image",
        environment={"exec_timeout": exec_timeout},
        annotations={f"com.gpufaas.{name}": value for name, value in options.items()},
    )


@dataclass
class Said:
    """One answer as it came over the wire."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes

    def header(self, name: str) -> str | None:
        values = [value for key, value in self.headers if key == name]
        return ",".join(values) if values else None


@dataclass
class Gateway:
    """The invocation path, and what is behind it."""

    functions: Functions
    client: HttpClient
    invoke: Invoke
    meters: GatewayMeters
    leases: "FakeLeases"
    port: int = 0
    woken: list[Function] = field(default_factory=list)
    writers: list[asyncio.StreamWriter] = field(default_factory=list)

    def deploy(
        self,
        deployment: Deployment,
        *instances: FakeFunction,
        wanted: int = 1,
        troubles: Troubles = NO_TROUBLES,
    ) -> Function:
        """Say that the function is deployed so, and answers there."""
        endpoints = [one.endpoint for one in instances]
        self.functions.function_is(deployment, endpoints, wanted=wanted, troubles=troubles)
        function = self.functions.by_id(deployment.id)
        assert function is not None
        return function

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.writers.append(writer)
        return reader, writer

    async def call(
        self,
        path: str = "/function/echo",
        body: bytes = b"",
        *,
        method: str = "POST",
        headers: Sequence[str] = (),
        raw_body: bytes | None = None,
    ) -> Said:
        """Ask over a connection of its own; `raw_body` is sent without a length of ours."""
        reader, writer = await self.connect()
        length = [] if raw_body is not None else [f"content-length: {len(body)}"]
        lines = [f"{method} {path} HTTP/1.1", "host: gw", *headers, *length, "", ""]
        writer.write("\r\n".join(lines).encode() + (raw_body or body))
        return await answer_of(reader, method)


async def head_of(reader: asyncio.StreamReader) -> Said:
    """Status and headers of an answer."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    lines = [line.partition(": ") for line in head[1:] if line]
    return Said(int(head[0].split(" ")[1]), [(key.lower(), value) for key, _, value in lines], b"")


async def answer_of(reader: asyncio.StreamReader, method: str = "POST") -> Said:
    """A whole answer; IncompleteReadError where it is cut off."""
    said = await head_of(reader)
    if method == "HEAD" or said.status in {204, 304}:
        return said
    if said.header("transfer-encoding") == "chunked":
        while piece := await chunk_of(reader):
            said.body += piece
    else:
        said.body = await reader.readexactly(int(said.header("content-length") or 0))
    return said


async def chunk_of(reader: asyncio.StreamReader) -> bytes:
    """One chunk, empty at the end."""
    length = int(await reader.readuntil(b"\r\n"), 16)
    return (await reader.readexactly(length + 2))[:-2]


@contextlib.asynccontextmanager
async def a_gateway(source: LeaseClient | None = None, **settings: Any) -> AsyncIterator[Gateway]:
    """An invocation path that serves HTTP, without functions; `source` replaces the fake leases."""
    bounds = InvokeSettings(**settings)
    functions, leases = Functions(), FakeLeases()
    meters = GatewayMeters(functions.loads)
    client = HttpClient(bounds.client)
    woken: list[Function] = []
    pool = LeasePool(source or leases, meters)
    invoke = Invoke(functions, client, pool, bounds, meters, wake=woken.append)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"].startswith("/function/"):
            await invoke(scope, receive, send)
        else:
            await asgi.send_text(send, 404, "not here")

    gateway = Gateway(functions, client, invoke, meters, leases, woken=woken)
    listener = listen("127.0.0.1", 0)
    gateway.port = listener.getsockname()[1]
    async with serving(app, listener, 1.0):
        try:
            yield gateway
        finally:
            for writer in gateway.writers:
                writer.close()
                with contextlib.suppress(ConnectionError):
                    await writer.wait_closed()
            await invoke.close()


class FakeLeases(LeaseClient):
    """Gives every request a lease at once, unless set to wait or to fail."""

    def __init__(self) -> None:
        self.recalled: Callable[[LeaseId], None] = lambda _: None
        self.reports: list[LeaseUsed] = []
        self.told: list[tuple[str, OwnerTerms | None]] = []
        self.terms: StandingTerms | None = None
        self.asked: list[Request] = []
        self.traces: list[TraceContext | None] = []
        self.released: list[LeaseId] = []
        self.cancelled: list[RequestId] = []
        self.errors: list[SchedulerError] = []
        self.open = asyncio.Event()
        self.open.set()
        self._numbers = itertools.count(1)
        self.granted: Callable[[], None] = lambda: None  # called after each answer
        self._answers: list[tuple[RequestId, asyncio.Task[None]]] = []

    def let_stand(self, recalled: Callable[[LeaseId], None]) -> None:
        self.recalled = recalled

    def ask(
        self,
        request: Request,
        trace: TraceContext | None,
        answered: Callable[[Granted | SchedulerError], None],
    ) -> int:
        self.asked.append(request)
        self.traces.append(trace)
        answer = asyncio.create_task(self._answer(request, answered))
        self._answers.append((request.id, answer))
        return len(self._answers) - 1

    def withdraw(self, question: int) -> None:
        request, answer = self._answers[question]
        self.cancelled.append(request)
        answer.cancel()

    async def _answer(
        self, request: Request, answered: Callable[[Granted | SchedulerError], None]
    ) -> None:
        await self.open.wait()
        answered(self.errors.pop(0) if self.errors else self._granted(request))
        self.granted()

    def _granted(self, request: Request) -> Granted:
        lease = LeaseId(next(self._numbers))
        placement = Placement(
            lease=lease,
            gpu=GpuId("g0"),
            node=NodeId("n0"),
            slot=SlotId("g0"),
            models=request.models,
            hit=True,
            estimate=Estimate(0.0, 0.0),
            stands=self.terms,
        )
        return Granted(1, placement, 1, ("unix:/run/n0", "tcp:n0:1"), f"token{lease}")

    def report(self, reports: Sequence[LeaseUsed]) -> None:
        self.reports += reports

    def tell_terms(self, function: str, terms: OwnerTerms | None) -> None:
        self.told.append((function, terms))

    def release(self, lease: LeaseId, request: RequestId | None = None) -> None:
        del request
        self.released.append(lease)
