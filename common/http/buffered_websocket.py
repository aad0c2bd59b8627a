"""uvicorn's websocket protocol for streams of many small messages."""

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

# Messages that may wait for the application before reading stops.
_MOST_UNREAD, _SMALL_BYTES = 32, 32 << 10


class BufferedWebsocket(WebSocketsSansIOProtocol):
    """Lets a few small messages wait, where uvicorn's protocol stops reading at every message."""

    def send_receive_event_to_app(self) -> None:
        """Queue a message for the application."""
        small = sum(map(len, self.frames)) <= _SMALL_BYTES
        if self.read_paused or not small or self.queue.qsize() >= _MOST_UNREAD:
            super().send_receive_event_to_app()
            return
        self.read_paused = True  # uvicorn's method then leaves the transport alone
        super().send_receive_event_to_app()
        self.read_paused = False
