"""One HTTP/1.1 connection: a request at a time, parsed strictly, answered whole or in a stream."""

import asyncio
import http
import os
import re
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from gateway_ext.runtime.handler_values import HandlerResponse, Headers

_MAX_AHEAD_BYTES = 256 << 10  # received before the last response is sent
_MOST_AT_ONCE_BYTES = 64 << 10  # of a response that the thread of its call sends
_FIRST_REQUEST_S = 1.0  # from a client that connected while the server stops
_HEAD_S = 30.0  # for a request's headers, where no other time limit is set
_IDLE_S = 75.0  # without a request; the gateway keeps an unused connection for less
_REASONS = {status.value: status.phrase for status in http.HTTPStatus}
_NO_BODY = {204, 304}

Pair = tuple[str, str]
Pairs = list[Pair]
ClientLeft = Callable[[], None]


@dataclass(frozen=True, slots=True)
class ConnectionSite:
    """What all connections of one server share."""

    # Serves a request; returns what to call if its client leaves, None if it is answered already.
    begin: Callable[["RequestHead", bytes, "ServerConnection"], ClientLeft | None]
    # Calls `answered` where a thread has answered since: before what depends on it.
    catch_up: Callable[[], None]
    max_connections: int
    max_body_bytes: int
    read_timeout_s: float
    # The one that has waited the longest comes first.
    connections: dict["ServerConnection", None] = field(default_factory=dict)


