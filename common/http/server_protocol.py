"""uvicorn's HTTP protocol, with bounds on all that a client may send before it is served."""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, NamedTuple, Protocol, cast
from urllib.parse import unquote

import httptools
from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from common.frame_line import FrameLine, LineBroken
from common.http.asgi import Header, Scope, offer_watch, watch_in
from common.stream_upgrade import PROTOCOL, SWITCHED, StreamRequest
from common.tcp import notice_silence

log = logging.getLogger(__name__)

MOST_PIPELINED = 64  # requests that wait behind the first one of their connection
_BODY_HEADERS = frozenset({b"content-length", b"transfer-encoding"})
# The largest frame of a client that is not known yet, and of one that is.
_FIRST_FRAME_BYTES, _MOST_FRAME_BYTES = 16 << 10, 16 << 20
# A client whose host vanished, or is cut off, is noticed after this time: its line or request ends.
SILENCE_S = 20
_OF_TCP = (socket.AF_INET, socket.AF_INET6)
StreamHandler = Callable[[StreamRequest, "AcceptedLine"], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Limits:
    """What a client may take of a server before the application sees a request.

    `connections` is the most that wait or are served at once.
    """

    head_bytes: int = 64 << 10
    headers: int = 256
    head_s: float = 30.0
    keep_alive_s: int = 75
    connections: int = 4096


class ServerProtocol(HttpToolsProtocol):
    """Ends a connection whose next head is endless, incomplete after `head_s`, or ambiguous.

    The parser itself has no bounds: it would collect the head of a request for ever, and likewise
    the trailers behind a chunked body, which are dropped here. A request that is answered before
    its body has arrived is the last one of its connection, so that nobody reads that body.
    """

    host = ""
    _in_head = False
    _refused = False
    _upgraded = False
    _keeps_alive = False
    _head_bytes = 0  # of the present head, as far as it was parsed
    _quiet_bytes = 0  # received since a head began, or since the last piece of a body
    _head_timer: asyncio.TimerHandle | None = None

    def __init__(
        self,
        config: Config,
        state: ServerState,
        limits: Limits,
        table: "ConnectionTable",
        streams: StreamHandler | None = None,
    ) -> None:
        """`table` counts the connections of one server; `streams` serves lines of frames."""
        super().__init__(config, state, {})
        self._limits = limits
        self._table = table
        self._streams = streams

    def connection_made(self, transport: Any) -> None:
        """Wait for the first head no longer than for a later one."""
        joining = JoiningTransport(transport, self._more_comes)
        super().connection_made(cast(asyncio.Transport, joining))
        self.host = self.client[0] if self.client else ""
        if self._table.admit(self):
            self._wait_for_head()
        else:
            self._refused = True
            transport.write(NO_ROOM.response)
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer of the head; whoever watches the client learns that it has left."""
        self._table.remove(self)
        self._end_of_head()
        super().connection_lost(exc)
        cast(JoiningTransport, self.transport).lost()
        if not self.idle and (watch := watch_in(cast(Scope, self.cycle.scope))) is not None:
            watch.left()

    def drop(self) -> None:
        self.transport.abort()

    def shutdown(self) -> None:
        """Close once the response to the present request is sent, if there is one."""
        self._keeps_alive = False
        super().shutdown()

    def data_received(self, data: bytes) -> None:
        """Parse the data; for a head that arrives complete, the limits cost a few comparisons."""
        if self._refused:
            return
        self._unset_keepalive_if_required()
        self._quiet_bytes += len(data)
        self._feed(data)
        if self._upgraded:
            return
        if self._quiet_bytes > self._limits.head_bytes:
            self._refuse(TOO_LARGE)
        elif self._head_timer is None and (self._in_head or self.idle):
            self._wait_for_head()

    def on_message_begin(self) -> None:
        self._in_head = True
        self._head_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._grow_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header, without the white space that may follow its value."""
        if len(self.headers) >= self._limits.headers:
            raise BadHead(TOO_LARGE)
        self._grow_head(len(name) + len(value))
        super().on_header(name, value.strip(b" \t"))

    def on_headers_complete(self) -> None:
        self._quiet_bytes = 0
        self._end_of_head()
        check_head(self.parser.get_http_version(), self.parser.get_method(), self.headers)
        if len(self.pipeline) >= MOST_PIPELINED:
            raise BadHead(TOO_MANY_REQUESTS)
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is not before:
            self._keeps_alive = self.cycle.keep_alive
            self.cycle.keep_alive = False  # until its body is complete
            offer_watch(cast(Scope, self.cycle.scope))
            self._table.works(self)
        # The parser appends trailers to `self.headers`: behind the checks of a proxy in front they
        # would become headers of the request. An upgrade reads its headers once more.
        self.headers = self.headers.copy() if self.parser.should_upgrade() else []

    def on_body(self, body: bytes) -> None:
        self._quiet_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """After a complete message only another head can follow, or the client's end."""
        self._quiet_bytes = 0
        super().on_message_complete()
        if not self.pipeline:  # a long body stopped the reading, and nobody asks for more of it
            self.flow.resume_reading()
        if not getattr(self.cycle, "response_started", True):  # it is None before a stream
            self.cycle.keep_alive = self._keeps_alive

    def on_response_complete(self) -> None:
        """The connection waits for a request, unless another one is waiting already."""
        if not self.pipeline:
            self._table.waits(self)
        super().on_response_complete()

    @property
    def idle(self) -> bool:
        return getattr(self.cycle, "response_complete", True)  # it is None before the first one

    def _should_upgrade(self) -> bool:
        """Whether the request asks for a line of frames, and no other one is being answered."""
        if self._streams is None or not self.idle or self._get_upgrade() != PROTOCOL:
            return False
        return self.parser.get_method() == b"GET" and not any(
            name in _BODY_HEADERS for name, _ in self.headers
        )

    def _begin_stream(self, frames: bytes) -> None:
        """Hand the bare transport to a line of frames; what came behind the head are frames."""
        assert self._streams is not None, "a stream was wanted"
        self._upgraded = True
        self._end_of_head()
        self._table.remove(self)
        self.connections.discard(self)
        transport = cast(JoiningTransport, self.transport).wrapped
        shown: Any = None  # uvicorn types its own protocols only
        line = AcceptedLine(self.host, self._table, lambda: self.connections.discard(shown))
        shown = line
        self.connections.add(shown)
        line.connection_made(transport)
        transport.set_protocol(line)
        path = unquote(self.url.partition(b"?")[0].decode("latin-1"))
        request = StreamRequest(path, tuple(self.headers))
        task = self.loop.create_task(_serve_stream(self._streams, request, line))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        self.loop.call_soon(line.switch)  # after the handler's first step, which may refuse
        if frames:
            line.data_received(frames)

    def _feed(self, data: bytes) -> None:
        while data:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                if self._should_upgrade():
                    self._begin_stream(data[upgrade.args[0] :])
                    return
                # The client hears no other protocol, so what follows is HTTP/1.1 again.
                data = data[upgrade.args[0] :]
                self.parser = httptools.HttpRequestParser(self)
            except httptools.HttpParserError as error:
                cause = error.__context__
                self._refuse(cause.refusal if isinstance(cause, BadHead) else MALFORMED)
                return
            else:
                return

    def _grow_head(self, more_bytes: int) -> None:
        self._head_bytes += more_bytes
        if self._head_bytes > self._limits.head_bytes:
            raise BadHead(TOO_LARGE)

    def _wait_for_head(self) -> None:
        self._head_timer = self.loop.call_later(self._limits.head_s, self._give_up)

    def _end_of_head(self) -> None:
        self._in_head = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self, refusal: "Refusal") -> None:
        """Read no more; answer why, where that answer cannot be taken for another request's."""
        self._refused = True
        cycle = self.cycle
        if not self.idle and not cycle.more_body:
            self._end_of_head()
            self.flow.pause_reading()
            cycle.keep_alive = False  # the requests before the bad one are answered
            return
        if not self.idle:  # the rest of this request's body will never come
            cycle.disconnected = True
            cycle.message_event.set()
            if cycle.response_started or self.pipeline:
                self.transport.abort()
                return
        self.transport.write(refusal.response)
        self._table.waits(self)
        self._give_up()

    def _give_up(self) -> None:
        self._end_of_head()
        self.transport.close()

    def _more_comes(self) -> bool:
        """Whether the client may be sending what will not be read."""
        return self._refused or getattr(self.cycle, "more_body", False)


