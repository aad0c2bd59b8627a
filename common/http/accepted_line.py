"""A server's end of a line of frames: bounds for strangers, and its place among connections."""

import asyncio
import socket
from collections.abc import Awaitable, Callable

from common.frame_line import FrameLine
from common.http.connection_table import ConnectionTable
from common.http.request_head import NO_STREAM
from common.stream_upgrade import SWITCHED, StreamRequest
from common.tcp import notice_silence

# The largest frame of a client that is not known yet, and of one that is.
_FIRST_FRAME_BYTES, _MOST_FRAME_BYTES = 16 << 10, 16 << 20
# A client whose host vanished, or is cut off, is noticed after this time: its line or request ends.
SILENCE_S = 20
_OF_TCP = (socket.AF_INET, socket.AF_INET6)


class AcceptedLine(FrameLine):
    """A line that a client began.

    Until `confirm` says that the client is known, the connection counts as one that waits for a
    request, which makes room for others, and takes small frames only.
    """

    def __init__(self, host: str, table: ConnectionTable, ended: Callable[[], None]) -> None:
        """`table` counts the server's connections; `ended` is called at the connection's end."""
        super().__init__(_FIRST_FRAME_BYTES)
        self.host = host
        self._table = table
        self._at_end = ended
        self._switched = False

    def confirm(self) -> None:
        """The client has proven who it is: it keeps its connection, and may send large frames."""
        self._table.remove(self)
        self.max_frame_bytes = _MOST_FRAME_BYTES

    def refuse(self) -> None:
        """Answer 404 and close, in place of switching; only before the handler first waits."""
        assert not self._switched, "the protocol was switched already"
        self._switched = True
        if self._transport is not None:
            self._transport.write(NO_STREAM.response)
        self.hang_up()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the place of the request that asked for the line."""
        super().connection_made(transport)
        self._table.admit(self)
        connection = transport.get_extra_info("socket")
        if connection is not None and connection.family in _OF_TCP:
            # Without it the kernel asks no host for which data wait, such as signs of life.
            notice_silence(connection, SILENCE_S)

    def connection_lost(self, exc: Exception | None) -> None:
        self._table.remove(self)
        self._at_end()
        super().connection_lost(exc)

    def drop(self) -> None:
        self.abort()

    def shutdown(self) -> None:
        self.hang_up()

    @property
    def transport(self) -> asyncio.Transport | None:
        """What the server's drain closes at last."""
        return self._transport

    def _write(self) -> None:
        if not self._switched and self._transport is not None:
            self._switched = True
            if not self._transport.is_closing():
                self._outgoing.insert(0, SWITCHED)
        super()._write()

    def switch(self) -> None:
        self._write()


StreamHandler = Callable[[StreamRequest, AcceptedLine], Awaitable[None]]
