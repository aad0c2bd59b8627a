"""HTTP/1.1 calls to one gateway, with callbacks and without a task for each call.

The gateway's own client costs 1.4 to 2.4 times the CPU of this one for each call, and that CPU
would limit the load (docs/decisions/).
"""

import asyncio
import re
import ssl
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, cast
from urllib.parse import quote

import httptools

from common.foreign_text import plain
from common.time_limits import time_limit
from gpufaas.options.http_url import HttpUrl, http_url

NO_ANSWER = 0
_NO_HEADERS: Mapping[str, str] = MappingProxyType({})
_FIRST_FAILURE = 400
_MOST_SAID = 200  # bytes of a failure's text
_ID = re.compile(r"\b[0-9a-f-]{12,}\b")  # of a call: it would make each failure another one
# Too many requests; service unavailable.
REFUSALS = frozenset({429, 503})
_FIRST_FINAL = 200
_CONNECT_S = 5.0
# The server may be about to close a connection that was idle for longer.
_MOST_IDLE_S = 3.0


class DueCall(NamedTuple):
    """A call to make: the function's index, and the moment at which the call is due."""

    function: int
    due_s: float


# The call, its status or NO_ANSWER, and the reason for no answer, or for a failure.
OnEnded = Callable[[DueCall, int, str], None]
# The function's index, the status and the body of its answer.
OnAnswer = Callable[[int, int, bytes], None]
# The function's index, the status of a refusal and its Retry-After, empty without one.
OnRefusal = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """The gateway that is called."""

    url: HttpUrl
    tls: ssl.SSLContext | None

    def request(
        self, function: str, body: bytes, kind: str, headers: Mapping[str, str] = _NO_HEADERS
    ) -> bytes:
        """A call of this function, as bytes for a connection; `headers` may name another kind."""
        path = f"{self.url.path.rstrip('/')}/function/{quote(function)}"
        sent = {"user-agent": "gpufaas-load", "content-type": kind, **headers}
        lines = "".join(f"{name}: {value}\r\n" for name, value in sent.items())
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {self.url.netloc}\r\n{lines}"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        return head.encode("latin-1") + body


def target_at(text: str) -> LoadTarget:
    """The gateway at a URL; CommandError for an invalid one."""
    url = http_url(text, "gateway")
    return LoadTarget(url, ssl.create_default_context() if url.secure else None)


class GatewayConnections:
    """Connections to one gateway; `on_ended` gets every call once.

    `on_answer` gets every answer, `on_refusal` those that put the caller off.
    """

    def __init__(
        self,
        target: LoadTarget,
        requests: list[bytes],
        on_ended: OnEnded,
        *,
        most: int,
        timeout_s: float,
        on_answer: OnAnswer | None = None,
        on_refusal: OnRefusal | None = None,
    ) -> None:
        self._target = target
        self._requests = requests
        self._on_ended = on_ended
        self._most = most
        self._timeout_s = timeout_s
        self._on_answer = on_answer
        self._on_refusal = on_refusal
        self._idle: list[_Connection] = []
        self._busy: set[_Connection] = set()
        self._opening: set[asyncio.Task[None]] = set()
        self._waiting: deque[DueCall] = deque()
        self._closed = False

    @property
    def in_flight(self) -> int:
        """The number of calls that have not ended."""
        return len(self._busy) + len(self._opening) + len(self._waiting)

    def call(self, call: DueCall) -> None:
        """Make a call now, or at the connection limit as soon as a connection is free."""
        connection = self._take_idle()
        if connection is not None:
            self._make(connection, call)
        elif len(self._busy) + len(self._opening) < self._most:
            opening = asyncio.get_running_loop().create_task(self._open(call))
            self._opening.add(opening)
            opening.add_done_callback(self._opening.discard)
        else:
            self._waiting.append(call)

    def end_overdue(self) -> None:
        """End the calls that exceed the timeout; to be called periodically."""
        before_s = time.monotonic() - self._timeout_s
        for connection in [one for one in self._busy if one.begun_s < before_s]:
            connection.fail(f"no answer within {self._timeout_s:g} s")

    async def close(self) -> None:
        """Close all connections; calls in flight are not reported."""
        self._closed = True
        self._waiting.clear()
        for connection in [*self._busy, *self._idle]:
            connection.abort()
        for opening in list(self._opening):
            opening.cancel()
        await asyncio.gather(*self._opening, return_exceptions=True)

    def call_ended(
        self, connection: "_Connection", call: DueCall, status: int, reason: str
    ) -> None:
        """A connection's call has ended."""
        self._busy.discard(connection)
        if self._closed:
            return
        if connection.reusable:
            connection.begun_s = time.monotonic()
            self._idle.append(connection)
        else:
            connection.abort()
        self._on_ended(call, status, reason)
        if self._waiting:
            self.call(self._waiting.popleft())

    def idle_connection_lost(self, connection: "_Connection") -> None:
        """The server closed an idle connection."""
        if connection in self._idle:
            self._idle.remove(connection)

    def _take_idle(self) -> "_Connection | None":
        """The connection used last; if it was idle for too long, all others were, too."""
        if not self._idle:
            return None
        connection = self._idle.pop()
        if time.monotonic() - connection.begun_s <= _MOST_IDLE_S:
            return connection
        connection.abort()
        for other in self._idle:
            other.abort()
        self._idle.clear()
        return None

    def _make(self, connection: "_Connection", call: DueCall) -> None:
        self._busy.add(connection)
        connection.make(call, self._requests[call.function])

    async def _open(self, call: DueCall) -> None:
        url = self._target.url
        loop = asyncio.get_running_loop()
        try:
            async with time_limit(_CONNECT_S):
                _, connection = await loop.create_connection(
                    self._connection, url.host, url.port, ssl=self._target.tls
                )
        except TimeoutError:
            self._report_failure(call, f"no connection within {_CONNECT_S:g} s")
        except OSError as error:
            self._report_failure(call, f"no connection: {error.strerror or error}")
        else:
            self._make(connection, call)

    def _connection(self) -> "_Connection":
        if self._on_answer is None and self._on_refusal is None:
            return _Connection(self)
        return _Reading(self, self._on_answer, self._on_refusal)

    def _report_failure(self, call: DueCall, reason: str) -> None:
        if not self._closed:
            self._on_ended(call, NO_ANSWER, reason)
        if self._waiting:
            self.call(self._waiting.popleft())


