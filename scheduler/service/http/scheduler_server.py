"""The scheduler's HTTP server: the common one, with the scheduler's options."""

import socket
from contextlib import AbstractAsyncContextManager

from common.http import server
from common.http.accepted_line import StreamHandler
from common.http.asgi import App
from common.http.server_protocol import Limits

_DRAIN_S = 3.0


def serving(
    app: App,
    listener: socket.socket,
    limits: Limits | None = None,
    streams: StreamHandler | None = None,
) -> AbstractAsyncContextManager[None]:
    """Serve HTTP and the streams of nodes and callers while the context lasts."""
    return server.serving(app, listener, _DRAIN_S, streams=streams, limits=limits)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket that notices callers whose host vanished; port 0 is any free one."""
    return server.listen(host, port, probe_clients=True)