async def _serve_stream(
    streams: StreamHandler, request: StreamRequest, line: "AcceptedLine"
) -> None:
    try:
        async with line:
            await streams(request, line)
    except LineBroken as error:
        log.debug("the stream %r: %s", request.path[:200], error)
    except Exception:
        log.exception("the stream %r failed", request.path[:200])


# Lines of frames.


class AcceptedLine(FrameLine):
    """A line that a client began.

    Until `confirm` says that the client is known, the connection counts as one that waits for a
    request, which makes room for others, and takes small frames only.
    """

    def __init__(self, host: str, table: "ConnectionTable", ended: Callable[[], None]) -> None:
        """`table` counts the server's connections; `ended` is called at the connection's end."""
        super().__init__(_FIRST_FRAME_BYTES)
        self.host = host
        self._table = table
        self._at_end = ended
        self._switched = False

    def confirm(self) -> None:
        """The client has proven who it is: it keeps its connection, and may send large frames."""
        self._table.remove(self)
        self.max_frame_bytes = _MOST_FRAME_BYTES

    def refuse(self) -> None:
        """Answer 404 and close, in place of switching; only before the handler first waits."""
        assert not self._switched, "the protocol was switched already"
        self._switched = True
        if self._transport is not None:
            self._transport.write(NO_STREAM.response)
        self.hang_up()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the place of the request that asked for the line."""
        super().connection_made(transport)
        self._table.admit(self)
        connection = transport.get_extra_info("socket")
        if connection is not None and connection.family in _OF_TCP:
            # Without it the kernel asks no host for which data wait, such as signs of life.
            notice_silence(connection, SILENCE_S)

    def connection_lost(self, exc: Exception | None) -> None:
        self._table.remove(self)
        self._at_end()
        super().connection_lost(exc)

    def drop(self) -> None:
        self.abort()

    def shutdown(self) -> None:
        self.hang_up()

    @property
    def transport(self) -> asyncio.Transport | None:
        """What the server's drain closes at last."""
        return self._transport

    def _write(self) -> None:
        if not self._switched and self._transport is not None:
            self._switched = True
            if not self._transport.is_closing():
                self._outgoing.insert(0, SWITCHED)
        super()._write()

    def switch(self) -> None:
        self._write()


