"""uvicorn's websocket protocol: bounds for strangers, and room for many small messages of ours."""

import asyncio
from typing import Any

from uvicorn import Config
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState

from common.http.connection_table import ConnectionTable

# The extension of the scope whose `confirm` the application calls once the client is known.
KNOWN_CLIENT = "gpufaas.known_client"
# The largest message of a client that is not known yet.
_FIRST_BYTES = 16 << 10
# Messages that may wait for the application before reading stops.
_MOST_UNREAD, _SMALL_BYTES = 32, 32 << 10
_SWITCHING = 101


class BufferedWebsocket(WebSocketsSansIOProtocol):
    """Lets a few small messages wait, where uvicorn's protocol stops reading at every message.

    Until the application confirms that it knows the client, the connection counts as one that
    waits for a request, which makes room for others, and takes small messages only.
    """

    host = ""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        *,
        table: ConnectionTable,
    ) -> None:
        """`table` counts the connections of one server."""
        super().__init__(config, server_state, app_state)
        self._table = table
        self._known = False
        self.conn.max_message_size = _FIRST_BYTES

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Count the connection, which takes the place of the request that it began as."""
        super().connection_made(transport)
        self.host = self.client[0] if self.client else ""
        self._table.admit(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Count the connection no more."""
        self._table.remove(self)
        super().connection_lost(exc)

    def drop(self) -> None:
        """Make room for another connection."""
        self.transport.abort()

    def handle_connect(self, event: Any) -> None:
        """Give the application the means to confirm its client."""
        super().handle_connect(event)
        if self.response.status_code == _SWITCHING:
            extensions: Any = self.scope["extensions"]
            extensions[KNOWN_CLIENT] = {"confirm": self._confirm}

    def send_receive_event_to_app(self) -> None:
        """Queue a message for the application."""
        small = sum(map(len, self.frames)) <= _SMALL_BYTES
        waiting = self.queue.qsize() < _MOST_UNREAD
        if self.read_paused or not (self._known and small and waiting):
            super().send_receive_event_to_app()
            return
        self.read_paused = True  # uvicorn's method then leaves the transport alone
        super().send_receive_event_to_app()
        self.read_paused = False

    def _confirm(self) -> None:
        """The client has proven who it is: it keeps its connection, and may send large messages."""
        self._known = True
        self._table.remove(self)
        self.conn.max_message_size = self.config.ws_max_size
