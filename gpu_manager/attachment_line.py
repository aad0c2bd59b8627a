"""One socket to a scheduler: whole messages in, and out in their order by a task of its own."""

import asyncio
from collections import deque
from types import TracebackType
from typing import Self

from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from scheduler.api import BadValue
from scheduler.stream import next_piece


class Line:
    """`async with` sends what is given to `send`, and closes the socket."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._outgoing: deque[bytes] = deque()
        self._wake = asyncio.Event()
        self._writer: asyncio.Task[None] | None = None

    async def receive(self) -> bytes:
        """The next message; ConnectionClosed at the end."""
        data = await self._socket.recv()
        if not isinstance(data, bytes):
            raise BadValue("text came, where only bytes do")
        return data

    def send(self, data: bytes) -> None:
        """Send this after all that was given before."""
        self._outgoing.append(data)
        self._wake.set()

    def hang_up(self) -> None:
        """Let nothing come or go any more: whoever reads is told."""
        self._socket.transport.abort()

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
        if isinstance(error, TimeoutError):  # nobody would answer a goodbye
            self.hang_up()
        await self._socket.close()

    async def _write(self) -> None:
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while self._outgoing:
                    await self._socket.send(next_piece(self._outgoing))
        except ConnectionClosed:
            return  # the reader notices too
