"""How the HTTP server ends."""

import asyncio
import logging

import pytest

from common.http.asgi import Receive, Scope, Send, send_text
from common.http.server import listen, serving

pytestmark = pytest.mark.timeout(30, func_only=True)


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
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await begun.wait()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(*address)
    received = await reader.read()
    writer.close()
    idle.close()
    return received


async def test_stopping_waits_for_a_request_in_flight() -> None:
    received = await ask_a_server_that_stops(work_s=0.2, drain_s=5.0)
    assert received.startswith(b"HTTP/1.1 200 ")
    assert received.endswith(b"done")


async def test_stopping_cancels_a_request_that_outlasts_the_drain_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        received = await ask_a_server_that_stops(work_s=60.0, drain_s=0.1)
    assert not received.startswith(b"HTTP/1.1 200 ")
    assert "cancelling 1 requests" in caplog.text
