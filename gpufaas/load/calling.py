"""Calls over HTTP/1.1 on as many connections as are in use at once; callbacks, no task a call."""

import asyncio
import ssl
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, cast
from urllib.parse import quote, urlsplit

import httptools

from gpufaas.errors import CommandError

NO_ANSWER = 0
_FIRST_FINAL = 200
_CONNECT_S = 5.0
# A connection that rested longer may be about to be closed from the other side.
_REST_S = 3.0
_PORTS = {"http": 80, "https": 443}


class Call(NamedTuple):
    """A call that is to be made: of which function, and when it was due."""

    function: int
    due_s: float


# The call, its status (NO_ANSWER: none), why there is none.
Ended = Callable[[Call, int, str], None]


@dataclass(frozen=True, slots=True)
class Address:
    """Where a gateway answers."""

    url: str
    host: str
    port: int
    netloc: str
    path: str
    tls: ssl.SSLContext | None

    def request(self, function: str, body: bytes, kind: str) -> bytes:
        """A call of this function, as it is written."""
        path = f"{self.path}/function/{quote(function)}"
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {self.netloc}\r\nUser-Agent: gpufaas-load\r\n"
            f"Content-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode("ascii") + body


def address_of(url: str) -> Address:
    """The parts of a gateway's URL; CommandError for one that is none."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise CommandError(f"{url!r}: {error}") from error
    if parts.scheme not in _PORTS or not host or not url.isascii():
        raise CommandError(f"{url!r} is no http:// or https:// URL")
    tls = ssl.create_default_context() if parts.scheme == "https" else None
    netloc = parts.netloc.rpartition("@")[2]
    return Address(url, host, port or _PORTS[parts.scheme], netloc, parts.path.rstrip("/"), tls)


class Callers:
    """Connections to one gateway; `ended` is told of every call once."""

    def __init__(
        self, address: Address, requests: list[bytes], ended: Ended, *, most: int, timeout_s: float
    ) -> None:
        self._address = address
        self._requests = requests
        self._ended = ended
        self._most = most
        self._timeout_s = timeout_s
        self._idle: list[_Connection] = []
        self._busy: set[_Connection] = set()
        self._opening: set[asyncio.Task[None]] = set()
        self._waiting: deque[Call] = deque()
        self._closed = False

    @property
    def in_flight(self) -> int:
        """Calls that were begun and have not ended."""
        return len(self._busy) + len(self._opening) + len(self._waiting)

    def call(self, call: Call) -> None:
        """Make it now, or as soon as a connection is free where there are as many as may be."""
        connection = self._rested()
        if connection is not None:
            self._make(connection, call)
        elif len(self._busy) + len(self._opening) < self._most:
            opening = asyncio.get_running_loop().create_task(self._open(call))
            self._opening.add(opening)
            opening.add_done_callback(self._opening.discard)
        else:
            self._waiting.append(call)

    def give_up_late(self) -> None:
        """End the calls that have taken too long; to be asked for now and then."""
        before_s = time.monotonic() - self._timeout_s
        for connection in [one for one in self._busy if one.begun_s < before_s]:
            connection.fail(f"no answer within {self._timeout_s:g} s")

    async def close(self) -> None:
        """Break off everything; calls that had no end get none."""
        self._closed = True
        self._waiting.clear()
        for connection in [*self._busy, *self._idle]:
            connection.abort()
        for opening in list(self._opening):
            opening.cancel()
        await asyncio.gather(*self._opening, return_exceptions=True)

    def over(self, connection: "_Connection", call: Call, status: int, why: str) -> None:
        """A connection's word that its call has ended."""
        self._busy.discard(connection)
        if self._closed:
            return
        if connection.lasts:
            connection.begun_s = time.monotonic()
            self._idle.append(connection)
        else:
            connection.abort()
        self._ended(call, status, why)
        if self._waiting:
            self.call(self._waiting.popleft())

    def lost(self, connection: "_Connection") -> None:
        """One that nobody used is gone."""
        if connection in self._idle:
            self._idle.remove(connection)

    def _rested(self) -> "_Connection | None":
        """The one used last; when that has rested for long, so have all."""
        if not self._idle:
            return None
        connection = self._idle.pop()
        if time.monotonic() - connection.begun_s <= _REST_S:
            return connection
        connection.abort()
        for other in self._idle:
            other.abort()
        self._idle.clear()
        return None

    def _make(self, connection: "_Connection", call: Call) -> None:
        self._busy.add(connection)
        connection.make(call, self._requests[call.function])

    async def _open(self, call: Call) -> None:
        address = self._address
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_CONNECT_S):
                _, connection = await loop.create_connection(
                    lambda: _Connection(self), address.host, address.port, ssl=address.tls
                )
        except TimeoutError:
            self._not_made(call, f"no connection within {_CONNECT_S:g} s")
        except OSError as error:
            self._not_made(call, f"no connection: {error.strerror or error}")
        else:
            self._make(connection, call)

    def _not_made(self, call: Call, why: str) -> None:
        if not self._closed:
            self._ended(call, NO_ANSWER, why)
        if self._waiting:
            self.call(self._waiting.popleft())


class _Connection(asyncio.Protocol):
    """One connection, a call at a time."""

    def __init__(self, owner: Callers) -> None:
        self.begun_s = 0.0
        self.lasts = True
        self._owner = owner
        self._call: Call | None = None
        self._parser = httptools.HttpResponseParser(self)

    def make(self, call: Call, request: bytes) -> None:
        """Begin a call."""
        self._call = call
        self.begun_s = time.monotonic()
        if self._transport.is_closing():
            self.fail("the gateway closed the connection")
        else:
            self._transport.write(request)

    def fail(self, why: str) -> None:
        """The call ends without an answer."""
        self.lasts = False
        self._end(NO_ANSWER, why)

    def abort(self) -> None:
        """Close it, whatever is on its way."""
        self._call = None
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.fail(f"the answer is no HTTP: {error}")

    def connection_lost(self, error: Exception | None) -> None:
        if self._call is None:
            self._owner.lost(self)
        else:
            self.fail("the gateway closed the connection" if error is None else f"{error}")

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= _FIRST_FINAL:
            self.lasts = self._parser.should_keep_alive()
            self._end(status, "")

    def _end(self, status: int, why: str) -> None:
        call, self._call = self._call, None
        if call is not None:
            self._owner.over(self, call, status, why)
