"""Relays the bytes of a data channel from another node to a worker's socket, and back."""

import asyncio
import socket

from common.tasks import until_first

_PIECE_BYTES = 1 << 20


async def relay(one: socket.socket, other: socket.socket) -> None:
    """Copy bytes in both directions until either side closes; both sockets are non-blocking."""
    await until_first(_copy(one, other), _copy(other, one))


async def _copy(source: socket.socket, sink: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    room = memoryview(bytearray(_PIECE_BYTES))
    try:
        while count := await loop.sock_recv_into(source, room):
            await loop.sock_sendall(sink, room[:count])
    except OSError:
        return  # the side has closed, which ends the channel
