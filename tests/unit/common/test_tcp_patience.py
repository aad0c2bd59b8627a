"""The time limit of a TCP connection moves on while the other host answers and nobody reads."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from common.tcp import TcpPatience
from tests.kit.waiting import eventually

SILENCE_S = 4
MORE_THAN_FITS = bytes(8 << 20)


@asynccontextmanager
async def watched_line() -> AsyncIterator[tuple[asyncio.StreamWriter, asyncio.StreamReader]]:
    """A watched end of a connection, and what the other end reads when it is asked to."""
    ends: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()
    server = await asyncio.start_server(
        lambda reader, writer: ends.put_nowait((reader, writer)), "127.0.0.1", 0
    )
    async with server:
        _, ours = await asyncio.open_connection(*server.sockets[0].getsockname())
        theirs, their_writer = await ends.get()
        try:
            yield ours, theirs
        finally:
            ours.transport.abort()
            their_writer.transport.abort()


def limit_s(writer: asyncio.StreamWriter) -> float:
    connection = writer.get_extra_info("socket")
    limit_ms: int = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
    return limit_ms / 1000


async def test_limit_moves_on_while_nobody_reads_and_returns_once_all_was_read() -> None:
    async with watched_line() as (ours, theirs):
        TcpPatience(SILENCE_S).watch(ours.transport)
        assert limit_s(ours) == SILENCE_S
        ours.write(MORE_THAN_FITS)
        await eventually(lambda: limit_s(ours) > SILENCE_S + 5, "a limit that moves on")
        assert not ours.transport.is_closing()
        await theirs.readexactly(len(MORE_THAN_FITS))
        await eventually(lambda: limit_s(ours) == SILENCE_S, "the limit as it was")


async def test_idle_connection_keeps_its_limit_and_a_closed_one_is_forgotten() -> None:
    patience = TcpPatience(SILENCE_S)
    async with watched_line() as (ours, theirs):
        patience.watch(ours.transport)
        ours.write(b"a few bytes")
        await theirs.readexactly(len(b"a few bytes"))
        await asyncio.sleep(2.5)
        assert limit_s(ours) == SILENCE_S
        assert patience.watched == 1
    await eventually(lambda: patience.watched == 0, "no connection is watched any more")
