"""Heads and bodies that leave together, and heads that cannot wait."""

import asyncio
from typing import Any, cast

import pytest

from common.http import server_protocol
from common.http.server_protocol import JoiningTransport

pytestmark = pytest.mark.timeout(180, func_only=True)

HEAD = b"HTTP/1.1 200 OK\r\n\r\n"


class Wire:
    """Keeps what was written, call by call."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.closed = False

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def writelines(self, pieces: tuple[bytes, ...]) -> None:
        self.written.append(b"".join(pieces))

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("body", [b"body", bytes(100_000)], ids=len)
async def test_head_leaves_with_its_body(body: bytes) -> None:
    wire = Wire()
    joining = JoiningTransport(cast(asyncio.Transport, wire))
    joining.write(HEAD)
    assert wire.written == []
    joining.write(body)
    joining.write(b"more")
    assert wire.written == [HEAD + body, b"more"]
    await asyncio.sleep(0.01)
    assert len(wire.written) == 2


async def test_head_alone_leaves_soon_or_at_a_write_of_nothing() -> None:
    wire = Wire()
    joining = JoiningTransport(cast(asyncio.Transport, wire))
    joining.write(HEAD)
    await asyncio.sleep(0.02)
    assert wire.written == [HEAD]
    joining.write(HEAD)
    joining.write(b"")
    joining.write(b"")
    assert wire.written == [HEAD, HEAD]
    joining.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    assert len(wire.written) == 3


async def test_closing_sends_the_head_first() -> None:
    wire = Wire()
    joining = JoiningTransport(cast(asyncio.Transport, wire))
    joining.write(HEAD)
    joining.close()
    assert (wire.written, wire.closed) == ([HEAD], True)


class Unread(Wire):
    """A client that reads nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.aborted = asyncio.Event()

    def get_write_buffer_size(self) -> int:
        return 1

    def abort(self) -> None:
        self.aborted.set()


@pytest.mark.parametrize("is_read", [False, True])
async def test_client_that_never_reads_its_answer_is_given_up(
    monkeypatch: pytest.MonkeyPatch, *, is_read: bool
) -> None:
    monkeypatch.setattr(server_protocol, "_UNREAD_S", 0.05)
    wire = Unread()
    joining = JoiningTransport(cast(asyncio.Transport, wire))
    joining.write(HEAD)
    joining.close()
    assert wire.closed
    if is_read:
        joining.lost()
        await asyncio.sleep(0.2)
        assert not wire.aborted.is_set()
    else:
        await wire.aborted.wait()
