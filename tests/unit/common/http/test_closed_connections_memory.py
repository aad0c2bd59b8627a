"""What is left of a client's connection once it is closed: nothing, also without a collector."""

import asyncio
import gc
from collections.abc import Iterator

import pytest

from common.http.asgi import Receive, Scope, Send, send_text
from common.http.server import listen, serving
from common.http.server_protocol import ServerProtocol
from tests.kit.waiting import eventually
from tests.kit.without_collector import without_collector

pytestmark = pytest.mark.timeout(180, func_only=True)

ASKS = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n"


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    with without_collector():
        yield


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    del scope
    await receive()
    await send_text(send, 200, "fine")


def protocols() -> int:
    return sum(type(each) is ServerProtocol for each in gc.get_objects())


@pytest.mark.parametrize(
    "asked",
    [
        ASKS + b"connection: close\r\n\r\nbody",
        ASKS + b"\r\nbody",
        ASKS + b"\r\nbo",
        b"nonsense\r\n\r\n",
        b"",
    ],
    ids=["closed by us", "kept", "broken off", "refused", "silent"],
)
async def test_connection_is_freed_when_it_is_closed(asked: bytes) -> None:
    listener = listen("127.0.0.1", 0)
    async with serving(app, listener, drain_s=1.0):
        for _ in range(3):
            reader, writer = await asyncio.open_connection(*listener.getsockname()[:2])
            writer.write(asked)
            if asked.endswith((b"body", b"\r\n\r\n")):
                assert await reader.read(12)
            writer.close()
            await writer.wait_closed()

        await eventually(lambda: protocols() == 0, "the protocols are freed")
    listener.close()
