"""An HTTP/1.1 client for hot paths: kept-alive connections over Unix sockets, TCP or TLS."""

import asyncio
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import httptools

from common.errors import NoResponse
from common.http.asgi import Header
from common.tcp import TcpPatience
from common.time_limits import time_limit

# Reading from the peer stops while this many bytes of the response have not been taken.
_BEHIND_BYTES = 256 << 10
_SILENCE_S = 4
_OK = 200
_MOST_HEADERS = 1000
_PART_BYTES = 64  # what a piece of a body takes beside its bytes
_LENGTHS = (b"content-length", b"transfer-encoding")


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """Bounds of a client's connections."""

    connect_s: float = 2.0
    # Response headers, and any part of a response that carries no body.
    max_head_bytes: int = 64 << 10
    # Kept connections: how many for each address, and how long an unused one is kept.
    max_idle: int = 512
    idle_s: float = 30.0
    # The headers behind a body (lower case) whose values are kept.
    trailers: frozenset[bytes] = frozenset()
    # For addresses of the form `tls:host:port`.
    tls: ssl.SSLContext | None = None


class HttpConnection(asyncio.Protocol):
    """One connection: a request at a time, and its response piece by piece.

    Every failure is raised as NoResponse where the response is awaited.
    """

    __slots__ = (
        "address", "idle_since_s", "status", "headers", "complete", "headed", "closed",
        "_loop", "_owner", "_transport", "_parser", "_head_only", "_settings",
        "_head_bytes", "_quiet_bytes", "_interim", "_lasts", "_idle", "_spoilt", "_parts",
        "_buffered_bytes", "_paused", "_waiter", "_writable", "_error", "trailers",
    )  # fmt: skip

    def __init__(self, owner: "HttpClient", address: str, settings: ClientSettings) -> None:
        self.address = address
        self.closed = False
        self.idle_since_s = 0.0
        self._loop = asyncio.get_running_loop()
        self._owner = owner
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._settings = settings
        self._writable: asyncio.Future[None] | None = None
        self._error: str | None = None
        self._paused = False
        self._idle = True
        self._parts: list[bytes] = []
        self._reset(head_only=False)

    # -- a request -------------------------------------------------------------------------------

    def ask(self, data: bytes, *, head_only: bool = False) -> asyncio.Future[None]:
        """Send the beginning of a request; done once the response's status and headers are there.

        `head_only` is for a response without a body, whatever length its headers announce.
        """
        self._reset(head_only=head_only)
        self._idle = False
        if self.closed or self._transport is None or self._transport.is_closing():
            raise NoResponse(self._error or "it closed the connection", sent=False)
        if self._parser is None:
            self._parser = httptools.HttpResponseParser(self)
        self._transport.write(data)
        return self._wait()

    def write(self, data: bytes) -> None:
        """Send more of the request's body; a broken connection is reported by the response."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    async def drained(self) -> None:
        """Wait until the peer has caught up with what was written."""
        if self._writable is not None:
            await self._writable

    def more(self) -> asyncio.Future[None]:
        """Done once more of the response is readable, or its end; for when nothing is readable."""
        waiter = self._wait()
        if self._error is not None:
            self._wake()
        return waiter

    @property
    def readable(self) -> bool:
        """Whether `take` gives something, or the response is complete."""
        return self.complete or bool(self._parts)

    def take(self) -> bytes:
        """The part of the body that came and was not taken yet."""
        parts = self._parts
        body = parts[0] if len(parts) == 1 else b"".join(parts)
        self._parts = []
        self._buffered_bytes = 0
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
        return body

    def fail(self, why: str) -> None:
        """Break the connection off; NoResponse with this reason goes to the awaiting reader."""
        self._error = self._error or why
        if self._transport is not None:
            self._transport.abort()
        self._wake()

    def let_go(self) -> None:
        """The request is over; the connection is kept where it can serve another one."""
        if self._may_serve_again():
            if self._head_only:
                self._parser = None  # it still waits for a body
            self._idle = True
            self._owner.keep(self)
        elif self._transport is not None:
            self._transport.abort()

    def _may_serve_again(self) -> bool:
        if not self.complete or self._spoilt or self.closed or self._error is not None:
            return False
        return self._lasts and self._parser is not None and self._writable is None

    def _reset(self, *, head_only: bool) -> None:
        self._head_only = head_only
        self.status = 0
        self.headers: list[Header] = []
        self.trailers: dict[bytes, bytes] = {}
        self.headed = False
        self.complete = False
        self._interim = False
        self._lasts = False
        self._spoilt = False
        self._head_bytes = 0
        self._quiet_bytes = 0
        self._parts = []
        self._buffered_bytes = 0
        self._waiter: asyncio.Future[None] | None = None

    def _wait(self) -> asyncio.Future[None]:
        self._waiter = waiter = self._loop.create_future()
        return waiter

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is None or waiter.done():
            return
        if self._error is None:
            waiter.set_result(None)
        else:
            # An error that is raised has the frames of who waits, and so this connection.
            self._waiter = None
            waiter.set_exception(NoResponse(self._error, sent=True))

    # -- asyncio's side --------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._idle or self._parser is None:
            self.fail("it sent data without a request")
            return
        self._quiet_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self.fail("it switches protocols")
            return
        except httptools.HttpParserError as error:
            self.fail(f"it sent no valid HTTP: {error.__context__ or error}")
            return
        most_bytes = self._settings.max_head_bytes
        if self._quiet_bytes > most_bytes and not self.complete:
            self.fail(f"its headers are larger than {most_bytes} bytes")
        elif self.headed:
            if self._buffered_bytes > _BEHIND_BYTES and not self._paused and not self.complete:
                self._paused = True
                assert self._transport is not None, "data comes from a transport"
                self._transport.pause_reading()
            self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        """End the response: one without a length is complete, another one is broken."""
        self.closed = True
        self._parser = None
        self._transport = None
        self.resume_writing()
        if self._idle:
            self._owner.forget(self)
            return
        is_end = self.headed and error is None and self._error is None
        has_length = any(name in _LENGTHS for name, _ in self.headers)
        if is_end and not has_length:
            self.complete = True
        if not self.complete and self._error is None:
            self._error = "it closed the connection" if error is None else f"{error!r}"
        if self.complete:
            self._spoilt = True
        self._wake()

    def pause_writing(self) -> None:
        """The peer reads more slowly than the request is written."""
        if self._writable is None:
            self._writable = self._loop.create_future()

    def resume_writing(self) -> None:
        """The peer has caught up, or is gone."""
        writable, self._writable = self._writable, None
        if writable is not None and not writable.done():
            writable.set_result(None)

    # -- the parser's side -----------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header; of those behind the body, only the trailers that are asked for."""
        if self.headed:
            if name.lower() in self._settings.trailers:
                self.trailers[name.lower()] = value.strip(b" \t")
            return
        self._head_bytes += len(name) + len(value)
        most_bytes = self._settings.max_head_bytes
        if self._head_bytes > most_bytes:
            raise InvalidResponse(f"more than {most_bytes} bytes of headers")
        if len(self.headers) >= _MOST_HEADERS:
            raise InvalidResponse(f"more than {_MOST_HEADERS} headers")
        self.headers.append((name.lower(), value.strip(b" \t")))

    def on_headers_complete(self) -> None:
        """Take the status; one below 200 only announces another."""
        if self.complete:
            self._spoilt = True  # a second response to one request
            return
        assert self._parser is not None, "the parser calls this"
        status = self._parser.get_status_code()
        check_head(self._parser.get_http_version(), status, self.headers)
        self._interim = status < _OK
        if not self._interim:
            self.status = status
            self.headed = True
            self.complete = self._head_only
            # Without a length the answer to a HEAD may be a stream, which its sender still makes.
            is_made = not self._head_only or b"content-length" in dict(self.headers)
            self._lasts = is_made and self._parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        if self.complete:
            self._spoilt = True
            return
        self._quiet_bytes = 0
        self._parts.append(body)
        self._buffered_bytes += len(body) + _PART_BYTES

    def on_message_complete(self) -> None:
        if self._interim:
            self._interim = False
            self.headers = []
        elif not self._spoilt:
            self.complete = True


