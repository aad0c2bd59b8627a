"""Lines of frames between a client and a server, over real sockets."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from common.errors import StreamRefused
from common.frames.frame_line import FrameLine, LineBroken
from common.frames.stream_upgrade import StreamRequest, dial
from common.http.accepted_line import AcceptedLine
from common.http.asgi import Receive, Scope, Send, send_text
from common.http.server import listen, serving

pytestmark = pytest.mark.timeout(30, func_only=True)


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    del receive
    await send_text(send, 200, scope["path"])


async def echo(request: StreamRequest, line: AcceptedLine) -> None:
    if request.path == "/unknown":
        line.refuse()
        return
    if request.path == "/known":
        line.confirm()
    await line.pump(line.send)


@asynccontextmanager
async def dialed(path: str) -> AsyncIterator[FrameLine]:
    listener = listen("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    async with (
        serving(app, listener, 1.0, streams=echo),
        await dial(url, path, {}, 16 << 20) as line,
    ):
        yield line


async def test_frames_return_in_order_when_many_of_any_size_are_sent() -> None:
    sent = [b"%d" % number * (1 + number % 7 * 20_000) for number in range(200)]
    async with dialed("/known") as line:
        for each in sent:
            line.send(each)
        assert [await line.receive() for _ in sent] == sent


async def test_line_breaks_when_a_stranger_sends_a_large_frame() -> None:
    async with dialed("/stranger") as line:
        line.send(bytes(17 << 10))
        with pytest.raises(LineBroken):
            await line.receive()


async def test_unknown_path_is_refused_without_an_upgrade() -> None:
    with pytest.raises(StreamRefused) as refused:
        async with dialed("/unknown"):
            pass
    assert refused.value.status == 404


async def test_nothing_is_received_when_this_end_hung_up() -> None:
    async with dialed("/known") as line:
        line.hang_up()
        with pytest.raises(LineBroken, match="hung up"):
            await line.receive()
