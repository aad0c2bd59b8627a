"""HTTP as our own servers, our client and the functions' runtime read it, and headers of calls."""

import asyncio
import atexit
import base64
import functools
import json
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from uvicorn import Config
from uvicorn.server import ServerState

from common.errors import NoResponse
from common.http.asgi import App, BodyOverBound, Header, Receive, Scope, Send, read_body, send_text
from common.http.client import ClientSettings, HttpClient, HttpConnection
from common.http.server_protocol import ConnectionTable, Limits, ServerProtocol
from common.telemetry.traces import TraceContext, trace_of
from gateway_ext.calls import learned, passed_headers
from gateway_ext.calls.learned import GpuReport
from gateway_ext.errors import BadRequest, Unsupported
from gateway_ext.runtime import batches
from gateway_ext.runtime.connection import BodyParser, Malformed, head_in
from gateway_ext.runtime.handler_values import HandlerEvent
from gateway_ext.tracing import tracer
from hunt.parsers.in_memory_transport import InMemoryTransport
from hunt.parsers.parser_target import InputForm, Target
from torch_shim.leases.request_context import TokenClaims, claims_of

_POST = (
    b"POST /function/f?a=%41&b HTTP/1.1\r\nHost: h\r\nX-Call-Id: 1\r\nX-Gpu-Data: handle\r\n"
    b"Connection: x-a\r\nX-A: 1\r\nX-Forwarded-For: 10.0.0.1\r\n"
)
_CHUNKED = _POST + b"Transfer-Encoding: chunked\r\n\r\n5;x=1\r\nhello\r\n0\r\nT: 1\r\n\r\n"
_WHOLE = _POST + b"Content-Length: 5\r\nExpect: 100-continue\r\n\r\nhello"
_REQUESTS = [
    _WHOLE, _CHUNKED, _WHOLE + b"\r\n" + _CHUNKED,
    b"GET http://h/a HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
    b"GET /nodes/n/stream HTTP/1.1\r\nConnection: upgrade\r\nUpgrade: gpufaas-frames\r\n\r\n\0\0",
]  # fmt: skip
_ANSWERS = [
    b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nx-gpu-models: ab\r\n\r\nhi",
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n"
    b"trailer: x-gpu-local\r\n\r\n2\r\nhi\r\n0\r\nx-gpu-local: a|b\r\n\r\n",
    b"HTTP/1.0 404 Not Found\r\nconnection: close\r\n\r\nto the end",
]
_MOST_BODY_BYTES = 1 << 16
_STEPS = 6  # of the loop, in which a request is taken, answered, and its connection closed
_CLIENTS = "anybody who can connect"
_FUNCTIONS = "functions, in headers of their answers"
_LIMITS = "64 KiB and 256 headers for a head"

T = TypeVar("T")


def targets() -> list[Target]:
    """All of this file."""
    return [_server(), _client(), _runtime(), *_traces(), *_tokens()]


def _in_loop(do: Callable[[bytes], Coroutine[Any, Any, T]]) -> Callable[[bytes], T]:
    return lambda data: _runner().run(do(data))


@functools.cache
def _runner() -> asyncio.Runner:
    """One loop for all inputs: to make one takes longer than most of them."""
    runner = asyncio.Runner()
    atexit.register(runner.close)
    return runner


# -- our server, with what the gateway reads of a call's headers ---------------------------------


def _server() -> Target:
    return Target(
        "http-server", _in_loop(_served), (), lambda: _REQUESTS, InputForm.TEXT,
        ("common/http/server_protocol.py", "common/http/server_protocol.py",
         "common/http/asgi.py", "gateway_ext/calls/passed_headers.py",
         "common/data_handles.py"),
        _CLIENTS, f"{_LIMITS}; bodies by each server's bound",
    )  # fmt: skip


async def _served(data: bytes) -> None:
    surprises: list[Exception] = []
    state = ServerState()
    protocol = ServerProtocol(
        _config(_app(surprises)), state, Limits(), ConnectionTable(8), streams=None
    )
    transport = InMemoryTransport(protocol)
    half = len(data) // 2
    for part in (data[:half], data[half:]):
        transport.receive(part)
        await asyncio.sleep(0)
    for _ in range(_STEPS):
        await asyncio.sleep(0)
    transport.close()
    await asyncio.sleep(0)
    if state.tasks:
        await asyncio.wait(state.tasks)
    if surprises:
        raise surprises[0]


def _config(app: App) -> Config:
    config = Config(app, interface="asgi3", ws="none", lifespan="off", log_config=None)
    config.loaded_app = app
    config.encoded_headers = []
    return config