class HttpClient:
    """Connections by address (`unix:/path`, `tcp:host:port`, `tls:host:port`); keeps idle ones."""

    def __init__(self, settings: ClientSettings | None = None) -> None:
        self._settings = settings or ClientSettings()
        self._idle: dict[str, list[HttpConnection]] = {}
        self._sweep: asyncio.TimerHandle | None = None
        self._patience = TcpPatience(_SILENCE_S)
        self._closed = False

    def idle(self, address: str) -> HttpConnection | None:
        """A kept connection, if there is one: the last used, which most probably lives."""
        kept = self._idle.get(address)
        while kept:
            connection = kept.pop()
            if not connection.closed:
                return connection
        return None

    async def connect(self, address: str) -> HttpConnection:
        """A new connection; NoResponse where none can be made in time."""
        connection = HttpConnection(self, address, self._settings)
        try:
            async with time_limit(self._settings.connect_s):
                transport = await dial(lambda: connection, address, self._settings.tls)
        except TimeoutError as error:
            why = f"no connection within {self._settings.connect_s:g} s"
            raise NoResponse(why, sent=False) from error
        except OSError as error:
            raise NoResponse(f"{error}", sent=False) from error
        if not address.startswith("unix:"):
            self._patience.watch(transport)
        return connection

    def keep(self, connection: HttpConnection) -> None:
        kept = self._idle.setdefault(connection.address, [])
        if self._closed or len(kept) >= self._settings.max_idle:
            connection.fail("no longer needed")
            return
        loop = asyncio.get_running_loop()
        connection.idle_since_s = loop.time()
        kept.append(connection)
        if self._sweep is None:
            self._sweep = loop.call_later(self._settings.idle_s, self._close_unused)

    def forget(self, connection: HttpConnection) -> None:
        kept = self._idle.get(connection.address)
        if kept is not None and connection in kept:
            kept.remove(connection)
            if not kept:
                del self._idle[connection.address]

    def close(self) -> None:
        """Close the idle connections, and keep none from now on."""
        self._closed = True
        if self._sweep is not None:
            self._sweep.cancel()
        for kept in list(self._idle.values()):
            for connection in list(kept):
                connection.fail("its client was closed")
        self._idle.clear()

    def _close_unused(self) -> None:
        loop = asyncio.get_running_loop()
        since_s = loop.time() - self._settings.idle_s
        for address, kept in list(self._idle.items()):
            for connection in [idle for idle in kept if idle.idle_since_s <= since_s]:
                kept.remove(connection)
                connection.fail("no longer needed")
            if not kept:
                del self._idle[address]
        pause_s = self._settings.idle_s / 2
        self._sweep = loop.call_later(pause_s, self._close_unused) if self._idle else None


