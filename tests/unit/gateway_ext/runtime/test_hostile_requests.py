"""What a function's own port makes of requests that are ambiguous, endless or unusual."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from gateway_ext.runtime import connection
from gateway_ext.runtime.connection import ConnectionSite, RequestHead, ServerConnection
from tests.kit.network.hostile_requests import (
    REFUSED,
    SERVED,
    status_of,
    statuses_behind_an_upgrade,
)
from tests.kit.outcomes import awaited_outcome
from tests.kit.processes.runtime_process import Running, runtime

pytestmark = pytest.mark.timeout(180, func_only=True)


@pytest.fixture(scope="module")
def function() -> Iterator[Running]:
    with runtime("def handle(event, context):\n    return event.body\n") as running:
        yield running


async def test_ambiguous_or_endless_request_is_refused(function: Running) -> None:
    wrong = []
    for hostile in REFUSED:
        status = await awaited_outcome(status_of(function.path, b"POST /", hostile))
        if status not in hostile.statuses:
            wrong.append((hostile.name, status))
    assert wrong == []


async def test_unusual_request_is_served(function: Running) -> None:
    statuses = {
        served.name: await awaited_outcome(status_of(function.path, b"POST /", served))
        for served in SERVED
    }
    assert statuses == {served.name: 200 for served in SERVED}


async def test_request_behind_an_unknown_upgrade_is_answered(function: Running) -> None:
    assert await statuses_behind_an_upgrade(function.path, b"POST /") == [200, 200]


def silent_site() -> ConnectionSite:
    """Answers nothing: a call lasts until its client leaves."""

    def begin(head: RequestHead, body: bytes, connection: ServerConnection) -> None:
        del head, body, connection

    return ConnectionSite(
        begin, lambda: None, max_connections=4, max_body_bytes=1000, read_timeout_s=0.0
    )


@asynccontextmanager
async def connections_to(
    site: ConnectionSite, *sent: bytes
) -> AsyncIterator[list[asyncio.StreamReader]]:
    """Clients that connect one after the other, each of which sends its own bytes."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: ServerConnection(site), "127.0.0.1", 0)
    readers, writers = [], []
    for data in sent:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(data)
        await asyncio.sleep(0.02)
        readers.append(reader)
        writers.append(writer)
    try:
        yield readers
    finally:
        for writer in writers:
            writer.close()
        server.close()


CALL = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


async def test_connection_that_waits_makes_room_and_one_with_a_call_does_not() -> None:
    async with connections_to(silent_site(), b"", CALL, b"", CALL, b"", CALL) as readers:
        assert await readers[0].read() == b""
        assert await readers[2].read() == b""
        assert not any(readers[number].at_eof() for number in (1, 3, 5))


async def test_unused_connection_and_endless_head_are_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "_IDLE_S", 0.05)
    monkeypatch.setattr(connection, "_HEAD_S", 0.05)
    async with connections_to(silent_site(), b"", b"GET / HT") as (unused, endless):
        assert await unused.read() == b""
        assert (await endless.read()).startswith(b"HTTP/1.1 408 ")
