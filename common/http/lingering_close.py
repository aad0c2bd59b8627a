"""The end of a connection whose client still sends: the last answer arrives all the same.

A socket that is closed with unread data resets the connection, and the client's system may then
throw the answer away that explains why.
"""

import asyncio
from contextlib import suppress

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
        """Tell the protocol before this one."""
        self._timer.cancel()
        self._before.connection_lost(exc)

    def pause_writing(self) -> None:
        """See `asyncio.BaseProtocol`."""
        self._before.pause_writing()

    def resume_writing(self) -> None:
        """See `asyncio.BaseProtocol`."""
        self._before.resume_writing()

    def _end(self) -> None:
        if self._transport.get_write_buffer_size() and self._loop.time() < self._latest_s:
            self._timer = self._loop.call_later(_LINGER_S, self._end)
        else:
            self._transport.abort()
