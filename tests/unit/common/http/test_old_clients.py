"""Clients of HTTP/1.0 read every answer as it was meant."""

import asyncio
from collections.abc import Sequence

import pytest

from common.http.asgi import Header, Receive, Scope, Send, send_text
from common.http.server import listen, serving

pytestmark = pytest.mark.timeout(180, func_only=True)

PARTS = (b"one ", b"", b"two ", b"three")
CHUNKED = ((b"Transfer-Encoding", b"chunked"),)


async def answer_to(request: bytes, headers: Sequence[Header] = (), status: int = 200) -> bytes:
    """All that a client receives which sends this request and waits for the connection's end."""

    async def in_parts(scope: Scope, receive: Receive, send: Send) -> None:
        del receive
        if scope["path"] == "/whole":
            await send_text(send, status, "whole")
            return
        await send({"type": "http.response.start", "status": status, "headers": headers})
        for part in () if status == 204 else PARTS:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    listener = listen("127.0.0.1", 0)
    async with serving(in_parts, listener, drain_s=0.0):
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(request)
        received = await reader.read()
        writer.close()
    return received


@pytest.mark.parametrize("headers", [(), CHUNKED])
async def test_answer_of_unknown_length_is_the_bytes_until_the_end(
    headers: Sequence[Header],
) -> None:
    received = await answer_to(b"GET / HTTP/1.0\r\n\r\n", headers)
    head, _, body = received.partition(b"\r\n\r\n")
    assert body == b"one two three"
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head


async def test_client_of_this_version_gets_chunks() -> None:
    request = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    head, _, body = (await answer_to(request)).partition(b"\r\n\r\n")
    assert b"transfer-encoding: chunked" in head
    assert body == b"4\r\none \r\n4\r\ntwo \r\n5\r\nthree\r\n0\r\n\r\n"


async def test_answer_of_known_length_keeps_its_length() -> None:
    head, _, body = (await answer_to(b"GET /whole HTTP/1.0\r\n\r\n")).partition(b"\r\n\r\n")
    assert b"content-length: 5" in head
    assert body == b"whole"


@pytest.mark.parametrize(
    ("request_head", "status"),
    [(b"HEAD / HTTP/1.0\r\n\r\n", 200), (b"GET / HTTP/1.0\r\n\r\n", 204)],
)
async def test_answer_without_a_body_has_none(request_head: bytes, status: int) -> None:
    head, _, body = (await answer_to(request_head, status=status)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert b"transfer-encoding" not in head
    assert body == b""
