"""A server's transport: joins the head and the body of a response, and closes without a reset."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

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


# The end of a connection whose client still sends: the last answer arrives all the same.
#
# A socket that is closed with unread data resets the connection, and the client's system may then
# throw the answer away that explains why.

_LINGER_S = 1.0
# A client that still sends after this much finds that nobody reads any more.
_LINGER_BYTES = 1 << 20
# For a client that reads a long answer slowly.
_MOST_LINGER_S = 60.0


class LingeringClose(asyncio.Protocol):
    """Takes a transport over from `before`: sends what is written, and drops what arrives."""

    def __init__(self, transport: asyncio.Transport, before: asyncio.BaseProtocol) -> None:
        self._transport = transport
        self._before = before
        self._loop = asyncio.get_running_loop()
        self._latest_s = self._loop.time() + _MOST_LINGER_S
        self._dropped_bytes = 0
        self._timer = self._loop.call_later(_LINGER_S, self._end)
        transport.set_protocol(self)
        if transport.can_write_eof():
            with suppress(OSError):  # the client has reset the connection, which is noticed next
                transport.write_eof()
        transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        """Drop it; behind the bound, stop reading."""
        self._dropped_bytes += len(data)
        if self._dropped_bytes > _LINGER_BYTES:
            self._transport.pause_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        self._before.connection_lost(exc)

    def pause_writing(self) -> None:
        self._before.pause_writing()

    def resume_writing(self) -> None:
        self._before.resume_writing()

    def _end(self) -> None:
        if self._transport.get_write_buffer_size() and self._loop.time() < self._latest_s:
            self._timer = self._loop.call_later(_LINGER_S, self._end)
        else:
            self._transport.abort()
