"""How the HTTP server ends."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from common.http.asgi import App, Receive, Scope, Send, send_text, watch_in
from common.http.server import listen, serving

pytestmark = pytest.mark.timeout(180, func_only=True)

_FOR_EVER_S = 3600.0
_GET = b"GET %b HTTP/1.1\r\nhost: x\r\n\r\n"

Peer = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def ask_a_server_that_stops(work_s: float, drain_s: float) -> bytes:
    """What a client receives whose request takes `work_s` when the server is stopped."""
    begun = asyncio.Event()

    async def work(scope: Scope, receive: Receive, send: Send) -> None:
        del scope, receive
        begun.set()
        await asyncio.sleep(work_s)
        await send_text(send, 200, "done")

    listener = listen("127.0.0.1", 0)
    address = listener.getsockname()
    async with serving(work, listener, drain_s):
        _, idle = await asyncio.open_connection(*address)
        reader, writer = await asyncio.open_connection(*address)
        writer.write(_GET % b"/")
        await begun.wait()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(*address)
    received = await reader.read()
    writer.close()
    idle.close()
    return received


@asynccontextmanager
async def stopped_at_once(app: App) -> AsyncIterator[Callable[[], Awaitable[Peer]]]:
    """Makes connections to a server of this application, which is stopped without any grace."""
    listener = listen("127.0.0.1", 0)
    writers: list[asyncio.StreamWriter] = []

    async def connect() -> Peer:
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writers.append(writer)
        return reader, writer

    try:
        async with serving(app, listener, drain_s=0.0):
            yield connect
    finally:
        for writer in writers:
            writer.close()


async def test_stopping_waits_for_a_request_in_flight() -> None:
    received = await ask_a_server_that_stops(work_s=0.2, drain_s=_FOR_EVER_S)
    assert received.startswith(b"HTTP/1.1 200 ")
    assert received.endswith(b"done")


async def test_request_that_outlasts_the_drain_time_is_answered_503_and_is_no_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        received = await ask_a_server_that_stops(work_s=_FOR_EVER_S, drain_s=0.1)
    assert received.startswith(b"HTTP/1.1 503 ")
    assert b"\r\nretry-after: 1\r\n" in received
    assert b"\r\nconnection: close\r\n" in received
    assert [record.getMessage() for record in caplog.records] == [
        "cutting 1 requests that did not end in 0.1 s"
    ]


async def test_answer_that_has_begun_breaks_off_when_its_server_stops(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def stream(scope: Scope, receive: Receive, send: Send) -> None:
        del scope, receive
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"first", "more_body": True})
        await asyncio.sleep(_FOR_EVER_S)

    async with stopped_at_once(stream) as connect:
        reader, writer = await connect()
        writer.write(_GET % b"/")
        await reader.readuntil(b"first\r\n")
    assert await reader.read() == b""  # and no last chunk
    assert [record.levelname for record in caplog.records] == ["WARNING"]


async def test_request_whose_body_is_under_way_is_answered_503_when_its_server_stops() -> None:
    begun = asyncio.Event()

    async def reading(scope: Scope, receive: Receive, send: Send) -> None:
        del scope, send
        begun.set()
        while (await receive())["type"] == "http.request":
            pass

    async with stopped_at_once(reading) as connect:
        reader, writer = await connect()
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\nbegun")
        await begun.wait()
    assert (await reader.read()).startswith(b"HTTP/1.1 503 ")


async def test_requests_are_cut_in_the_order_of_their_arrival_each_with_its_own_answer() -> None:
    paths = [f"/{number}" for number in range(24)]
    begun: asyncio.Queue[str] = asyncio.Queue()
    cut: list[str] = []

    async def until_cut(scope: Scope, receive: Receive, send: Send) -> None:
        del receive, send
        begun.put_nowait(scope["path"])
        try:
            await asyncio.sleep(_FOR_EVER_S)
        finally:
            cut.append(scope["path"])

    async with stopped_at_once(until_cut) as connect:
        readers = []
        for path in paths:
            reader, writer = await connect()
            readers.append(reader)
            writer.write(_GET % path.encode())
            assert await begun.get() == path
    assert cut == paths
    for reader in readers:
        assert (await reader.read()).startswith(b"HTTP/1.1 503 ")


async def test_requests_behind_a_cut_one_are_not_begun() -> None:
    begun: list[str] = []
    arrived = asyncio.Event()

    async def until_cut(scope: Scope, receive: Receive, send: Send) -> None:
        del receive, send
        begun.append(scope["path"])
        arrived.set()
        await asyncio.sleep(_FOR_EVER_S)

    async with stopped_at_once(until_cut) as connect:
        reader, writer = await connect()
        writer.write(_GET % b"/first" + _GET % b"/second")
        await arrived.wait()
    assert (await reader.read()).startswith(b"HTTP/1.1 503 ")
    assert begun == ["/first"]


async def test_application_that_answers_when_it_is_cut_is_heard() -> None:
    begun = asyncio.Event()

    async def last_words(scope: Scope, receive: Receive, send: Send) -> None:
        del scope, receive
        begun.set()
        try:
            await asyncio.sleep(_FOR_EVER_S)
        except asyncio.CancelledError:
            await send_text(send, 504, "it took too long")

    async with stopped_at_once(last_words) as connect:
        reader, writer = await connect()
        writer.write(_GET % b"/")
        await begun.wait()
    assert (await reader.read()).startswith(b"HTTP/1.1 504 ")


async def test_cancellation_that_is_not_the_servers_is_still_a_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def cancelled(scope: Scope, receive: Receive, send: Send) -> None:
        del scope, receive, send
        raise asyncio.CancelledError

    async with stopped_at_once(cancelled) as connect:
        reader, writer = await connect()
        writer.write(_GET % b"/")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 500 ")
    assert "Exception in ASGI application" in caplog.text


async def test_client_of_a_cut_request_is_not_said_to_have_left_before_its_answer() -> None:
    heard: list[str] = []
    begun = asyncio.Event()

    async def watching(scope: Scope, receive: Receive, send: Send) -> None:
        del receive, send
        watch = watch_in(scope)
        assert watch is not None, "our server offers it"
        watch.start(lambda: heard.append("left"))
        begun.set()
        try:
            await asyncio.sleep(_FOR_EVER_S)
        finally:
            heard.append("cut")
            watch.stop()

    async with stopped_at_once(watching) as connect:
        reader, writer = await connect()
        writer.write(_GET % b"/")
        await begun.wait()
    assert (await reader.read()).startswith(b"HTTP/1.1 503 ")
    assert heard == ["cut"]
