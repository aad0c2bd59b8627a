"""A line of frames whose client writes whatever bytes it likes, and reads what really comes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from struct import pack

from common.stream_upgrade import PROTOCOL, SWITCHED

UPGRADE = b"Host: x\r\nConnection: Upgrade\r\nUpgrade: " + PROTOCOL + b"\r\n\r\n"


def framed(*frames: bytes) -> bytes:
    """These frames as they are sent."""
    return b"".join(pack(">I", len(frame)) + frame for frame in frames)


class RawLine:
    """A client's bare connection, behind the upgrade."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, frame: bytes) -> None:
        """Send a frame, also an empty one."""
        self.writer.write(framed(frame))

    def send_bytes(self, data: bytes) -> None:
        """Send what need be no frame."""
        self.writer.write(data)

    async def receive(self) -> bytes:
        """The next frame."""
        length = int.from_bytes(await self.reader.readexactly(4))
        return await self.reader.readexactly(length)

    async def hung_up(self) -> bool:
        """Wait until the server has closed the connection, whatever it still sends."""
        try:
            while await self.reader.read(65536):
                pass
        except OSError:
            pass
        return True


@asynccontextmanager
async def raw_line(url: str, path: str, *, behind_the_head: bytes = b"") -> AsyncIterator[RawLine]:
    """A line at this path of the server at this http URL; some bytes may come with the head."""
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(f"GET {path} HTTP/1.1\r\n".encode() + UPGRADE + behind_the_head)
        assert await reader.readexactly(len(SWITCHED)) == SWITCHED
        yield RawLine(reader, writer)
    finally:
        writer.transport.abort()
