"""A transport that sends the head of an answer together with what follows it."""

import asyncio
from collections.abc import Callable
from typing import Any

# Above this, copying head and body into one costs more than the loop's own gathering.
_JOINED_BYTES = 64 << 10
# A head that nothing follows leaves after this; a write of nothing sends it at once.
_ALONE_S = 0.001
_HEAD, _INTERIM = b"HTTP/1.1 ", b"HTTP/1.1 1"


class Gathering:
    """As much of a transport as uvicorn uses.

    uvicorn writes the head and the body of an answer separately, and a system call costs as much
    as a third of all that the gateway does for a call.
    """

    __slots__ = (
        "get_extra_info", "is_closing", "pause_reading", "resume_reading", "set_protocol",
        "_held", "_loop", "_timer", "_transport",
    )  # fmt: skip

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._held = b""
        self._timer: asyncio.TimerHandle | None = None
        self.get_extra_info: Callable[..., Any] = transport.get_extra_info
        self.is_closing: Callable[[], bool] = transport.is_closing
        self.pause_reading: Callable[[], None] = transport.pause_reading
        self.resume_reading: Callable[[], None] = transport.resume_reading
        self.set_protocol: Callable[[asyncio.BaseProtocol], None] = transport.set_protocol

    def write(self, data: bytes) -> None:
        """Send this, and the head that waits for it; a head alone waits a moment."""
        if self._held:
            self._flush(data)
        elif data.startswith(_HEAD) and not data.startswith(_INTERIM):
            self._held = data
            self._timer = self._loop.call_later(_ALONE_S, self._flush)
        elif data:
            self._transport.write(data)

    def close(self) -> None:
        """Send what was written, then close."""
        if self._held:
            self._flush()
        self._transport.close()

    def _flush(self, data: bytes = b"") -> None:
        head, self._held = self._held, b""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not head or self._transport.is_closing():
            return
        if len(data) <= _JOINED_BYTES:
            self._transport.write(head + data)
        else:
            self._transport.writelines((head, data))
