"""The HTTP server: uvicorn on a socket of ours, which ends calls in flight before it stops."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator

import uvicorn

from gateway_ext.asgi import App
from gateway_ext.bounded_http import BoundedHttp

_BACKLOG = 2_048
_START_S = 0.005
_KEEP_ALIVE_S = 75


class _Server(uvicorn.Server):
    """Leaves signals to whoever runs us."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def serving(app: App, listener: socket.socket, drain_s: float) -> AsyncIterator[None]:
    """Answer HTTP on this socket for as long as the context lasts.

    At its end no new connection is taken, and calls in flight have `drain_s` to end.
    """
    config = uvicorn.Config(
        app,
        interface="asgi3",  # it is told, since our application is no coroutine function
        http=BoundedHttp,
        ws="none",
        lifespan="off",
        access_log=False,
        proxy_headers=False,
        log_config=None,
        server_header=False,
        date_header=False,
        backlog=_BACKLOG,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=max(1, round(drain_s)),
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
        # Accepted sockets inherit it; asyncio's own loop sets it on those that it made alone.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener
