"""TCP connections: to hosts that go silent, and to programs that do not read."""

import asyncio
import socket
import struct
from dataclasses import dataclass

_EVERY_S = 1.0
# Of the kernel's `struct tcp_info`: segments on their way, the milliseconds since the last
# acknowledgement, the bytes that were acknowledged, and those that were not sent yet.
_UNACKED, _LAST_ACK_MS = struct.Struct("=24xI"), struct.Struct("=56xI")
_ACKED, _UNSENT = struct.Struct("=120xQ"), struct.Struct("=144xI")
_INFO_BYTES = 256


def notice_silence(
    connection: socket.socket, silence_s: int, *, probes: int = 3, writes: bool = True
) -> None:
    """Make this connection fail once the other host has been silent for this long.

    A host that answers the kernel's probes is not silent, however slow its program is. With
    `writes` the connection also fails when data sent stays unacknowledged for as long.
    """
    every_s = silence_s // (probes + 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, every_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, every_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, probes)
    if writes:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, silence_s * 1000)


class TcpPatience:
    """Notices hosts that are silent, and has patience with programs that do not read.

    Where data wait for a program's full buffer, the kernel counts from the last byte that went, and
    ends the connection at TCP_USER_TIMEOUT although the other host answers each of its probes. So
    this time limit moves on while such answers come. A host that vanishes while its program does
    not read is noticed within `silence_s` after its next answer would have been due.
    """

    def __init__(self, silence_s: int) -> None:
        self._silence_s = silence_s
        self._lines: dict[asyncio.BaseTransport, _Line] = {}
        self._timer: asyncio.TimerHandle | None = None

    @property
    def watched(self) -> int:
        return len(self._lines)

    def watch(self, transport: asyncio.BaseTransport) -> None:
        """Notice the other host's silence on this TCP connection until the connection is closed."""
        connection = transport.get_extra_info("socket")
        if transport.is_closing() or connection is None:
            return
        notice_silence(connection, self._silence_s)
        self._lines[transport] = _Line(connection, self._silence_s)
        if self._timer is None:
            self._look_later()

    def _look_later(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(_EVERY_S, self._look) if self._lines else None

    def _look(self) -> None:
        now_s = asyncio.get_running_loop().time()
        self._lines = {
            transport: line for transport, line in self._lines.items() if not transport.is_closing()
        }
        self._look_later()
        for line in self._lines.values():
            line.look(now_s, self._silence_s)


@dataclass(slots=True)
class _Line:
    connection: socket.socket
    limit_s: float
    acked_bytes: int = -1
    stuck_since_s: float = 0.0

    def look(self, now_s: float, silence_s: int) -> None:
        """Move the connection's time limit on, or back to where it was."""
        info = self.connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
        if len(info) < _UNSENT.size:
            return  # a kernel before 4.6
        if self.acked_bytes != (acked_bytes := _ACKED.unpack_from(info)[0]):
            self.acked_bytes = acked_bytes
            self.stuck_since_s = now_s - _EVERY_S
        if _UNACKED.unpack_from(info)[0] or not _UNSENT.unpack_from(info)[0]:
            self._allow(silence_s)
        # The kernel asks at the latest when the limit is reached that held at its last question.
        elif _LAST_ACK_MS.unpack_from(info)[0] < (silence_s + 2 * _EVERY_S) * 1000:
            self._allow(now_s - self.stuck_since_s + silence_s)

    def _allow(self, limit_s: float) -> None:
        if limit_s != self.limit_s:
            self.limit_s = limit_s
            limit_ms = int(limit_s * 1000)
            self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit_ms)
