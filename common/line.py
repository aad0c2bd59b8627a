"""A line of whole messages between two programs: received as they come, sent in order by one task.

What carries the messages (a server's or a client's websocket) is a `MessageSocket`.
"""

import asyncio
from collections import deque
from types import TracebackType
from typing import Protocol, Self

from common.frames.frame_line import LineBroken

_CLOSE_S = 1.0
_PIECE_BYTES = 64 << 10


class MessageSocket(Protocol):
    """A connection that carries whole messages; each method raises LineBroken once it has ended."""

    async def receive(self) -> bytes:
        """The next message."""
        ...

    async def send(self, data: bytes) -> None:
        """Send one message."""
        ...

    async def close(self) -> None:
        """Say goodbye and close; harmless on a closed connection."""
        ...

    def abort(self) -> None:
        """Close at once, without a goodbye."""
        ...


class MessageLine:
    """Sends in a task of its own while `async with` lasts, and closes the socket at its end."""

    def __init__(self, socket: MessageSocket) -> None:
        self._socket = socket
        self._greetings: deque[bytes] = deque()
        self._outgoing: deque[bytes] = deque()
        self._wake = asyncio.Event()
        self._writer: asyncio.Task[None] | None = None
        self._hung_up = False

    async def receive(self) -> bytes:
        """The next message; LineBroken if the line has ended or this end hung up."""
        data = await self._socket.receive()
        if self._hung_up:
            raise LineBroken("this end has hung up")
        return data

    def greet(self, data: bytes) -> None:
        """Send this as a message of its own, before every message that was given to `send`."""
        self._greetings.append(data)
        self._wake.set()

    def send(self, data: bytes) -> None:
        """Send this after every earlier message, perhaps in one message with it."""
        self._outgoing.append(data)
        self._wake.set()

    def hang_up(self) -> None:
        """Receive nothing more, and close as soon as every message given to `send` is sent."""
        self._hung_up = True
        self._wake.set()

    def abort(self) -> None:
        """Close at once; messages that were not sent yet are lost."""
        self._hung_up = True
        self._socket.abort()

    async def flush(self) -> None:
        """Hang up, and wait a moment until every message given to `send` is sent."""
        self.hang_up()
        if self._writer is not None:
            await asyncio.wait({self._writer}, timeout=_CLOSE_S)

    async def __aenter__(self) -> Self:
        self._writer = asyncio.get_running_loop().create_task(self._write())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._writer is not None
        self._writer.cancel()
        await asyncio.wait({self._writer})
        if isinstance(error, TimeoutError):  # a silent end would not answer a goodbye
            self._socket.abort()
        await self._socket.close()

    async def _write(self) -> None:
        try:
            while self._greetings or self._outgoing or not self._hung_up:
                await self._wake.wait()
                self._wake.clear()
                while self._greetings:
                    await self._socket.send(self._greetings.popleft())
                while self._outgoing:
                    await self._socket.send(next_piece(self._outgoing))
        except LineBroken:
            return  # `receive` raises it too
        await self._socket.close()


def next_piece(messages: deque[bytes]) -> bytes:
    """Take the first messages out, as many as fit together into one piece of a fair size."""
    first = messages.popleft()
    if not messages:
        return first
    piece = [first]
    size = len(first)
    while messages and size + len(messages[0]) <= _PIECE_BYTES:
        piece.append(messages.popleft())
        size += len(piece[-1])
    return b"".join(piece)