# How many connections a server has open, and which of them makes room for a new one. Pure.


class CountedConnection(Protocol):
    """One open connection; `host` is the address of its peer."""

    host: str

    def drop(self) -> None:
        """Close at once: a new connection takes the place of this one."""


class ConnectionTable:
    """Counts connections up to a bound, and knows which of them wait for a request.

    At the bound a new connection takes the place of the one that has waited the longest, of the
    host with the most waiting connections: who opens many cannot keep out who opens one. Where
    every connection has a request in progress, the new one is not admitted.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: set[CountedConnection] = set()
        # By host, the longest waiting first.
        self._waiting: dict[str, dict[CountedConnection, None]] = {}

    def __len__(self) -> int:
        return len(self._open)

    def admit(self, connection: CountedConnection) -> bool:
        """Count a new connection, which waits for a request; False if there is no room."""
        if len(self._open) >= self._most:
            if not self._waiting:
                return False
            crowd = max(self._waiting, key=lambda host: len(self._waiting[host]))
            oldest = next(iter(self._waiting[crowd]))
            self.remove(oldest)
            oldest.drop()
        self._open.add(connection)
        self.waits(connection)
        return True

    def remove(self, connection: CountedConnection) -> None:
        """Count a connection no more; harmless for one that is not counted."""
        self._open.discard(connection)
        self.works(connection)

    def waits(self, connection: CountedConnection) -> None:
        """The connection waits for a request: from now on it may have to make room."""
        if connection in self._open:
            self._waiting.setdefault(connection.host, {})[connection] = None

    def works(self, connection: CountedConnection) -> None:
        same_host = self._waiting.get(connection.host)
        if same_host is not None and connection in same_host:
            del same_host[connection]
            if not same_host:
                del self._waiting[connection.host]


# What a request's head must be beyond what the parser checks, and how a bad one is answered.

_VERSIONS = frozenset({"1.0", "1.1"})
_MOST_DIGITS = 18  # of 2^59 bytes; Python reads no number of more than 4300 digits
_LATER = frozenset({HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE})


class Refusal(NamedTuple):
    """How a request is refused, after which its connection closes."""

    status: HTTPStatus
    why: str

    @property
    def response(self) -> bytes:
        text = f"{self.why}\n".encode()
        later = "retry-after: 1\r\n" if self.status in _LATER else ""
        head = (
            f"HTTP/1.1 {self.status.value} {self.status.phrase}\r\n"
            "content-type: text/plain; charset=utf-8\r\n"
            f"content-length: {len(text)}\r\n{later}connection: close\r\n\r\n"
        )
        return head.encode() + text


class BadHead(Exception):
    """A request that is refused while its head is read."""

    def __init__(self, refusal: "Refusal") -> None:
        super().__init__(refusal.why)
        self.refusal = refusal


MALFORMED = Refusal(HTTPStatus.BAD_REQUEST, "this is no HTTP/1.1 request")
TOO_LARGE = Refusal(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "the headers are too large")
TOO_MANY_REQUESTS = Refusal(HTTPStatus.TOO_MANY_REQUESTS, "too many requests at once")
NO_STREAM = Refusal(HTTPStatus.NOT_FOUND, "there is no such stream")
NO_ROOM = Refusal(HTTPStatus.SERVICE_UNAVAILABLE, "the server has as many connections as it takes")


def check_head(version: str, method: bytes, headers: list[Header]) -> None:
    """Raise BadHead for a request that two servers could read differently, or that none serves."""
    if version not in _VERSIONS:
        status = HTTPStatus.HTTP_VERSION_NOT_SUPPORTED
        raise _bad(status, f"HTTP/{version} is not spoken here, but HTTP/1.1")
    if method == b"CONNECT":
        raise _bad(HTTPStatus.NOT_IMPLEMENTED, "this is no proxy")
    hosts = 0
    codings: list[bytes] = []
    for name, value in headers:
        if name == b"host":
            hosts += 1
        elif name == b"content-length":
            if len(value) > _MOST_DIGITS or not value.isdigit():
                raise _bad(HTTPStatus.BAD_REQUEST, "Content-Length is malformed")
        elif name == b"transfer-encoding":
            codings.append(value)
    if hosts > 1:
        raise _bad(HTTPStatus.BAD_REQUEST, "there is more than one Host")
    if codings:
        _check_codings(version, b", ".join(codings))


def _check_codings(version: str, codings: bytes) -> None:
    if version == "1.0":  # an HTTP/1.0 server in front would have read no chunks
        raise _bad(HTTPStatus.BAD_REQUEST, "HTTP/1.0 has no Transfer-Encoding")
    if codings.lower() != b"chunked":
        shown = codings[:40].decode("latin-1")
        raise _bad(HTTPStatus.NOT_IMPLEMENTED, f"transfer encoding {shown} is not known here")


def _bad(status: HTTPStatus, why: str) -> BadHead:
    return BadHead(Refusal(status, why))


# A transport that joins the head and the body of a response, and closes without a reset.

# Above this size, copying head and body into one costs more than a gathering write.
_JOINED_BYTES = 64 << 10
_HEAD, _INTERIM = b"HTTP/1.1 ", b"HTTP/1.1 1"
# A client that has not read the rest by then, after the response is over, does not read.
_UNREAD_S = 30.0


def _nothing_comes() -> bool:
    return False


class JoiningTransport:
    """Wraps a transport and offers as much of it as uvicorn's HTTP protocol uses.

    uvicorn writes the head and the body of a response separately, and a system call costs as much
    as a third of all that the gateway does for a call. A head that no body follows within the same
    step of the event loop is sent at the next step; a write of no bytes sends it at once.

    `more_comes` says at the close whether the client may still be sending.
    """

    __slots__ = (
        "abort", "get_extra_info", "pause_reading", "resume_reading", "set_protocol",
        "wrapped", "_closing", "_giving_up", "_head", "_loop", "_more_comes",
    )  # fmt: skip

    def __init__(
        self, transport: asyncio.Transport, more_comes: Callable[[], bool] = _nothing_comes
    ) -> None:
        self.wrapped = transport
        self._loop = asyncio.get_running_loop()
        self._head = b""
        self._closing = False
        self._more_comes = more_comes
        self._giving_up: asyncio.TimerHandle | None = None
        self.abort: Callable[[], None] = transport.abort
        self.get_extra_info: Callable[..., Any] = transport.get_extra_info
        self.pause_reading: Callable[[], None] = transport.pause_reading
        self.resume_reading: Callable[[], None] = transport.resume_reading
        self.set_protocol: Callable[[asyncio.BaseProtocol], None] = transport.set_protocol

    def write(self, data: bytes) -> None:
        """Send the data behind a waiting head; hold a head back until the next loop step."""
        if self._closing:
            return
        if self._head:
            self._flush(data)
        elif data.startswith(_HEAD) and not data.startswith(_INTERIM):
            self._head = data
            self._loop.call_soon(self._flush)
        elif data:
            self.wrapped.write(data)

    def is_closing(self) -> bool:
        """Whether the connection is closed, or closes once everything is sent."""
        return self._closing or self.wrapped.is_closing()

    def close(self) -> None:
        """Send what was written, then close; a client that never reads it does not prevent that."""
        if self.is_closing():
            return
        self._flush()
        self._closing = True
        if self._more_comes():
            LingeringClose(self.wrapped, self.wrapped.get_protocol())
        else:
            self.wrapped.close()
            if self.wrapped.get_write_buffer_size():
                self._giving_up = self._loop.call_later(_UNREAD_S, self.wrapped.abort)

    def lost(self) -> None:
        """The connection is lost: whom it asked and the transport would keep each other."""
        self._more_comes = _nothing_comes
        if self._giving_up is not None:
            self._giving_up.cancel()
            self._giving_up = None

    def _flush(self, data: bytes = b"") -> None:
        head, self._head = self._head, b""
        if not head or self.wrapped.is_closing():
            return
        if len(data) <= _JOINED_BYTES:
            self.wrapped.write(head + data)
        else:
            self.wrapped.writelines((head, data))


_LINGER_S = 1.0
# A client that still sends after this much finds that nobody reads any more.
_LINGER_BYTES = 1 << 20
# For a client that reads a long answer slowly.
_MOST_LINGER_S = 60.0


class LingeringClose(asyncio.Protocol):
    """Takes a transport over from `before`: sends what is written, and drops what arrives."""

    def __init__(self, transport: asyncio.Transport, before: asyncio.BaseProtocol) -> None:
        self._transport = transport
        self._before = before
        self._loop = asyncio.get_running_loop()
        self._latest_s = self._loop.time() + _MOST_LINGER_S
        self._dropped_bytes = 0
        self._timer = self._loop.call_later(_LINGER_S, self._end)
        transport.set_protocol(self)
        if transport.can_write_eof():
            with suppress(OSError):  # the client has reset the connection, which is noticed next
                transport.write_eof()
        transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        """Drop it; behind the bound, stop reading."""
        self._dropped_bytes += len(data)
        if self._dropped_bytes > _LINGER_BYTES:
            self._transport.pause_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        self._before.connection_lost(exc)

    def pause_writing(self) -> None:
        self._before.pause_writing()

    def resume_writing(self) -> None:
        self._before.resume_writing()

    def _end(self) -> None:
        if self._transport.get_write_buffer_size() and self._loop.time() < self._latest_s:
            self._timer = self._loop.call_later(_LINGER_S, self._end)
        else:
            self._transport.abort()