def _app(surprises: list[Exception]) -> App:
    """Reads a call as the gateway does, and notes what is no expected error."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            found = passed_headers.read_request(scope["headers"])
            passed_headers.request_head(b"POST", [b"/"], found, [], b"127.0.0.1")
            await read_body(scope, receive, _MOST_BODY_BYTES)
        except (BadRequest, Unsupported, BodyOverBound):
            pass
        except Exception as error:  # noqa: BLE001 - that is what is looked for
            surprises.append(error)
        await send_text(send, 200, "")

    return app


# -- our client ----------------------------------------------------------------------------------


def _client() -> Target:
    return Target(
        "http-client", _in_loop(_asked), (NoResponse,), lambda: _ANSWERS, InputForm.TEXT,
        ("common/http/client.py", "common/http/client.py"),
        "functions, providers, schedulers", "64 KiB and 1,000 headers; bodies piece by piece",
    )  # fmt: skip


async def _asked(data: bytes) -> tuple[list[Header], GpuReport]:
    settings = ClientSettings(trailers=frozenset({b"x-gpu-local"}))
    connection = HttpConnection(HttpClient(settings), "unix:/x", settings)
    transport = InMemoryTransport(connection)
    headed = connection.ask(b"GET / HTTP/1.1\r\n\r\n")
    half = len(data) // 2
    for part in (data[:half], data[half:]):
        transport.receive(part)
    transport.close()
    await headed
    while not connection.complete:
        if not connection.readable:
            await connection.more()
        connection.take()
    return passed_headers.read_response(connection.headers)


# -- the functions' runtime ----------------------------------------------------------------------


def _runtime() -> Target:
    def served(data: bytes) -> list[str]:
        buffer = bytearray(data)
        paths = []
        while (head := head_in(buffer)) is not None:
            body = BodyParser(head.length, _MOST_BODY_BYTES)
            if not body.take(buffer):
                break
            event = HandlerEvent(head.method, head.target, head.headers, body.content())
            event.query.to_dict()
            paths.append(event.path)
        return paths

    return Target(
        "http-runtime", served, (Malformed,), lambda: _REQUESTS, InputForm.TEXT,
        ("gateway_ext/runtime/connection.py",
         "gateway_ext/runtime/handler_values.py"),
        "the gateway, and whoever reaches a function's port", f"{_LIMITS}; bodies by a setting",
    )  # fmt: skip


# -- headers of calls ----------------------------------------------------------------------------


def _traces() -> list[Target]:
    parent = TraceContext("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331", sampled=True)
    report = b"1 h;1700000000;2500;q=30;t=2;b=4 c;b7ad6b7169203331;17;9;k=a%20b a;x;1;2 x;3;4"

    def context(data: bytes) -> TraceContext | None:
        header, _, state = data.decode("latin-1").partition("\n")
        return trace_of(header, state)

    def encode(found: TraceContext | None) -> bytes:
        return b"" if found is None else f"{found.header}\n{found.state}".encode("latin-1")

    def reported(data: bytes) -> None:
        tracer.read_report(data)
        learned.thread_wait(data)
        learned.batch_size(data)

    return [
        Target(
            "trace-context", context, (), lambda: [f"{parent.header}\na=1,b=2".encode()],
            InputForm.TEXT, ("common/telemetry/traces.py",), _CLIENTS, "64 KiB of headers",
            encode=encode,
        ),
        Target(
            "trace-report", reported, (), lambda: [report, b"1 h;1;2;q=3"], InputForm.TEXT,
            ("gateway_ext/tracing/tracer.py", "gateway_ext/calls/learned.py"), _FUNCTIONS,
            "64 KiB of headers",
        ),
    ]  # fmt: skip


def _tokens() -> list[Target]:
    """Tokens as functions read them, who have no key: the signature is not looked at."""
    claims = {
        "node": "n0", "lease": 7, "gpu": "g0", "function": "openfaas-fn/f", "stands": True,
        "ahead": True, "request": "r1",
    }  # fmt: skip

    def token(data: bytes) -> str:
        return base64.urlsafe_b64encode(data).rstrip(b"=").decode() + ".mac"

    def in_shim(data: bytes) -> TokenClaims:
        return claims_of.__wrapped__(token(data))

    def in_batches(data: bytes) -> str:
        return batches._named_by.__wrapped__(token(data))  # noqa: SLF001 - batches need whole calls

    readers: list[tuple[str, Callable[[bytes], object], str]] = [
        ("token-in-shim", in_shim, "torch_shim/leases/request_context.py"),
        ("token-in-batches", in_batches, "gateway_ext/runtime/batches.py"),
    ]
    return [
        Target(
            name, parse, (), lambda: [json.dumps(claims).encode()], InputForm.JSON, (reads,),
            "the gateway, and whoever reaches a function's port", "64 KiB of headers",
        )
        for name, parse, reads in readers
    ]  # fmt: skip
