"""How a connection becomes a line of frames: against servers of ours, and such as answer badly."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvloop

from common.errors import StreamRefused
from common.frame_line import FrameLine, LineBroken
from common.http.asgi import Receive, Scope, Send, send_text
from common.http.server import listen, serving
from common.http.server_protocol import AcceptedLine, Limits
from common.stream_upgrade import SWITCHED, StreamRequest, dial
from tests.kit.network.certificates import self_signed
from tests.kit.network.raw_line import framed, raw_line
from tests.kit.network.tls_door import encrypted
from tests.kit.waiting import eventually

pytestmark = pytest.mark.timeout(180, func_only=True)

MOST = 16 << 20


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    del receive
    await send_text(send, 200, scope["path"])


async def echo(request: StreamRequest, line: AcceptedLine) -> None:
    if request.path == "/unknown":
        line.refuse()
        return
    if request.path == "/fails":
        raise ValueError("the handler failed")
    if request.path != "/stranger":
        line.confirm()
    line.send(dict(request.headers).get(b"x-about", b"nothing"))
    await line.pump(line.send)


@asynccontextmanager
async def server(
    limits: Limits | None = None, handler: Callable[..., object] = echo, drain_s: float = 1.0
) -> AsyncIterator[str]:
    listener = listen("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    async with serving(app, listener, drain_s, streams=handler, limits=limits):  # type: ignore[arg-type]  # handlers of one test take less
        yield url


@asynccontextmanager
async def dialed(path: str, limits: Limits | None = None) -> AsyncIterator[FrameLine]:
    async with server(limits) as url, await dial(url, path, {}, MOST) as line:
        assert await line.receive() == b"nothing"
        yield line


@asynccontextmanager
async def answering(
    *pieces: bytes, closes: bool = True, asked: asyncio.Event | None = None
) -> AsyncIterator[str]:
    """The URL of a server that answers every head with these pieces, one after the other."""

    served: list[asyncio.Task[None]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if asked is not None:
            asked.set()
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(0.001)
        if not closes:
            assert await reader.read() == b""  # until the client has gone
        writer.close()

    def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.append(asyncio.ensure_future(serve(reader, writer)))

    listening = await asyncio.start_server(begin, "127.0.0.1", 0)
    yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    listening.close()
    await asyncio.gather(*served)


# -- a server of ours -----------------------------------------------------------------------------


async def test_frames_return_in_order_when_many_of_any_size_are_sent() -> None:
    sent = [b"%d" % number * (1 + number % 7 * 20_000) for number in range(200)]
    async with dialed("/known") as line:
        for each in sent:
            line.send(each)
        assert [await line.receive() for _ in sent] == sent


@pytest.mark.parametrize("ends", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_line_works_the_same_on_either_event_loop(
    ends: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    sent = [bytes([number]) * (1 + number % 3 * 300_000) for number in range(30)]

    async def scenario() -> None:
        async with dialed("/known") as line:
            for each in sent:
                line.send(each)
            assert line.unsent_bytes > 0
            await asyncio.sleep(0.2)  # much is unread: reading pauses
            assert [await line.receive() for _ in sent] == sent
            taken: list[bytes] = []
            pump = asyncio.ensure_future(line.pump(taken.append))
            await asyncio.sleep(0)
            line.send(b"last")
            await eventually(lambda: taken == [b"last"])
            await line.flush()
            with pytest.raises(LineBroken, match="hung up"):
                await pump

    with asyncio.Runner(loop_factory=ends) as runner:
        runner.run(scenario())


async def test_handler_knows_the_path_the_headers_and_frames_that_came_with_them() -> None:
    async with server() as url:
        line = await dial(f"{url}/front/", "/known", {"X-About": "this"}, MOST)
        async with line:
            assert await line.receive() == b"this"
        async with raw_line(url, "/known", behind_the_head=framed(b"at once")) as raw:
            assert [await raw.receive(), await raw.receive()] == [b"nothing", b"at once"]


async def test_line_breaks_when_a_stranger_sends_a_large_frame() -> None:
    async with dialed("/stranger") as line:
        line.send(bytes(17 << 10))
        with pytest.raises(LineBroken):
            await line.receive()


async def test_line_breaks_when_its_handler_fails(caplog: pytest.LogCaptureFixture) -> None:
    async with server() as url, await dial(url, "/fails", {}, MOST) as line:
        with pytest.raises(LineBroken, match="has closed"):
            await line.receive()
        await eventually(lambda: "the handler failed" in caplog.text, "its failure is logged")


async def test_unknown_path_is_refused_without_an_upgrade() -> None:
    async with server() as url:
        with pytest.raises(StreamRefused, match="there is no such stream") as refused:
            await dial(url, "/unknown", {}, MOST)
    assert refused.value.status == 404


async def test_line_outlasts_the_time_for_a_request() -> None:
    async with dialed("/stranger", Limits(head_s=0.1, keep_alive_s=0)) as line:
        await asyncio.sleep(0.5)
        line.send(b"still here")
        assert await line.receive() == b"still here"


async def test_stranger_makes_room_in_a_crowded_server_and_a_known_client_stays() -> None:
    limits = Limits(connections=2)
    async with server(limits) as url:
        known = await dial(url, "/known", {}, MOST)
        strangers = [await dial(url, "/stranger", {}, MOST) for _ in range(3)]
        for line in (known, *strangers):
            assert await line.receive() == b"nothing"
        with pytest.raises(LineBroken):
            await strangers[0].receive()
        for line in (known, *strangers[1:]):
            line.send(b"still here")
            assert await line.receive() == b"still here"
        for line in (known, *strangers):
            line.abort()


async def test_server_that_ends_sends_what_it_has_and_waits_for_no_line() -> None:
    loop = asyncio.get_running_loop()
    ended: list[str] = []

    async def talk(request: StreamRequest, line: AcceptedLine) -> None:
        try:
            await line.receive()
        finally:
            line.send(b"lost: it has hung up")
            ended.append(request.path)

    async with server(handler=talk, drain_s=120.0) as url:
        lines = [await dial(url, f"/{number}", {}, MOST) for number in range(3)]
        began_s = loop.time()
    assert sorted(ended) == ["/0", "/1", "/2"]
    assert loop.time() - began_s < 25.0
    for line in lines:
        with pytest.raises(LineBroken, match="has closed"):
            await line.receive()
        line.abort()


# -- servers that answer badly --------------------------------------------------------------------


@pytest.mark.parametrize("piece_bytes", [1, 1000])
async def test_answer_is_read_however_its_bytes_are_cut(piece_bytes: int) -> None:
    answer = SWITCHED + framed(b"one", b"two")
    pieces = [answer[at : at + piece_bytes] for at in range(0, len(answer), piece_bytes)]
    async with answering(*pieces) as url, await dial(url, "/", {}, MOST) as line:
        assert [await line.receive(), await line.receive()] == [b"one", b"two"]


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"", "closed the connection before it answered"),
        (SWITCHED[:-2], "closed the connection before it answered"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "speaks no HTTP/1.1"),
        (b"HTTP/1.1 abc\r\n\r\n", "speaks no HTTP/1.1"),
        (b"HTTP/1.0 101 Switching\r\nupgrade: gpufaas-frames\r\n\r\n", "speaks no HTTP/1.1"),
        (SWITCHED.replace(b"gpufaas-frames", b"websocket"), "another protocol"),
        (b"HTTP/1.1 101 Switching Protocols\r\n\r\n", "another protocol"),
        (b"HTTP/1.1 101 S\r\na: " + b"b" * (17 << 10), "headers are too large"),
    ],
)
async def test_line_breaks_when_a_server_answers_badly(answer: bytes, why: str) -> None:
    async with answering(answer) as url:
        with pytest.raises(LineBroken, match=why):
            await dial(url, "/", {}, MOST)


async def test_refusal_has_its_status_and_the_beginning_of_its_text() -> None:
    text = b"you may not" + bytes(5000)
    async with answering(b"HTTP/1.1 403 Forbidden\r\nx: y\r\n\r\n" + text) as url:
        with pytest.raises(StreamRefused, match="403 you may not") as refused:
            await dial(url, "/", {}, MOST)
    assert refused.value.status == 403
    assert len(str(refused.value)) < 300


async def test_connection_is_closed_when_nobody_waits_for_the_answer_any_more() -> None:
    asked = asyncio.Event()
    async with answering(closes=False, asked=asked) as url:
        dialing = asyncio.ensure_future(dial(url, "/", {}, MOST))
        await asked.wait()
        assert not dialing.done()
        dialing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await dialing


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:1",
        "http://127.0.0.1:99999",
        "http://[::1",
        "http://",
        "ftp://127.0.0.1",
        "127.0.0.1:80",
        f"http://{'a' * 70}.example",
        "http://127.0.0.1:1/b c",
        "http://a/\u00fc",
    ],
)
async def test_url_that_leads_nowhere_is_an_error_of_the_system(url: str) -> None:
    with pytest.raises(OSError):  # noqa: PT011 - every system words it otherwise
        await dial(url, "/", {}, MOST)


# -- TLS ------------------------------------------------------------------------------------------


async def test_line_is_encrypted_and_the_server_checked_where_its_url_is_https(
    tmp_path: Path,
) -> None:
    certificate, key = self_signed(tmp_path, "localhost")
    sent = [b"%d" % number * (1 + number % 7 * 20_000) for number in range(50)]
    async with server() as plain, encrypted(plain, certificate, key) as url:
        with pytest.raises(ssl.SSLCertVerificationError):
            await dial(url, "/known", {}, MOST)
        trusting = ssl.create_default_context(cafile=certificate)
        async with await dial(url, "/known", {}, MOST, trusting) as line:
            assert await line.receive() == b"nothing"
            for each in sent:
                line.send(each)
            assert [await line.receive() for _ in sent] == sent
            line.send(b"last")


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("/\r\nX-Admin: yes", {}),
        ("/known", {"Authorization": "Bearer a\nX-Admin: yes"}),
        ("/known", {"X\r\nX-Admin": "yes"}),
    ],
)
async def test_line_is_refused_when_a_header_would_be_two(
    path: str, headers: dict[str, str]
) -> None:
    async with server() as url:
        with pytest.raises(ValueError, match="a header is one line"):
            await dial(url, path, headers, MOST)


async def test_line_fails_when_the_other_host_acknowledges_nothing_any_more() -> None:
    """Its signs of life keep the kernel from probing an idle connection."""
    found: list[int] = []

    async def talk(_: StreamRequest, line: AcceptedLine) -> None:
        assert line.transport is not None
        connection = line.transport.get_extra_info("socket")
        found.append(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))
        line.send(b"hello")
        await line.flush()

    async with server(handler=talk) as url, await dial(url, "/", {}, MOST) as line:
        assert await line.receive() == b"hello"
    assert found == [20_000]
