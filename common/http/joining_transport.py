"""A server's transport: joins the head and the body of a response, and closes without a reset."""

import asyncio
from collections.abc import Callable
from typing import Any

from common.http.lingering_close import LingeringClose

# Above this size, copying head and body into one costs more than a gathering write.
_JOINED_BYTES = 64 << 10
_HEAD, _INTERIM = b"HTTP/1.1 ", b"HTTP/1.1 1"
# A client that has not read the rest by then, after the response is over, does not read.
_UNREAD_S = 30.0


def _nothing_comes() -> bool:
    return False


class JoiningTransport:
    """Wraps a transport and offers as much of it as uvicorn's HTTP protocol uses.

    uvicorn writes the head and the body of a response separately, and a system call costs as much
    as a third of all that the gateway does for a call. A head that no body follows within the same
    step of the event loop is sent at the next step; a write of no bytes sends it at once.

    `more_comes` says at the close whether the client may still be sending.
    """

    __slots__ = (
        "abort", "get_extra_info", "pause_reading", "resume_reading", "set_protocol",
        "wrapped", "_closing", "_giving_up", "_head", "_loop", "_more_comes",
    )  # fmt: skip

    def __init__(
        self, transport: asyncio.Transport, more_comes: Callable[[], bool] = _nothing_comes
    ) -> None:
        self.wrapped = transport
        self._loop = asyncio.get_running_loop()
        self._head = b""
        self._closing = False
        self._more_comes = more_comes
        self._giving_up: asyncio.TimerHandle | None = None
        self.abort: Callable[[], None] = transport.abort
        self.get_extra_info: Callable[..., Any] = transport.get_extra_info
        self.pause_reading: Callable[[], None] = transport.pause_reading
        self.resume_reading: Callable[[], None] = transport.resume_reading
        self.set_protocol: Callable[[asyncio.BaseProtocol], None] = transport.set_protocol

    def write(self, data: bytes) -> None:
        """Send the data behind a waiting head; hold a head back until the next loop step."""
        if self._closing:
            return
        if self._head:
            self._flush(data)
        elif data.startswith(_HEAD) and not data.startswith(_INTERIM):
            self._head = data
            self._loop.call_soon(self._flush)
        elif data:
            self.wrapped.write(data)

    def is_closing(self) -> bool:
        """Whether the connection is closed, or closes once everything is sent."""
        return self._closing or self.wrapped.is_closing()

    def close(self) -> None:
        """Send what was written, then close; a client that never reads it does not prevent that."""
        if self.is_closing():
            return
        self._flush()
        self._closing = True
        if self._more_comes():
            LingeringClose(self.wrapped, self.wrapped.get_protocol())
        else:
            self.wrapped.close()
            if self.wrapped.get_write_buffer_size():
                self._giving_up = self._loop.call_later(_UNREAD_S, self.wrapped.abort)

    def lost(self) -> None:
        """The connection is lost: whom it asked and the transport would keep each other."""
        self._more_comes = _nothing_comes
        if self._giving_up is not None:
            self._giving_up.cancel()
            self._giving_up = None

    def _flush(self, data: bytes = b"") -> None:
        head, self._head = self._head, b""
        if not head or self.wrapped.is_closing():
            return
        if len(data) <= _JOINED_BYTES:
            self.wrapped.write(head + data)
        else:
            self.wrapped.writelines((head, data))
