"""One websocket of a GPU manager: whole messages in, and out in order by a task of its own."""

import asyncio
from collections import deque
from types import TracebackType
from typing import Self

from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from scheduler.stream import next_piece

_CLOSE_S = 1.0
_Broken = RuntimeError, OSError, WebSocketDisconnect


class LineBroken(Exception):
    """Nothing comes or goes here any more; the text says why."""


class Line:
    """A websocket that was accepted; `async with` sends what is given to `send`, and closes it."""

    def __init__(self, websocket: WebSocket) -> None:
        self._websocket = websocket
        self._greetings: deque[bytes] = deque()
        self._outgoing: deque[bytes] = deque()
        self._wake = asyncio.Event()
        self._writer: asyncio.Task[None] | None = None
        self._hung_up = False

    async def receive(self) -> bytes:
        """The next message; LineBroken where there is none, or one of text."""
        try:
            message = await self._websocket.receive()
        except _Broken as error:
            raise LineBroken(str(error)) from error
        if message["type"] == "websocket.disconnect":
            raise LineBroken(f"it was closed ({message.get('code')})")
        data = message.get("bytes")
        if self._hung_up:
            raise LineBroken("another one took its place")
        if not isinstance(data, bytes):
            raise LineBroken("text came, where only bytes do")
        return data

    def greet(self, data: bytes) -> None:
        """Send this in a piece of its own, before any message."""
        self._greetings.append(data)
        self._wake.set()

    def send(self, data: bytes) -> None:
        """Send this after all that was given before, perhaps in one piece with it."""
        self._outgoing.append(data)
        self._wake.set()

    def hang_up(self) -> None:
        """Take nothing in any more, and close as soon as what was given is sent."""
        self._hung_up = True
        self._wake.set()

    async def flush(self) -> None:
        """Send what was given, and nothing after it."""
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
        await self._close()

    async def _write(self) -> None:
        try:
            while self._greetings or self._outgoing or not self._hung_up:
                await self._wake.wait()
                self._wake.clear()
                while self._greetings:
                    await self._websocket.send_bytes(self._greetings.popleft())
                while self._outgoing:
                    await self._websocket.send_bytes(next_piece(self._outgoing))
        except _Broken:
            return  # the reader notices too
        await self._close()

    async def _close(self) -> None:
        if self._websocket.application_state is not WebSocketState.CONNECTED:
            return
        try:
            async with asyncio.timeout(_CLOSE_S):  # the other end may read nothing any more
                await self._websocket.close()
        except (*_Broken, TimeoutError):
            return
