"""A GPU manager's websocket that was accepted, as a message line uses it."""

import asyncio

from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from common.frames.frame_line import LineBroken
from common.http.buffered_websocket import KNOWN_CLIENT

_CLOSE_S = 1.0
_ENDED = RuntimeError, OSError, WebSocketDisconnect


class AcceptedSocket:
    """Carries binary messages; a text message ends it."""

    def __init__(self, websocket: WebSocket) -> None:
        self._websocket = websocket
        self._aborted = False

    def confirm(self) -> None:
        """The manager is known: it keeps its connection, and may send large messages."""
        known = self._websocket.scope.get("extensions", {}).get(KNOWN_CLIENT)
        if known is not None:  # absent under a server that treats all clients alike
            known["confirm"]()

    async def receive(self) -> bytes:
        """See MessageSocket."""
        try:
            message = await self._websocket.receive()
        except _ENDED as error:
            raise LineBroken(str(error)) from error
        if message["type"] == "websocket.disconnect":
            raise LineBroken(f"the socket was closed ({message.get('code')})")
        data = message.get("bytes")
        if not isinstance(data, bytes):
            raise LineBroken("a text message came; messages are binary")
        return data

    async def send(self, data: bytes) -> None:
        """See MessageSocket."""
        try:
            await self._websocket.send_bytes(data)
        except _ENDED as error:
            raise LineBroken(str(error)) from error

    async def close(self) -> None:
        """See MessageSocket; waits a moment for the other end to read pending messages."""
        if self._aborted or self._websocket.application_state is not WebSocketState.CONNECTED:
            return
        try:
            async with asyncio.timeout(_CLOSE_S):
                await self._websocket.close()
        except (*_ENDED, TimeoutError):
            return

    def abort(self) -> None:
        """See MessageSocket: returning from the ASGI application closes the connection."""
        self._aborted = True