class ServerConnection(asyncio.Protocol):
    """The server's end of a connection; methods are called in the event loop, or say so."""

    def __init__(self, site: ConnectionSite) -> None:
        self.busy = False
        self.lost = False
        self.room = threading.Event()  # set while a stream may be written, and after its end
        self.room.set()
        self.asked_s = 0.0  # when the head of the last request was here
        self._site = site
        self._loop = asyncio.get_running_loop()
        self._made_s = self._loop.time()
        self._answered = False
        self._transport: asyncio.Transport
        self._descriptor = -1
        self._sending = threading.Lock()  # held by a thread that sends; until then nothing closes
        self._unsent = b""  # what such a thread leaves to the loop
        self._buffer = bytearray()
        self._head: RequestHead | None = None
        self._body: BodyParser | None = None
        self._client_left: ClientLeft | None = None
        self._last = False  # the connection closes after this answer
        self._chunked = False
        self._mute = False  # the answer has no body (HEAD, 204)
        self._slow: asyncio.TimerHandle | None = None
        self._unused: asyncio.TimerHandle | None = None
        self._unused_since_s: float | None = None
        self._waiters: list[Callable[[], None]] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._descriptor = transport.get_extra_info("socket").fileno()
        self._site.catch_up()
        if len(self._site.connections) >= self._site.max_connections:
            self._make_room()
        self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self._site.catch_up()
        with self._sending:  # the transport closes its socket after this
            self.lost = True
        self._site.connections.pop(self, None)
        self._watch_slowness(on=False)
        if self._unused is not None:
            self._unused.cancel()
        self._let_go()

    def eof_received(self) -> bool:
        """The client has closed its side: it has left."""
        self._site.catch_up()
        if self.busy:
            self._transport.abort()
        return False

    def data_received(self, data: bytes) -> None:
        self._site.catch_up()
        self._buffer += data
        self._unused_since_s = None
        if self.busy:
            self._site.catch_up()  # a thread that answered just now may not have seen the data
        if not self.busy:
            self._read_on()
        elif len(self._buffer) > _MAX_AHEAD_BYTES:
            self._transport.pause_reading()

    def pause_writing(self) -> None:
        self.room.clear()

    def resume_writing(self) -> None:
        self.room.set()
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter()

    def when_room(self, callback: Callable[[], None]) -> None:
        """Call back as soon as more may be written, at once if that is now."""
        if self.room.is_set():
            callback()
        else:
            self._waiters.append(callback)

    @property
    def waiting(self) -> bool:
        return not self.busy and self._head is None

    def drop(self) -> None:
        self._site.connections.pop(self, None)
        self._transport.abort()

    def answer(self, answer: HandlerResponse) -> None:
        if self.lost:
            return
        self._transport.write(self.encoded(answer))
        self._done()

    def encoded(self, answer: HandlerResponse) -> bytes:
        """Return a whole response as it is sent; the thread of its call may ask."""
        has_body = answer.status not in _NO_BODY
        framing = f"Content-Length: {len(answer.body)}\r\n" if has_body else ""
        head = self._head_bytes(answer.status, answer.headers, framing)
        return head if self._silent(answer.status) else head + answer.body

    def answer_from_thread(self, data: bytes) -> bool:
        """Send what can be sent at once of a whole response; called in the thread of its call.

        `answered` has to follow in the loop, soon if this returns False.
        """
        sent = 0
        with self._sending:
            self._client_left = None
            # Past the transport, if that has nothing to send itself.
            transport, fits = self._transport, len(data) <= _MOST_AT_ONCE_BYTES
            closes = self.lost or transport.is_closing()
            if fits and not closes and not transport.get_write_buffer_size():
                with suppress(OSError):  # the transport will meet the same error
                    sent = os.write(self._descriptor, data)
        self._unsent = data[sent:]
        return not self._unsent and not self._last

    def answered(self) -> None:
        """A thread has sent the response, or left a part of it."""
        unsent, self._unsent = self._unsent, b""
        if self.lost:
            return
        if unsent:
            self._transport.write(unsent)
        self._done()

    @property
    def has_read_ahead(self) -> bool:
        """Whether a part of the next request is here; any thread may ask."""
        return bool(self._buffer)

    def start_stream(self, status: int, headers: Pairs) -> None:
        if self.lost:
            return
        self._mute = self._silent(status)
        self._chunked = self._head is not None and self._head.chunks_allowed
        framing = ""
        if self._chunked and status not in _NO_BODY:
            framing = "Transfer-Encoding: chunked\r\n"
        elif not self._chunked:
            self._last = True
        self._transport.write(self._head_bytes(status, headers, framing))

    def piece(self, data: bytes) -> None:
        if self.lost or self._mute or not data:
            return
        if self._chunked:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        self._transport.write(data)

    def end_stream(self, trailers: Pairs) -> None:
        """End a stream, with trailers if the client can read them."""
        if self.lost:
            return
        if self._chunked and not self._mute:
            lines = "".join(f"{name}: {value}\r\n" for name, value in trailers)
            self._transport.write(f"0\r\n{lines}\r\n".encode("latin-1"))
        self._done()

    def break_off(self) -> None:
        """Close in the middle of a stream, so that the client sees that it is incomplete."""
        self._client_left = None
        self._transport.abort()

    def refuse(
        self, status: int, why: str, *, last: bool = False, headers: Sequence[Pair] = ()
    ) -> None:
        self._last = self._last or last
        retry = [("Retry-After", "1")] if status in (429, 503) else []
        text = ("Content-Type", "text/plain; charset=utf-8")
        body = f"{why}\n".encode(errors="backslashreplace")  # an error's text may be of any letters
        self.answer(HandlerResponse(status, [text, *retry, *headers], body))

    def finish(self) -> None:
        """Close, unless a response is due; the server calls this until the connection is closed.

        A response is due to a request that has begun, and for a moment to a client that has just
        connected: closing before its request is read would reset the connection.
        """
        self._last = True
        begun = self.busy or self._head is not None or bool(self._buffer)
        awaited = not self._answered and self._loop.time() < self._made_s + _FIRST_REQUEST_S
        if not begun and not awaited:
            self._transport.close()

    def _read_on(self) -> None:
        try:
            while not self.busy and not self.lost and self._read_request():
                pass
        except Malformed as error:
            self._buffer.clear()
            self._watch_slowness(on=False)
            self.refuse(error.status, str(error), last=True)
            return
        if not self.busy and not self.lost:
            begun = bool(self._buffer) or self._head is not None
            self._watch_slowness(on=begun and (self._head is None or self._site.read_timeout_s > 0))
            if not begun:
                self._await_request()

    def _read_request(self) -> bool:
        if self._head is None:
            self._head = head_in(self._buffer)
            if self._head is None:
                return False
            self.asked_s = self._loop.time()
            self._body = BodyParser(self._head.length, self._site.max_body_bytes)
            if self._head.expects_continue and not self._buffer and self._head.length != 0:
                self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        assert self._body is not None
        if not self._body.take(self._buffer):
            return False
        content, self._body = self._body.content(), None
        if self._slow is not None:
            self._watch_slowness(on=False)
        self._unused_since_s = None
        self.busy = True
        self._last = self._last or not self._head.keep_alive
        self._client_left = self._site.begin(self._head, content, self)
        return True

    def _done(self) -> None:
        self._answered = True
        self._client_left = None
        self._head = self._body = None
        self.busy = self._chunked = self._mute = False
        if self._last:
            self._transport.close()
            return
        self._await_request()
        if self._buffer:
            self._transport.resume_reading()
            # In a later step: immediate responses would recurse once for each pipelined request.
            self._loop.call_soon(self._resume)

    def _resume(self) -> None:
        if not self.busy and not self.lost:
            self._read_on()

    def _let_go(self) -> None:
        client_left, self._client_left = self._client_left, None
        if client_left is not None:
            client_left()
        self.resume_writing()

    def _silent(self, status: int) -> bool:
        return status in _NO_BODY or (self._head is not None and self._head.method == "HEAD")

    def _head_bytes(self, status: int, headers: Pairs, framing: str) -> bytes:
        first = f"HTTP/1.1 {status} {_REASONS.get(status, 'Status')}\r\n"
        lines = "".join([f"{name}: {value}\r\n" for name, value in headers])
        end = "Connection: close\r\n\r\n" if self._last else "\r\n"
        return f"{first}{lines}{framing}{end}".encode("latin-1")

    def _watch_slowness(self, *, on: bool) -> None:
        if not on and self._slow is not None:
            self._slow.cancel()
            self._slow = None
        elif on and self._slow is None:
            limit_s = self._site.read_timeout_s or _HEAD_S
            self._slow = self._loop.call_later(limit_s, self._too_slow)

    def _await_request(self) -> None:
        """Wait for a request, behind the connections that have waited for longer."""
        self._site.connections.pop(self, None)
        self._site.connections[self] = None
        self._unused_since_s = self._loop.time()
        if self._unused is None:
            self._unused = self._loop.call_later(_IDLE_S, self._close_if_unused)

    def _close_if_unused(self) -> None:
        """The timer stays when a request comes, so that not each of them makes a new one."""
        self._site.catch_up()
        since_s, now_s = self._unused_since_s, self._loop.time()
        if since_s is not None and since_s + _IDLE_S <= now_s:
            self._unused = None
            self._transport.close()
        else:
            # A thread may just have answered, and the loop not know it yet.
            due_s = _IDLE_S + (now_s if since_s is None else since_s)
            self._unused = self._loop.call_at(due_s, self._close_if_unused)

    def _make_room(self) -> None:
        """Close the connection that has waited the longest; this one, if all have a request."""
        next((other for other in self._site.connections if other.waiting), self).drop()

    def _too_slow(self) -> None:
        self._slow = None
        self.refuse(408, "the request did not arrive in time", last=True)


