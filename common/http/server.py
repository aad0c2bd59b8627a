"""The HTTP server of all our processes: uvicorn's protocols on a listening socket of ours.

`uvicorn.Server` is not used: it owns the process's signals, polls ten times a second while it is
idle, and needs up to 0.3 s to stop.
"""

import asyncio
import contextlib
import logging
import resource
import socket
from collections.abc import AsyncIterator, Iterator, MutableSet
from typing import Any, TypeVar, cast

from uvicorn import Config
from uvicorn.server import ServerState

from common.http.accepted_line import SILENCE_S, StreamHandler
from common.http.asgi import App
from common.http.connection_table import ConnectionTable
from common.http.cut_requests import CutRequests
from common.http.server_protocol import Limits, ServerProtocol
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


class _InOrder(MutableSet[_Entry]):
    """A set whose entries are in the order in which they came.

    uvicorn's own sets are in the order of memory addresses: what ends a server in that order is
    never the same twice.
    """

    def __init__(self) -> None:
        self._entries: dict[_Entry, None] = {}

    def __contains__(self, entry: object) -> bool:
        return entry in self._entries

    def __iter__(self) -> Iterator[_Entry]:
        return iter(list(self._entries))

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, value: _Entry) -> None:
        """Put it last, unless it is there."""
        self._entries[value] = None

    def discard(self, value: _Entry) -> None:
        """Take it out, if it is there."""
        self._entries.pop(value, None)


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


async def _drain(state: ServerState, requests: CutRequests, drain_s: float) -> None:
    for connection in state.connections:
        connection.shutdown()
    await _wait_for_the_end(state, drain_s)
    if state.tasks:
        log.warning("cutting %d requests that did not end in %g s", len(state.tasks), drain_s)
        requests.cut(state.tasks)
        await _wait_for_the_end(state, _CUT_S)
    for connection in state.connections:
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
