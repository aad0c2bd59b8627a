"""A function instance that is no process: it reads requests itself and answers as a test says."""

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from common.time_limits import time_limit
from gateway_ext.model import Endpoint
from tests.kit.waiting import eventually


@dataclass
class Got:
    """A request as it arrived; `body` is what came of it before it was answered."""

    method: str
    target: str
    headers: list[tuple[str, str]]
    reader: asyncio.StreamReader
    body: bytes = b""

    def header(self, name: str) -> str | None:
        """Every value of it, joined; None where it was not sent."""
        values = [value for key, value in self.headers if key == name]
        return ",".join(values) if values else None

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it comes."""
        if self.header("transfer-encoding") == "chunked":
            while length := int(await self.reader.readline(), 16):
                piece = await self.reader.readexactly(length)
                await self.reader.readexactly(2)
                yield piece
            await self.reader.readexactly(2)
            return
        left = int(self.header("content-length") or 0)
        while left:
            piece = await self.reader.read(min(left, 65536))
            if not piece:
                raise asyncio.IncompleteReadError(b"", left)
            left -= len(piece)
            yield piece

    async def pause(self, seconds: float) -> None:
        """Wait; ConnectionResetError as soon as the gateway has left."""
        try:
            async with time_limit(seconds):
                await self.reader.read(1)
        except TimeoutError:
            return
        raise ConnectionResetError

    async def whole(self) -> bytes:
        """All of the body."""
        self.body = b"".join([piece async for piece in self.pieces()])
        return self.body


Behaviour = Callable[[Got, asyncio.StreamWriter], Awaitable[None]]


@dataclass
class FakeFunction:
    """One instance: what it got, and how many connections it has had and has.

    It answers health requests with `health`, else 200; they are not in `got`.
    """

    endpoint: Endpoint
    health: Behaviour | None = None
    got: list[Got] = field(default_factory=list)
    connections: int = 0
    writers: set[asyncio.StreamWriter] = field(default_factory=set)
    server: asyncio.Server | None = None

    async def close(self) -> None:
        """Break off everything, and answer nobody."""
        if self.server is not None:
            self.server.close()
        for writer in list(self.writers):
            writer.transport.abort()
        await eventually(lambda: not self.writers, "all connections are broken off")


@contextlib.asynccontextmanager
async def a_function(
    behave: Behaviour,
    name: str = "i0",
    *,
    tcp: bool = False,
    prefix: str = "",
    backlog: int = 100,
) -> AsyncIterator[FakeFunction]:
    """An instance that answers every request with `behave`, one after the other."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        fake.connections += 1
        fake.writers.add(writer)
        try:
            while True:
                got = await _request(reader)
                if got.target == "/_/health":
                    await (fake.health or says())(got, writer)
                    continue
                fake.got.append(got)
                await behave(got, writer)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            fake.writers.discard(writer)
            writer.close()

    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "s")
        fake = FakeFunction(Endpoint(name, f"unix:{path}", prefix))
        if tcp:
            fake.server = await asyncio.start_server(serve, "127.0.0.1", 0)
            port = fake.server.sockets[0].getsockname()[1]
            fake.endpoint = Endpoint(name, f"tcp:127.0.0.1:{port}", prefix)
        else:
            fake.server = await asyncio.start_unix_server(serve, path, backlog=backlog)
        try:
            yield fake
        finally:
            await fake.close()


async def _request(reader: asyncio.StreamReader) -> Got:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    method, target, _ = head[0].split(" ")
    lines = [line.partition(": ") for line in head[1:] if line]
    return Got(method, target, [(name.lower(), value) for name, _, value in lines], reader)


def says(
    body: bytes = b"ok", status: int = 200, headers: str = "", *, delay_s: float = 0.0
) -> Behaviour:
    """Reads the body, then answers so."""

    async def behave(got: Got, writer: asyncio.StreamWriter) -> None:
        await got.whole()
        await got.pause(delay_s)
        length = f"content-length: {len(body)}\r\n"
        head = f"HTTP/1.1 {status} X\r\n{headers}{length}\r\n".encode()
        writer.write(head if got.method == "HEAD" else head + body)

    return behave


def writes(*pieces: bytes | float, close: bool = False) -> Behaviour:
    """Reads the body, then writes these bytes as they are; numbers are pauses in seconds."""

    async def behave(got: Got, writer: asyncio.StreamWriter) -> None:
        await got.whole()
        for piece in pieces:
            if isinstance(piece, float):
                await got.pause(piece)
            else:
                writer.write(piece)
                await writer.drain()
        if close:
            writer.close()
            raise ConnectionResetError

    return behave


async def echoes(got: Got, writer: asyncio.StreamWriter) -> None:
    """Sends every piece back as it comes."""
    writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
    async for piece in got.pieces():
        writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        await writer.drain()
    writer.write(b"0\r\n\r\n")
