"""How an HTTP/1.1 connection becomes a line of frames: `Upgrade: gpufaas-frames`."""

import asyncio
import ssl
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import cast
from urllib.parse import SplitResult, urlsplit

from common.addresses import address_text
from common.errors import StreamRefused
from common.frame_line import FrameLine, LineBroken

PROTOCOL = b"gpufaas-frames"
SWITCHED = (
    b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: " + PROTOCOL + b"\r\n\r\n"
)
_SWITCHING = 101
_MOST_HEAD_BYTES = 16 << 10
_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class StreamRequest:
    """What a client asked for: the path, decoded, and the headers, with names in lower case."""

    path: str
    headers: tuple[tuple[bytes, bytes], ...]


async def dial(
    url: str,
    path: str,
    headers: Mapping[str, str],
    max_frame_bytes: int,
    tls: ssl.SSLContext | None = None,
) -> FrameLine:
    """A line of frames to a server at an http or https URL, in front of whose path its own is put.

    Raises OSError where nobody listens or the URL is none, StreamRefused for another status,
    LineBroken where the server breaks off. `tls` checks an https server; without it the machine's
    authorities do.
    """
    host, port, parts = _server_of(url)
    context = (tls or ssl.create_default_context()) if parts.scheme == "https" else None
    named = {"Host": address_text(host, port)}
    head = _request_head(parts.path.rstrip("/") + path, {**named, **headers})
    loop = asyncio.get_running_loop()
    try:
        transport, upgrade = await loop.create_connection(
            lambda: _Upgrade(max_frame_bytes), host, port, ssl=context
        )
    except UnicodeError as error:  # a name that cannot be looked up
        raise OSError(f"{host[:80]!r} is no host: {error}") from error
    try:
        transport.write(head)
        return await upgrade.switched
    except BaseException:
        transport.abort()
        raise


class _Upgrade(asyncio.Protocol):
    """A client's connection until the server has switched it over."""

    def __init__(self, max_frame_bytes: int) -> None:
        self.switched: asyncio.Future[FrameLine] = asyncio.get_running_loop().create_future()
        self._max_frame_bytes = max_frame_bytes
        self._transport: asyncio.Transport | None = None
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, end, frames = self._received.partition(b"\r\n\r\n")
        if end:
            self._read(head, frames)
        elif len(self._received) > _MOST_HEAD_BYTES:
            self._fail(LineBroken("the answer's headers are too large"))

    def connection_lost(self, exc: Exception | None) -> None:
        why = "" if exc is None else f": {exc}"
        self._fail(LineBroken(f"the server closed the connection before it answered{why}"))

    def _read(self, head: bytes, frames: bytes) -> None:
        first, *lines = head.split(b"\r\n")
        version, _, rest = first.partition(b" ")
        status = rest[:3]
        if version != b"HTTP/1.1" or not status.isdigit():
            self._fail(LineBroken("the server speaks no HTTP/1.1"))
        elif int(status) != _SWITCHING:
            self._fail(StreamRefused(int(status), frames[:200].decode(errors="replace").strip()))
        elif (b"upgrade", PROTOCOL) not in {_header(line) for line in lines}:
            self._fail(LineBroken("the server switched to another protocol"))
        else:
            self._switch(frames)

    def _switch(self, frames: bytes) -> None:
        assert self._transport is not None, "data came over it"
        if self.switched.done():
            return
        line = FrameLine(self._max_frame_bytes)
        line.connection_made(self._transport)
        self._transport.set_protocol(line)
        if frames:
            line.data_received(frames)
        self.switched.set_result(line)

    def _fail(self, error: Exception) -> None:
        if not self.switched.done():
            self.switched.set_exception(error)
        if self._transport is not None:
            self._transport.abort()


def _server_of(url: str) -> tuple[str, int, SplitResult]:
    """Where a URL leads; OSError where it leads nowhere, for another server may have named it."""
    with suppress(ValueError):  # of a port or an address
        parts = urlsplit(url)
        is_sendable = url.isascii() and url.isprintable() and " " not in url
        if parts.hostname and parts.scheme in _PORTS and is_sendable:
            return parts.hostname, parts.port or _PORTS[parts.scheme], parts
    raise OSError(f"{url[:80]!r} is no http or https URL")


def _request_head(path: str, headers: Mapping[str, str]) -> bytes:
    lines = [f"GET {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    lines += ["Connection: Upgrade", f"Upgrade: {PROTOCOL.decode()}"]
    if any("\r" in line or "\n" in line for line in lines):
        raise ValueError("a header is one line: give a token or a path without line breaks")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def _header(line: bytes) -> tuple[bytes, bytes]:
    name, _, value = line.partition(b":")
    return name.strip().lower(), value.strip().lower()