class _Connection(asyncio.Protocol):
    """One connection with one call at a time."""

    def __init__(self, owner: GatewayConnections) -> None:
        self.begun_s = 0.0
        self.reusable = True
        self._owner = owner
        self._call: DueCall | None = None
        self._said = b""
        self._parser = httptools.HttpResponseParser(self)

    def make(self, call: DueCall, request: bytes) -> None:
        """Begin a call."""
        self._call = call
        self.begun_s = time.monotonic()
        if self._transport.is_closing():
            self.fail("the gateway closed the connection")
        else:
            self._transport.write(request)

    def fail(self, reason: str) -> None:
        """End the call without an answer."""
        self.reusable = False
        self._end(NO_ANSWER, reason)

    def abort(self) -> None:
        """Close the connection without reporting its call."""
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
            self._owner.idle_connection_lost(self)
        else:
            self.fail("the gateway closed the connection" if error is None else f"{error}")

    def on_body(self, body: bytes) -> None:
        if len(self._said) < _MOST_SAID and self._parser.get_status_code() >= _FIRST_FAILURE:
            self._said += body[:_MOST_SAID]

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= _FIRST_FINAL:
            self.reusable = self._parser.should_keep_alive()
            said, self._said = self._said, b""
            self._end(status, f"{status}: {_first_line(said)}" if said else "")

    def _end(self, status: int, reason: str) -> None:
        call, self._call = self._call, None
        if call is not None:
            self._owner.call_ended(self, call, status, reason)


class _Reading(_Connection):
    """Reads headers and bodies too; the parser would call `on_header` of every connection."""

    def __init__(
        self, owner: GatewayConnections, on_answer: OnAnswer | None, on_refusal: OnRefusal | None
    ) -> None:
        super().__init__(owner)
        self._on_answer = on_answer
        self._on_refusal = on_refusal
        self._retry_after = self._body = b""

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"retry-after":
            self._retry_after = value

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        if self._on_answer is not None:
            self._body += body

    def _end(self, status: int, reason: str) -> None:
        body, retry_after = self._body, self._retry_after.decode("latin-1")
        self._retry_after = self._body = b""
        if self._call is not None and status:
            if self._on_answer is not None:
                self._on_answer(self._call.function, status, body)
            if self._on_refusal is not None and status in REFUSALS:
                self._on_refusal(self._call.function, status, retry_after)
        super()._end(status, reason)


def _first_line(said: bytes) -> str:
    """The first line of a failure's text, without the call's id."""
    lines = said[:_MOST_SAID].decode("utf-8", "replace").strip().splitlines()
    return _ID.sub("...", plain(lines[0])) if lines else ""
