"""The HTTP server of all our processes: uvicorn's protocols on a listening socket of ours.

`uvicorn.Server` is not used: it owns the process's signals, polls ten times a second while it is
idle, and needs up to 0.3 s to stop.
"""

import asyncio
import contextlib
import logging
import resource
import socket
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any, TypeVar, cast

from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle
from uvicorn.server import ServerState

from common.http.asgi import App, Header, Message, Receive, Scope, Send, send_text
from common.http.server_protocol import (
    SILENCE_S,
    ConnectionTable,
    Limits,
    ServerProtocol,
    StreamHandler,
)
from common.tcp import notice_silence

log = logging.getLogger(__name__)

_BACKLOG = 2_048
_DRAIN_LOOK_S = 0.01
# For the last answers to requests that were cut, and for their clients to take these.
_CUT_S = 1.0

_Entry = TypeVar("_Entry")


@contextlib.asynccontextmanager
async def serving(
    app: App,
    listener: socket.socket,
    drain_s: float,
    *,
    streams: StreamHandler | None = None,
    limits: Limits | None = None,
) -> AsyncIterator[None]:
    """Serve an ASGI application on this socket for as long as the context lasts.

    At its end no new connection is accepted, requests in flight have `drain_s` to end, and those
    that are left then are cut: their clients are answered 503, or see the answer break off. Lines
    of frames are refused unless `streams` is given, which serves one line each time that it is
    called.
    """
    limits = limits or Limits()
    requests = CutRequests(app)
    config = Config(
        requests,
        interface="asgi3",  # uvicorn would take an object with `__call__` for an older interface
        http=ServerProtocol,
        ws="none",
        lifespan="off",
        access_log=False,
        proxy_headers=False,
        log_config=None,
        server_header=False,
        date_header=False,
        timeout_keep_alive=limits.keep_alive_s,
    )
    config.load()
    state = _state_in_order()
    table = ConnectionTable(_most_connections(limits))
    server = await asyncio.get_running_loop().create_server(
        lambda: ServerProtocol(config, state, limits, table, streams),
        sock=listener,
        backlog=_BACKLOG,
    )
    try:
        yield
    finally:
        server.close()
        listener.close()
        await _drain(state, requests, drain_s)


class _InOrder(dict[_Entry, None]):
    """A set whose entries are in the order in which they came.

    uvicorn's own sets are in the order of memory addresses: what ends a server in that order is
    never the same twice.
    """

    def add(self, entry: _Entry) -> None:
        self[entry] = None

    def discard(self, entry: _Entry) -> None:
        self.pop(entry, None)


def _state_in_order() -> ServerState:
    state, connections, tasks = ServerState(), _InOrder[Any](), _InOrder[Any]()
    state.connections, state.tasks = cast(Any, connections), cast(Any, tasks)
    return state


def _most_connections(limits: Limits) -> int:
    """At most half of the files that this process may open: without files nobody can connect."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return limits.connections
    return min(limits.connections, files // 2)


class CutRequests:
    """Serves the requests of an application, as an ASGI application itself, until they are cut.

    uvicorn would take the cancellation of a request for a failure of the application: it would log
    a traceback and answer 500.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._over = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._over.is_set():  # it came behind another one on its connection
            await _answer_last(send)
            return
        readable = _Unframed(scope["method"], send) if scope["http_version"] == "1.0" else send
        try:
            await self._app(scope, receive, readable)
        except asyncio.CancelledError:
            if not self._over.is_set():
                raise
            await _answer_last(send)

    def cut(self, tasks: Iterable[asyncio.Task[Any]]) -> None:
        """Cancel these, which are all that run: who has no answer by then is answered 503."""
        self._over.set()
        for task in list(tasks):
            task.cancel()


async def _answer_last(send: Send) -> None:
    """Answer 503, or break off an answer that has begun: nobody may take it for a whole one."""
    request = request_of(send)
    if not request.response_started:
        await send_text(send, 503, "the server stops", ((b"retry-after", b"1"),))
    elif not request.response_complete:
        request.disconnected = True  # else uvicorn complains of an answer that is not complete
        request.transport.abort()


_LENGTH, _CODING = b"content-length", b"transfer-encoding"
_WITHOUT_BODY = frozenset({204, 304})


def request_of(send: Send) -> RequestResponseCycle:
    """uvicorn's own record of the request whose answer this sends."""
    request = getattr(send, "__self__", None)
    assert isinstance(request, RequestResponseCycle), "uvicorn hands over a method of its request"
    return request


class _Unframed:
    """Sends one answer without chunks, which no HTTP/1.0 client can read.

    An answer of unknown length lasts until its connection is closed.
    """

    def __init__(self, method: str, send: Send) -> None:
        self._has_body = method != "HEAD"
        self._request = request_of(send)
        self._send = send
        self._lengthless = False

    async def __call__(self, message: Message) -> None:
        """Send a part of the answer; uvicorn compares each body with a length."""
        if message["type"] == "http.response.start":
            headers: Sequence[Header] = [
                header for header in message.get("headers", ()) if header[0].lower() != _CODING
            ]
            has_length = any(name.lower() == _LENGTH for name, _ in headers)
            self._lengthless = self._has_body and not has_length
            if self._lengthless and message["status"] not in _WITHOUT_BODY:
                self._request.chunked_encoding = False
            message = {**message, "headers": headers}
        elif self._lengthless:
            self._request.expected_content_length = len(message.get("body", b""))
        await self._send(message)


async def _drain(state: ServerState, requests: CutRequests, drain_s: float) -> None:
    for connection in list(state.connections):
        connection.shutdown()
    await _wait_for_the_end(state, drain_s)
    if state.tasks:
        log.warning("cutting %d requests that did not end in %g s", len(state.tasks), drain_s)
        requests.cut(state.tasks)
        await _wait_for_the_end(state, _CUT_S)
    for connection in list(state.connections):
        connection.transport.abort()


async def _wait_for_the_end(state: ServerState, within_s: float) -> None:
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + within_s
    # uvicorn's protocols offer no event for the end of a connection.
    while (state.connections or state.tasks) and loop.time() < deadline_s:
        await asyncio.sleep(_DRAIN_LOOK_S)


def listen(host: str, port: int, *, probe_clients: bool = False) -> socket.socket:
    """A listening socket; port 0 is any free one.

    With `probe_clients` TCP notices a client whose host vanished.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Accepted sockets inherit the options; asyncio sets them only on sockets that it made.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if probe_clients:
            notice_silence(listener, SILENCE_S, writes=False)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener
