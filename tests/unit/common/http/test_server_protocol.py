"""What a caller may send before a request begins."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from common.http.asgi import App, ClientWatch, Receive, Scope, Send, send_text, watch_in
from common.http.server import listen, serving
from common.http.server_protocol import MOST_PIPELINED, Limits
from tests.kit.waiting import eventually

pytestmark = pytest.mark.timeout(180, func_only=True)

Peer = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def path_of(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the path, when the body is read."""
    while (await receive()).get("more_body"):
        pass
    await send_text(send, 200, scope["path"])


@asynccontextmanager
async def peer(
    app: App = path_of, *, head_s: float = 30.0, first: bytes = b""
) -> AsyncIterator[Peer]:
    """A connection to a server that answers so.

    What is sent `first` is there before the server waits for it: it cannot come late.
    """
    listener = listen("127.0.0.1", 0)
    client = socket.create_connection(listener.getsockname())
    client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    client.sendall(first)
    async with serving(app, listener, drain_s=1.0, limits=Limits(head_s=head_s)):
        reader, writer = await asyncio.open_connection(sock=client)
        try:
            yield reader, writer
        finally:
            writer.close()
    listener.close()


async def answer(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    return head.partition(b"\r\n")[0] + b" " + await reader.readexactly(length)


async def test_requests_follow_each_other_on_one_connection() -> None:
    async with peer() as (reader, writer):
        for part in (b"GET /a HTTP/1.1\r\nhost: x\r\n\r\n", b"GET /b HT", b"TP/1.1\r\n\r\n"):
            writer.write(part)
            await asyncio.sleep(0.02)
        assert await answer(reader) == b"HTTP/1.1 200 OK /a"
        assert await answer(reader) == b"HTTP/1.1 200 OK /b"


async def test_a_long_body_is_no_long_head() -> None:
    async with peer() as (reader, writer):
        writer.write(b"POST /a HTTP/1.1\r\ncontent-length: 1000000\r\n\r\n" + b"x" * 1_000_000)
        assert await answer(reader) == b"HTTP/1.1 200 OK /a"


async def test_a_head_without_end_is_refused() -> None:
    async with peer() as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nx: ")
        for _ in range(9):
            writer.write(b"y" * 8192)
            await asyncio.sleep(0.01)
        assert (await reader.read(12)) == b"HTTP/1.1 431"
        await reader.read()


CHUNKED = b"POST /a HTTP/1.1\r\ntransfer-encoding: chunked\r\nx-a: 1\r\n\r\n2\r\nhi\r\n0\r\n"


async def headers_of(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the names of the headers, when the body is read."""
    while (await receive()).get("more_body"):
        pass
    await send_text(send, 200, b" ".join(name for name, _ in scope["headers"]).decode())


async def test_a_trailer_is_no_header() -> None:
    async with peer(headers_of) as (reader, writer):
        writer.write(CHUNKED + b"x-b: 2\r\n\r\n")  # at once: before the application looks
        assert await answer(reader) == b"HTTP/1.1 200 OK transfer-encoding x-a"


async def test_trailers_without_end_are_not_collected() -> None:
    async with peer() as (reader, writer):
        writer.write(CHUNKED)
        for _ in range(9):
            writer.write(b"x: %b\r\n" % (b"y" * 8192))
            await asyncio.sleep(0.01)
        assert (await reader.read()).startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize("begin", [b"", b"GET / HTTP/1.1\r\nx"])
async def test_a_head_that_never_comes_is_not_waited_for(begin: bytes) -> None:
    async with peer(head_s=0.2, first=begin) as (reader, _):
        assert await reader.read() == b""


async def test_a_connection_that_waits_between_requests_is_kept() -> None:
    async with peer(head_s=0.2, first=b"GET /a HTTP/1.1\r\n\r\n") as (reader, writer):
        assert await answer(reader) == b"HTTP/1.1 200 OK /a"
        await asyncio.sleep(0.5)
        writer.write(b"GET /b HTTP/1.1\r\n\r\n")
        assert await answer(reader) == b"HTTP/1.1 200 OK /b"


async def slow_path_of(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the path, after a moment."""
    del receive
    await asyncio.sleep(0.2)
    await send_text(send, 200, scope["path"])


async def test_request_before_a_malformed_one_is_answered_and_nothing_behind_it() -> None:
    async with peer(slow_path_of) as (reader, writer):
        writer.write(b"GET /a HTTP/1.1\r\nhost: x\r\n\r\n" + b"nonsense\r\n\r\n")
        whole = await reader.read()
        assert whole.startswith(b"HTTP/1.1 200 ")
        assert whole.endswith(b"\r\n\r\n/a")


async def test_application_hears_that_a_malformed_body_will_not_go_on() -> None:
    heard: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        del scope
        while (message := await receive())["type"] == "http.request":
            heard.append(message["body"].decode())
        heard.append(message["type"])
        await send_text(send, 200, "too late")

    async with peer(app) as (reader, writer):
        writer.write(
            b"POST /a HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n"
        )
        await eventually(lambda: heard == ["hi"])
        writer.write(b"nonsense\r\n")
        answer_to_it = await reader.read()
        assert answer_to_it.startswith(b"HTTP/1.1 400 ")
        assert b"too late" not in answer_to_it
        assert heard == ["hi", "http.disconnect"]


async def test_connection_ends_with_an_answer_that_comes_before_the_body() -> None:
    async with peer(slow_path_of) as (reader, writer):
        writer.write(b"POST /a HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\nhi")
        whole = await reader.read()
        assert whole.startswith(b"HTTP/1.1 200 ")
        assert b"\r\nconnection: close\r\n" in whole


async def test_connection_that_sends_line_ends_alone_is_not_kept() -> None:
    first = b"GET /a HTTP/1.1\r\nhost: x\r\n\r\n"
    async with peer(head_s=0.2, first=first) as (reader, writer):
        assert await answer(reader) == b"HTTP/1.1 200 OK /a"
        writer.write(b"\r\n")
        assert await reader.read() == b""


async def test_more_requests_at_once_than_may_wait_are_not_all_read() -> None:
    async with peer(slow_path_of) as (reader, writer):
        writer.write(b"GET /a HTTP/1.1\r\nhost: x\r\n\r\n" * 3)
        for _ in range(3):
            assert await answer(reader) == b"HTTP/1.1 200 OK /a"

    async with peer() as (reader, writer):
        writer.write(b"GET /a HTTP/1.1\r\nhost: x\r\n\r\n" * 1000)
        answered = (await reader.read()).count(b"HTTP/1.1 200 ")
        assert 1 <= answered <= MOST_PIPELINED + 1


async def test_connection_without_room_is_told_when_to_come_again() -> None:
    begun, may_end = asyncio.Event(), asyncio.Event()

    async def held(scope: Scope, receive: Receive, send: Send) -> None:
        begun.set()
        await may_end.wait()
        await path_of(scope, receive, send)

    listener = listen("127.0.0.1", 0)
    async with serving(held, listener, drain_s=1.0, limits=Limits(connections=1)):
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(b"GET /first HTTP/1.1\r\nhost: x\r\n\r\n")
        await begun.wait()
        late_reader, late_writer = await asyncio.open_connection(*listener.getsockname())
        head = await late_reader.readuntil(b"\r\n\r\n")
        late_writer.close()
        assert head.startswith(b"HTTP/1.1 503 ")
        assert b"\r\nretry-after: 1\r\n" in head
        may_end.set()
        assert await answer(reader) == b"HTTP/1.1 200 OK /first"
        writer.close()
    listener.close()


async def test_watched_client_is_said_to_have_left_when_its_connection_closes() -> None:
    left, began = asyncio.Event(), asyncio.Event()

    async def watching(scope: Scope, receive: Receive, send: Send) -> None:
        del receive, send
        watch = watch_in(scope)
        assert watch is not None, "our server offers it"
        watch.start(left.set)
        began.set()
        await left.wait()

    async with peer(watching) as (_, writer):
        writer.write(b"GET /a HTTP/1.1\r\nhost: x\r\n\r\n")
        await began.wait()
        assert not left.is_set()
        writer.close()
        await left.wait()


async def test_watched_client_is_said_to_have_left_when_its_whole_body_was_long() -> None:
    left, began = asyncio.Event(), asyncio.Event()

    async def watching(scope: Scope, receive: Receive, send: Send) -> None:
        del send
        while (await receive())["more_body"]:
            pass
        watch = watch_in(scope)
        assert watch is not None, "our server offers it"
        watch.start(left.set)
        began.set()
        await left.wait()

    body = bytes(200_000)
    whole = b"POST /a HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    async with peer(watching, first=whole) as (_, writer):
        await began.wait()
        writer.close()
        await left.wait()


async def test_watched_client_is_not_said_to_have_left_when_it_leaves_after_the_answer() -> None:
    found: list[str] = []

    async def watching(scope: Scope, receive: Receive, send: Send) -> None:
        watch = watch_in(scope)
        assert watch is not None, "our server offers it"
        watch.start(lambda: found.append("left"))
        await path_of(scope, receive, send)
        found.append("answered")

    async with peer(watching) as (reader, writer):
        writer.write(b"GET /a HTTP/1.1\r\nhost: x\r\n\r\n")
        assert await answer(reader) == b"HTTP/1.1 200 OK /a"
    assert found == ["answered"]


def test_watch_calls_at_once_when_the_client_had_left_before() -> None:
    watch, found = ClientWatch(), list[str]()
    watch.left()
    watch.start(lambda: found.append("left"))
    assert found == ["left"]


def test_watch_calls_nothing_when_it_was_stopped() -> None:
    watch, found = ClientWatch(), list[str]()
    watch.start(lambda: found.append("left"))
    watch.stop()
    watch.left()
    assert not found