# An incremental parser of requests. Pure, and strict against request smuggling.

MAX_HEAD_BYTES = 64 << 10
_MAX_HEADERS = 256
_MAX_LINE_BYTES = 4 << 10  # of a chunk's size, or of a trailer
_REQUEST = re.compile(r"([A-Z]+) ([!-~]+) HTTP/([0-9]\.[0-9])")
_VERSIONS = ("1.0", "1.1")
_HEADER = re.compile(r"^([!#$%&'*+.^_`|~0-9A-Za-z-]+):([^\r\n\0]*)\r\n", re.MULTILINE)
_HEX = re.compile(rb"[0-9A-Fa-f]{1,15}")


class Malformed(Exception):
    """A request that cannot be served; `status` is the answer."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


@dataclass(slots=True)
class RequestHead:
    """A request without its body; `length` is None where the body comes in chunks."""

    method: str
    target: str
    headers: Headers
    length: int | None
    keep_alive: bool
    chunks_allowed: bool
    expects_continue: bool


def head_in(buffer: bytearray) -> RequestHead | None:
    """Take a request head off the buffer, once it is complete."""
    while buffer.startswith(b"\r\n"):  # some clients send an extra line end after a body
        del buffer[:2]
    end = buffer.find(b"\r\n\r\n", 0, MAX_HEAD_BYTES)
    if end < 0:
        if len(buffer) >= MAX_HEAD_BYTES:
            raise Malformed(431, "the headers are too long")
        return None
    text = buffer[: end + 2].decode("latin-1")
    del buffer[: end + 4]
    first, _, lines = text.partition("\r\n")
    match = _REQUEST.fullmatch(first)
    if match is None:
        raise Malformed(400, "this is no HTTP/1.1 request")
    method, target, version = match.groups()
    if version not in _VERSIONS:
        raise Malformed(505, f"HTTP/{version} is not spoken here, but HTTP/1.1")
    return _head(method, _origin(target), _headers(lines), modern=version == "1.1")


def _origin(target: str) -> str:
    if target.startswith("/") or target == "*":
        return target
    _, separator, rest = target.partition("://")
    if not separator:
        raise Malformed(400, "the target is neither a path nor a URL")
    _, slash, path = rest.partition("/")
    return slash + path or "/"


def _headers(lines: str) -> Headers:
    """The headers, each of whose lines is whole: only then there are as many as line feeds."""
    count = lines.count("\n")
    if count > _MAX_HEADERS:
        raise Malformed(431, "there are too many headers")
    pairs = [(name, value.strip(" \t")) for name, value in _HEADER.findall(lines)]
    if len(pairs) != count:
        raise Malformed(400, "a header is malformed")
    return Headers(pairs)


def _head(method: str, target: str, headers: Headers, *, modern: bool) -> RequestHead:
    if len(headers.getlist("host")) > 1:
        raise Malformed(400, "there is more than one Host")
    connection = headers.get("connection")
    tokens = {token.strip() for token in connection.lower().split(",")} if connection else ()
    return RequestHead(
        method=method,
        target=target,
        headers=headers,
        length=_length(headers, modern=modern),
        keep_alive="close" not in tokens if modern else "keep-alive" in tokens,
        chunks_allowed=modern,
        expects_continue=modern and headers.get("expect", "").lower() == "100-continue",
    )


def _length(headers: Headers, *, modern: bool) -> int | None:
    lengths = headers.getlist("content-length")
    codings = ", ".join(headers.getlist("transfer-encoding")).lower()
    if codings and lengths:
        raise Malformed(400, "both Content-Length and Transfer-Encoding")
    if codings:
        if not modern:  # an HTTP/1.0 server in front would have read no chunks
            raise Malformed(400, "HTTP/1.0 has no Transfer-Encoding")
        if codings != "chunked":
            raise Malformed(501, f"transfer encoding {codings[:40]} is not known here")
        return None
    if not lengths:
        return 0
    length = lengths.pop()
    if lengths or not length.isascii() or not length.isdecimal() or len(length) > 18:  # noqa: PLR2004 - digits of 2^60
        raise Malformed(400, "Content-Length is malformed")
    return int(length)


class BodyParser:
    """A request's body as it arrives."""

    def __init__(self, length: int | None, limit_bytes: int) -> None:
        if length is not None and length > limit_bytes:
            raise Malformed(413, f"the body is larger than {limit_bytes} bytes")
        self._chunked = length is None
        self._missing_bytes = length or 0
        self._limit_bytes = limit_bytes
        self._content = bytearray()  # one object, however many chunks the body comes in
        self._size_bytes = 0
        self._ends_chunk = False
        self._in_trailers = False

    def take(self, buffer: bytearray) -> bool:
        """Take the body's bytes off the buffer; True once the body is complete."""
        if not self._chunked:
            self._move(buffer)
            return self._missing_bytes == 0
        while True:
            if self._missing_bytes:
                self._move(buffer)
                if self._missing_bytes:
                    return False
                self._ends_chunk = True
            line = _line_in(buffer)
            if line is None:
                return False
            if self._take_line(line):
                return True

    def content(self) -> bytes:
        return bytes(self._content)

    def _move(self, buffer: bytearray) -> None:
        if not buffer or not self._missing_bytes:
            return
        part = buffer[: self._missing_bytes]
        del buffer[: len(part)]
        self._content += part
        self._missing_bytes -= len(part)

    def _take_line(self, line: bytes) -> bool:
        if self._ends_chunk:
            if line:
                raise Malformed(400, "a chunk is longer than its size")
            self._ends_chunk = False
        elif self._in_trailers:
            return not line
        else:
            self._begin_chunk(line.partition(b";")[0].strip(b" \t"))
        return False

    def _begin_chunk(self, size: bytes) -> None:
        if not _HEX.fullmatch(size):
            raise Malformed(400, "a chunk's size is malformed")
        self._missing_bytes = int(size, 16)
        self._size_bytes += self._missing_bytes
        self._in_trailers = not self._missing_bytes
        if self._size_bytes > self._limit_bytes:
            raise Malformed(413, f"the body is larger than {self._limit_bytes} bytes")


def _line_in(buffer: bytearray) -> bytes | None:
    end = buffer.find(b"\r\n", 0, _MAX_LINE_BYTES)
    if end < 0:
        if len(buffer) >= _MAX_LINE_BYTES:
            raise Malformed(400, "a line of a chunked body is too long")
        return None
    line = bytes(buffer[:end])
    del buffer[: end + 2]
    return line
