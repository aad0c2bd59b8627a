"""Peers over TCP that live but do not read for longer than a silent host is waited for."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from common.http.client import HttpClient

pytestmark = pytest.mark.timeout(180, func_only=True)

BODY = bytes(6 << 20)  # more than what the kernel's buffers of both ends take
HEAD = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(BODY)
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"


@asynccontextmanager
async def sleeper(reads: asyncio.Event) -> AsyncIterator[str]:
    """The address of a peer that reads its request only once `reads` is set."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reads.wait()
        await reader.readexactly(len(HEAD) + len(BODY))
        writer.write(ANSWER)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"tcp:127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_peer_that_does_not_read_for_long_gets_the_whole_body() -> None:
    reads = asyncio.Event()
    client = HttpClient()
    async with sleeper(reads) as address:
        connection = await client.connect(address)
        answer = connection.ask(HEAD)
        connection.write(BODY)
        _, waiting = await asyncio.wait([answer], timeout=8.0)  # silence is noticed after 4 s
        assert waiting, "the peer has not read its request"
        reads.set()
        await answer
        assert connection.status == 200
        client.close()
