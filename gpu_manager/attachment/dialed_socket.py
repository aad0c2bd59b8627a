"""Adapts a websocket to a scheduler to the interface of a message line's socket."""

from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from common.frames.frame_line import LineBroken
from scheduler.api import BadValue


class DialedSocket:
    """Carries binary messages; raises BadValue if the scheduler sends text."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket

    async def receive(self) -> bytes:
        """See MessageSocket."""
        try:
            data = await self._socket.recv()
        except ConnectionClosed as error:
            raise LineBroken(str(error)) from error
        if not isinstance(data, bytes):
            raise BadValue("received a text message; messages are binary")
        return data

    async def send(self, data: bytes) -> None:
        """See MessageSocket."""
        try:
            await self._socket.send(data)
        except ConnectionClosed as error:
            raise LineBroken(str(error)) from error

    async def close(self) -> None:
        """See MessageSocket."""
        await self._socket.close()

    def abort(self) -> None:
        """See MessageSocket."""
        self._socket.transport.abort()
