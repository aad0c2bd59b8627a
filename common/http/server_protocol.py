"""uvicorn's HTTP protocol, with bounds on heads, on trailers and on the number of connections."""

import asyncio
from dataclasses import dataclass
from typing import Any, cast

from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from common.http.joining_transport import JoiningTransport

_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"content-length: 0\r\nconnection: close\r\n\r\n"
)


@dataclass(frozen=True, slots=True)
class Limits:
    """What a client may take of a server before the application sees a request."""

    head_bytes: int = 64 << 10
    head_s: float = 30.0
    keep_alive_s: int = 75
    connections: int | None = None
    """At this many, a new connection replaces the oldest idle one; None sets no limit."""


class ServerProtocol(HttpToolsProtocol):
    """Ends a connection whose next head is endless or incomplete after `head_s`.

    The parser itself has no bounds: it would collect the head of a request for ever, and likewise
    the trailers behind a chunked body, which are dropped here.
    """

    _in_head = False
    _quiet_bytes = 0  # received since a head began, or since the last piece of a body
    _head_timer: asyncio.TimerHandle | None = None

    def __init__(
        self,
        config: Config,
        state: ServerState,
        limits: Limits,
        open_connections: "dict[ServerProtocol, None]",
    ) -> None:
        """`open_connections` is shared by the connections of one server, the oldest first."""
        super().__init__(config, state, {})
        self._limits = limits
        self._open_connections = open_connections

    def connection_made(self, transport: Any) -> None:
        """Wait for the first head no longer than for a later one."""
        super().connection_made(cast(asyncio.Transport, JoiningTransport(transport)))
        self._open_connections[self] = None
        most = self._limits.connections
        if most is not None and len(self._open_connections) > most:
            self._drop_oldest_idle()
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer of the head."""
        self._open_connections.pop(self, None)
        self._end_of_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse the data; for a head that arrives complete, the limits cost one comparison."""
        self._quiet_bytes += len(data)
        super().data_received(data)
        if self._quiet_bytes > self._limits.head_bytes:
            self._refuse()
        elif self._in_head and self._head_timer is None:
            self._wait_for_head()

    def on_message_begin(self) -> None:
        """A head begins."""
        self._in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """The request head is complete."""
        self._quiet_bytes = 0
        self._end_of_head()
        super().on_headers_complete()
        # The parser appends trailers to `self.headers`: behind the checks of a proxy in front they
        # would become headers of the request. An upgrade reads its headers once more.
        self.headers = self.headers.copy() if self.parser.should_upgrade() else []

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        self._quiet_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """After a complete message only another head can follow."""
        self._quiet_bytes = 0
        super().on_message_complete()

    def handle_websocket_upgrade(self) -> None:
        """Hand the bare transport on: a websocket's frames are never kept back."""
        self._open_connections.pop(self, None)
        self.transport = cast(JoiningTransport, self.transport).wrapped
        super().handle_websocket_upgrade()

    @property
    def idle(self) -> bool:
        """Whether no request waits for its response."""
        return getattr(self.cycle, "response_complete", True)  # it is None before the first one

    def _drop_oldest_idle(self) -> None:
        others = [each for each in self._open_connections if each is not self]
        oldest = next((each for each in others if each.idle), others[0])
        del self._open_connections[oldest]  # the transport reports the loss only later
        oldest.transport.abort()

    def _wait_for_head(self) -> None:
        self._head_timer = self.loop.call_later(self._limits.head_s, self._give_up)

    def _end_of_head(self) -> None:
        self._in_head = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self) -> None:
        """Answer why, unless a response to an earlier request is still on its way."""
        if self.idle:
            self.transport.write(_TOO_LARGE)
        self._give_up()

    def _give_up(self) -> None:
        self._end_of_head()
        self.transport.close()
