"""The HTTP client: connections that are kept, and peers that break off."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from common.errors import NoResponse
from common.http.client import ClientSettings, HttpClient, HttpConnection
from tests.kit.network.kept_connections import kept_connections
from tests.kit.waiting import PATIENCE_S

pytestmark = pytest.mark.timeout(180, func_only=True)

PATIENT = ClientSettings(connect_s=PATIENCE_S)
REQUEST = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
WHOLE = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi"


@asynccontextmanager
async def peer(response: bytes, *, then_close: bool = False) -> AsyncIterator[str]:
    """The address of a peer that answers every request with these bytes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(response)
                if then_close:
                    break
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"tcp:127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def body_of(connection: HttpConnection) -> bytes:
    await connection.ask(REQUEST)
    body = connection.take()
    while not connection.complete:
        if not connection.readable:
            await connection.more()
        body += connection.take()
    return body


async def test_connection_is_kept_for_the_next_request() -> None:
    client = HttpClient(PATIENT)
    async with peer(WHOLE) as address:
        assert client.idle(address) is None
        connection = await client.connect(address)
        assert await body_of(connection) == b"hi"
        connection.let_go()
        again = client.idle(address)
        assert again is connection
        assert await body_of(again) == b"hi"
        again.let_go()
        client.close()
        assert kept_connections(client) == 0


@pytest.mark.parametrize(
    ("length", "kept"), [(b"content-length: 5", 1), (b"transfer-encoding: chunked", 0)]
)
async def test_connection_is_not_kept_after_a_head_whose_stream_may_go_on(
    length: bytes, kept: int
) -> None:
    client = HttpClient(PATIENT)
    async with peer(b"HTTP/1.1 200 OK\r\n%s\r\n\r\n" % length) as address:
        connection = await client.connect(address)
        await connection.ask(REQUEST.replace(b"GET", b"HEAD"), head_only=True)
        assert connection.complete
        connection.let_go()
        assert kept_connections(client) == kept
        client.close()


async def test_answer_that_was_broken_off_here_is_not_taken_for_one_that_has_ended() -> None:
    client = HttpClient(PATIENT)
    async with peer(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nhalf") as address:
        connection = await client.connect(address)
        await connection.ask(REQUEST)
        connection.fail("its time is over")
        await asyncio.sleep(0.01)  # the transport says that it is closed
        assert not connection.complete
        with pytest.raises(NoResponse, match="its time is over"):
            await connection.more()


async def test_connection_is_not_kept_when_the_peer_closes_it() -> None:
    client = HttpClient(PATIENT)
    response = b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nto the end"
    async with peer(response, then_close=True) as address:
        connection = await client.connect(address)
        assert await body_of(connection) == b"to the end"
        connection.let_go()
        assert kept_connections(client) == 0


async def test_error_shows_whether_the_peer_may_have_begun() -> None:
    client = HttpClient(PATIENT)
    async with peer(
        b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf", then_close=True
    ) as address:
        connection = await client.connect(address)
        with pytest.raises(NoResponse, match="closed the connection") as begun:
            await body_of(connection)
        connection.let_go()
    with pytest.raises(NoResponse) as refused:
        await client.connect(address)
    assert begun.value.sent
    assert not refused.value.sent


@pytest.mark.parametrize(
    ("response", "why"),
    [
        (b"HTTP/1.1 101 Switching Protocols\r\n\r\n", "no valid HTTP"),
        (b"SSH-2.0\r\n\r\n", "no valid HTTP"),
        (b"HTTP/1.1 200 OK\r\nx: " + b"y" * 2000 + b"\r\n\r\n", "headers"),
        (b"HTTP/2.0 200 OK\r\ncontent-length: 0\r\n\r\n", "HTTP/2.0"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: %b2\r\n\r\nhi" % (b"0" * 500), "Content-Length"),
        (
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
            "transfer encoding gzip",
        ),
        (b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 2000 + b"\r\n", "headers"),
    ],
)
async def test_response_that_is_not_allowed_breaks_off(response: bytes, why: str) -> None:
    client = HttpClient(replace(PATIENT, max_head_bytes=1024))
    async with peer(response) as address:
        connection = await client.connect(address)
        with pytest.raises(NoResponse, match=why):
            await body_of(connection)
        connection.let_go()


async def test_the_named_trailers_are_kept() -> None:
    client = HttpClient(replace(PATIENT, trailers=frozenset({b"x-time"})))
    chunked = (
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n"
        b"X-Other: 1\r\nX-Time: 7 ms\r\n\r\n"
    )
    async with peer(chunked) as address:
        connection = await client.connect(address)
        assert await body_of(connection) == b"hi"
        assert connection.trailers == {b"x-time": b"7 ms"}
        assert [name for name, _ in connection.headers] == [b"transfer-encoding"]
        connection.let_go()
        client.close()


async def test_white_space_behind_a_header_is_no_part_of_its_value() -> None:
    client = HttpClient(PATIENT)
    async with peer(b"HTTP/1.1 200 OK\r\ncontent-length: 2 \t\r\nx-a: b \r\n\r\nhi") as address:
        connection = await client.connect(address)
        assert await body_of(connection) == b"hi"
        assert connection.headers == [(b"content-length", b"2"), (b"x-a", b"b")]
        connection.let_go()
        client.close()