_SWITCHING, _LEAST_STATUS, _MOST_STATUS = 101, 100, 599
_VERSIONS = frozenset({"1.0", "1.1"})
_MOST_DIGITS = 18  # of a length; Python reads no number of more than 4300 digits


class InvalidResponse(Exception):
    """The parser stops at what the peer sent."""


def check_head(version: str, status: int, headers: list[Header]) -> None:
    """Raise InvalidResponse for a response that others could read differently."""
    if version not in _VERSIONS:
        raise InvalidResponse(f"HTTP/{version}")
    if status == _SWITCHING or not _LEAST_STATUS <= status <= _MOST_STATUS:
        raise InvalidResponse(f"status {status}")
    codings = b", ".join(value for name, value in headers if name == b"transfer-encoding")
    if codings and codings.lower() != b"chunked":
        raise InvalidResponse(f"transfer encoding {codings[:40].decode('latin-1')}")
    for name, value in headers:
        if name == b"content-length" and (len(value) > _MOST_DIGITS or not value.isdigit()):
            raise InvalidResponse("a malformed Content-Length")


_BACKLOG_PAUSE_S = 0.005


async def dial(
    protocol: Callable[[], asyncio.Protocol], address: str, tls: ssl.SSLContext | None
) -> asyncio.Transport:
    """Connect; OSError where nobody listens, or for an address of none of these forms."""
    loop = asyncio.get_running_loop()
    kind, _, where = address.partition(":")
    if kind in {"tcp", "tls"}:
        host, _, port = where.rpartition(":")
        transport, _ = await loop.create_connection(
            protocol,
            host.strip("[]"),
            int(port),
            ssl=tls or ssl.create_default_context() if kind == "tls" else None,
        )
        return transport
    if kind != "unix":
        raise OSError(f"{address!r} is neither a unix:, a tcp: nor a tls: address")
    unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        unix.setblocking(False)
        await _connect_unix(unix, where)
        transport, _ = await loop.create_unix_connection(protocol, sock=unix)
    except BaseException:
        unix.close()
        raise
    return transport


async def _connect_unix(unix: socket.socket, path: str) -> None:
    """Connect without the event loop, which takes a socket with a full backlog for connected."""
    while True:
        try:
            unix.connect(path)
        except BlockingIOError:  # the backlog is full, and the kernel offers no way to wait for it
            await asyncio.sleep(_BACKLOG_PAUSE_S)
        else:
            return
