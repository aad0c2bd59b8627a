"""Heads and bodies that leave together, and heads that cannot wait."""

import asyncio
from typing import Any, cast

import pytest

from gateway_ext.gathering import Gathering
from tests.service_world import in_real_time

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
@in_real_time
async def test_head_leaves_with_its_body(body: bytes) -> None:
    wire = Wire()
    gathering = Gathering(cast(asyncio.Transport, wire))
    gathering.write(HEAD)
    assert wire.written == []
    gathering.write(body)
    gathering.write(b"more")
    assert wire.written == [HEAD + body, b"more"]
    await asyncio.sleep(0.01)
    assert len(wire.written) == 2


@in_real_time
async def test_head_alone_leaves_soon_or_at_a_write_of_nothing() -> None:
    wire = Wire()
    gathering = Gathering(cast(asyncio.Transport, wire))
    gathering.write(HEAD)
    await asyncio.sleep(0.02)
    assert wire.written == [HEAD]
    gathering.write(HEAD)
    gathering.write(b"")
    gathering.write(b"")
    assert wire.written == [HEAD, HEAD]
    gathering.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    assert len(wire.written) == 3


@in_real_time
async def test_closing_sends_the_head_first() -> None:
    wire = Wire()
    gathering = Gathering(cast(asyncio.Transport, wire))
    gathering.write(HEAD)
    gathering.close()
    assert (wire.written, wire.closed) == ([HEAD], True)
