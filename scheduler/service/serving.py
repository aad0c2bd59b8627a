"""The HTTP server: uvicorn on a socket of ours, stopped when we say so."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from scheduler.service.app import Asgi

_BACKLOG = 2_048
# A caller whose host is gone says nothing any more; its request is cancelled after so long.
_ALIVE = {socket.TCP_KEEPIDLE: 5, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}
_STOP_S = 3
_START_S = 0.005
# Messages of a websocket that may wait for the application before reading stops.
_MOST_UNREAD, _SMALL_BYTES = 32, 32 << 10


class _Server(uvicorn.Server):
    """Leaves signals to whoever runs us."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _OneWrite:
    """A transport that lets an answer's head wait for its body: one system call, one wake-up.

    The body comes in the same step of the loop, or the head goes out alone in the next one.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        self._head = b""

    def write(self, data: bytes) -> None:
        if self._head:
            data, self._head = self._head + data, b""
        elif data.startswith(b"HTTP/1.1 "):
            self._head = data
            asyncio.get_running_loop().call_soon(self._flush)
            return
        if data:
            self.transport.write(data)

    def close(self) -> None:
        self._flush()
        self.transport.close()

    def _flush(self) -> None:
        if self._head:
            head, self._head = self._head, b""
            self.transport.write(head)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.transport, name)


class _Protocol(HttpToolsProtocol):
    """uvicorn's own, over such a transport; a websocket gets the one below it."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        found = cast(asyncio.Transport, transport)
        super().connection_made(cast(asyncio.Transport, _OneWrite(found)))

    def handle_websocket_upgrade(self) -> None:
        self.transport = cast(_OneWrite, self.transport).transport
        super().handle_websocket_upgrade()


class _Websocket(WebSocketsSansIOProtocol):
    """uvicorn's own, which stops reading at every message; here a few small ones may wait."""

    def send_receive_event_to_app(self) -> None:
        small = sum(map(len, self.frames)) <= _SMALL_BYTES
        if self.read_paused or not small or self.queue.qsize() >= _MOST_UNREAD:
            super().send_receive_event_to_app()
            return
        self.read_paused = True  # so that it leaves the transport alone
        super().send_receive_event_to_app()
        self.read_paused = False


@contextlib.asynccontextmanager
async def serving(app: Asgi, listener: socket.socket) -> AsyncIterator[None]:
    """Answer HTTP on this socket for as long as the context lasts."""
    config = uvicorn.Config(
        app,
        http=_Protocol,
        ws=_Websocket,
        lifespan="off",
        access_log=False,
        proxy_headers=False,
        log_config=None,
        server_header=False,
        date_header=False,
        backlog=_BACKLOG,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=_STOP_S,
    )
    server = _Server(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        while not server.started and not task.done():
            await asyncio.sleep(_START_S)
        yield
    finally:
        server.should_exit = True
        await task


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 is any free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Accepted sockets inherit these; asyncio's own loop sets the first on its own alone.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _ALIVE.items():
            listener.setsockopt(socket.IPPROTO_TCP, option, value)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener
