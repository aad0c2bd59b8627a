"""Requests that a server must refuse, or read in one way only; every server of ours is sent them.

Each begins with its first line, as `POST / HTTP/1.1`, whose method and path a server's test names.
"""

import asyncio
from typing import NamedTuple

from common.time_limits import time_limit


class HostileRequest(NamedTuple):
    """What follows the first line's path, and the statuses of which one must answer it."""

    name: str
    rest: bytes
    statuses: frozenset[int]


def _of(name: str, rest: bytes, *statuses: int) -> HostileRequest:
    return HostileRequest(name, rest, frozenset(statuses))


_BEGIN = b" HTTP/1.1\r\nHost: localhost\r\n"
REFUSED = (
    _of("length-of-5001-zeros", _BEGIN + b"Content-Length: %b2\r\n\r\nhi" % (b"0" * 5000), 400),
    _of("length-of-5001-nines", _BEGIN + b"Content-Length: %b\r\n\r\n" % (b"9" * 5001), 400),
    _of("negative-length", _BEGIN + b"Content-Length: -1\r\n\r\n", 400),
    _of("two-lengths", _BEGIN + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nhi", 400),
    _of(
        "length-and-chunks",
        _BEGIN + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        400,
    ),
    _of("gzip-and-chunks", _BEGIN + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501),
    _of(
        "gzip-and-chunks-apart",
        _BEGIN + b"Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        501,
    ),
    _of("chunks-of-1.0", b" HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    _of("two-hosts", _BEGIN + b"Host: y\r\n\r\n", 400),
    _of("version-2.0", b" HTTP/2.0\r\nHost: x\r\n\r\n", 505),
    _of("no-version", b" HELLO\r\n\r\n", 400),
    _of("space-before-colon", _BEGIN + b"A : b\r\n\r\n", 400),
    _of("many-headers", _BEGIN + b"a: b\r\n" * 300 + b"\r\n", 431),
    _of("long-header", _BEGIN + b"a: %b\r\n\r\n" % (b"b" * 70_000), 431),
)
# What is allowed, and what some servers refuse or misread.
_SPACED = b" HTTP/1.1\r\nHost: x \r\nContent-Length: 0\t \r\nConnection: close \r\nX-A: b \r\n\r\n"
SERVED = (
    _of("white-space-after-values", _SPACED),
    _of("unknown-upgrade", _BEGIN + b"Connection: upgrade, close\r\nUpgrade: h2c\r\n\r\n"),
)


async def ask(address: tuple[str, int] | str, data: bytes) -> bytes:
    """Everything that a server at this TCP address or Unix path sends until it closes."""
    if isinstance(address, str):
        reader, writer = await asyncio.open_unix_connection(address)
    else:
        reader, writer = await asyncio.open_connection(*address[:2])
    writer.write(data)
    try:
        async with time_limit(10):
            return await reader.read()
    finally:
        writer.close()


async def status_of(address: tuple[str, int] | str, first: bytes, hostile: HostileRequest) -> int:
    """The status that answers this request, whose first line begins with `first`."""
    answer = await ask(address, first + hostile.rest)
    assert answer.startswith(b"HTTP/1.1 "), answer[:80]
    return int(answer[9:12])


async def statuses_behind_an_upgrade(address: tuple[str, int] | str, first: bytes) -> list[int]:
    """The statuses of two requests at once, the first of which asks for an unknown protocol."""
    upgrade = b"Connection: upgrade\r\nUpgrade: h2c\r\n\r\n"
    data = first + _BEGIN + upgrade + first + _BEGIN + b"Connection: close\r\n\r\n"
    answer = await ask(address, data)
    return [int(part[:3]) for part in answer.split(b"HTTP/1.1 ")[1:]]
