"""HTTP/1.1 towards function instances: kept-alive connections over Unix sockets or TCP."""

import asyncio
import socket
from typing import cast

import httptools

from gateway_ext import headers
from gateway_ext.asgi import Header
from gateway_ext.errors import Unreachable
from gateway_ext.limits import InvokeSettings
from gateway_ext.model import FunctionId
from scheduler.client import notice_silence

# Reading from an instance stops while its caller is so far behind.
_BEHIND_BYTES = 256 << 10
_BACKLOG_PAUSE_S = 0.005
_OK, _SWITCHING, _MOST_STATUS = 200, 101, 599
_LENGTHS = (b"content-length", b"transfer-encoding")
_NOBODY = FunctionId("", "")


class _Broken(Exception):
    """What arrives is no answer of ours."""


class Connection(asyncio.Protocol):
    """One connection: a call at a time, its answer as it comes.

    What goes wrong is raised as Unreachable where the answer is waited for.
    """

    __slots__ = (
        "address", "reused", "idle_since_s", "status", "headers", "complete", "headed", "closed",
        "_loop", "_owner", "_transport", "_parser", "_function", "_head_only", "_most_head_bytes",
        "_head_bytes", "_quiet_bytes", "_interim", "_lasts", "_idle", "_spoilt", "_parts",
        "_buffered_bytes", "_paused", "_waiter", "_writable", "_error", "told",
    )  # fmt: skip

    def __init__(self, owner: "Client", address: str, max_head_bytes: int) -> None:
        self.address = address
        self.reused = False
        self.closed = False
        self.idle_since_s = 0.0
        self._loop = asyncio.get_running_loop()
        self._owner = owner
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._most_head_bytes = max_head_bytes
        self._writable: asyncio.Future[None] | None = None
        self._error: str | None = None
        self._paused = False
        self._idle = True
        self._parts: list[bytes] = []
        self._reset(_NOBODY, head_only=False)

    # -- a call ----------------------------------------------------------------------------------

    def ask(
        self, function: FunctionId, data: bytes, *, head_only: bool = False
    ) -> asyncio.Future[None]:
        """Send the beginning of a call; the future is done once status and headers are there."""
        self._reset(function, head_only=head_only)
        self._idle = False
        if self.closed or self._transport is None or self._transport.is_closing():
            raise Unreachable(function, self._error or "it closed the connection", sent=False)
        if self._parser is None:
            self._parser = httptools.HttpResponseParser(self)
        self._transport.write(data)
        return self._wait()

    def write(self, data: bytes) -> None:
        """Send more of the call's body; on a broken connection the answer says so, not this."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    async def drained(self) -> None:
        """Wait until more should be written."""
        if self._writable is not None:
            await self._writable

    def more(self) -> asyncio.Future[None]:
        """Done once there is more of the answer, or its end; ask only when there is neither."""
        waiter = self._wait()
        if self._error is not None:
            self._wake()
        return waiter

    @property
    def has_news(self) -> bool:
        """Whether `take` gives something, or the answer is over."""
        return self.complete or bool(self._parts)

    def take(self) -> bytes:
        """What came of the body and was not taken yet."""
        parts = self._parts
        body = parts[0] if len(parts) == 1 else b"".join(parts)
        self._parts = []
        self._buffered_bytes = 0
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
        return body

    def fail(self, why: str) -> None:
        """Break it off; whoever waits for the answer is told why."""
        self._error = self._error or why
        if self._transport is not None:
            self._transport.abort()
        self._wake()

    def let_go(self) -> None:
        """The call is over; the connection is kept where it can serve another one."""
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

    def _reset(self, function: FunctionId, *, head_only: bool) -> None:
        self._function = function
        self._head_only = head_only
        self.status = 0
        self.headers: list[Header] = []
        self.told = b""  # behind the body
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
            waiter.set_exception(Unreachable(self._function, self._error, sent=True))

    # -- asyncio's side --------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The transport is there."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Take in what came."""
        if self._idle or self._parser is None:
            self.fail("it spoke without being asked")
            return
        self._quiet_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self.fail("it switches protocols")
            return
        except httptools.HttpParserError as error:
            self.fail(f"it speaks no HTTP: {error.__context__ or error}")
            return
        if self._quiet_bytes > self._most_head_bytes and not self.complete:
            self.fail(f"its headers are larger than {self._most_head_bytes} bytes")
        elif self.headed:
            if self._buffered_bytes > _BEHIND_BYTES and not self._paused and not self.complete:
                self._paused = True
                assert self._transport is not None, "data comes from a transport"
                self._transport.pause_reading()
            self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        """It is gone; an answer without a length ends so."""
        self.closed = True
        self._parser = None
        self._transport = None
        self.resume_writing()
        if self._idle:
            self._owner.forget(self)
            return
        if self.headed and not self.complete and error is None and self._lasts_until_the_end():
            self.complete = True
        if not self.complete and self._error is None:
            self._error = "it closed the connection" if error is None else f"{error!r}"
        if self.complete:
            self._spoilt = True
        self._wake()

    def pause_writing(self) -> None:
        """The instance reads slower than it is written to."""
        if self._writable is None:
            self._writable = self._loop.create_future()

    def resume_writing(self) -> None:
        """It has caught up, or is gone."""
        writable, self._writable = self._writable, None
        if writable is not None and not writable.done():
            writable.set_result(None)

    def _lasts_until_the_end(self) -> bool:
        return not any(name in _LENGTHS for name, _ in self.headers)

    # -- the parser's side -----------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header; of those after the body only what an instance tells of its time is kept."""
        if self.headed:
            if name.lower() == headers.TOLD:
                self.told = value
            return
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > self._most_head_bytes:
            raise _Broken(f"more than {self._most_head_bytes} bytes of headers")
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """The status is known; one below 200 only announces another."""
        if self.complete:
            self._spoilt = True  # a second answer that nobody asked for
            return
        assert self._parser is not None, "it is being called by it"
        status = self._parser.get_status_code()
        if status == _SWITCHING or status > _MOST_STATUS:
            raise _Broken(f"status {status}")
        self._interim = status < _OK
        if not self._interim:
            self.status = status
            self.headed = True
            self.complete = self._head_only
            self._lasts = self._parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        if self.complete:
            self._spoilt = True
            return
        self._quiet_bytes = 0
        self._parts.append(body)
        self._buffered_bytes += len(body)

    def on_message_complete(self) -> None:
        """The answer is over, or the announcement of it."""
        if self._interim:
            self._interim = False
            self.headers = []
        elif not self._spoilt:
            self.complete = True


class Client:
    """Connections by address (`unix:/path` or `tcp:host:port`); unused ones are kept."""

    def __init__(self, settings: InvokeSettings) -> None:
        self._settings = settings
        self._idle: dict[str, list[Connection]] = {}
        self._sweep: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def idle_count(self) -> int:
        """How many connections are kept."""
        return sum(len(kept) for kept in self._idle.values())

    def idle(self, address: str) -> Connection | None:
        """A kept connection, if there is one; the one used last, which lives most probably."""
        kept = self._idle.get(address)
        while kept:
            connection = kept.pop()
            if not connection.closed:
                connection.reused = True
                return connection
        return None

    async def connect(self, address: str, function: FunctionId) -> Connection:
        """A new connection; Unreachable where there is none to be had in time."""
        connection = Connection(self, address, self._settings.max_head_bytes)
        try:
            async with asyncio.timeout(self._settings.connect_s):
                await _open(connection, address)
        except TimeoutError as error:
            why = f"no connection within {self._settings.connect_s:g} s"
            raise Unreachable(function, why, sent=False) from error
        except OSError as error:
            raise Unreachable(function, f"{error}", sent=False) from error
        return connection

    def keep(self, connection: Connection) -> None:
        """Take a connection back that may serve again."""
        kept = self._idle.setdefault(connection.address, [])
        if self._closed or len(kept) >= self._settings.max_idle:
            connection.fail("not needed any more")
            return
        loop = asyncio.get_running_loop()
        connection.idle_since_s = loop.time()
        kept.append(connection)
        if self._sweep is None:
            self._sweep = loop.call_later(self._settings.idle_s, self._close_unused)

    def forget(self, connection: Connection) -> None:
        """An unused connection was closed from the other side."""
        kept = self._idle.get(connection.address)
        if kept is not None and connection in kept:
            kept.remove(connection)
            if not kept:
                del self._idle[connection.address]

    def close(self) -> None:
        """Close what is kept, and keep nothing more."""
        self._closed = True
        if self._sweep is not None:
            self._sweep.cancel()
        for kept in list(self._idle.values()):
            for connection in list(kept):
                connection.fail("the gateway stops")
        self._idle.clear()

    def _close_unused(self) -> None:
        loop = asyncio.get_running_loop()
        since_s = loop.time() - self._settings.idle_s
        for address, kept in list(self._idle.items()):
            for connection in [one for one in kept if one.idle_since_s <= since_s]:
                kept.remove(connection)
                connection.fail("not needed any more")
            if not kept:
                del self._idle[address]
        pause_s = self._settings.idle_s / 2
        self._sweep = loop.call_later(pause_s, self._close_unused) if self._idle else None


async def _open(connection: Connection, address: str) -> None:
    loop = asyncio.get_running_loop()
    kind, _, where = address.partition(":")
    if kind == "tcp":
        host, _, port = where.rpartition(":")
        transport, _ = await loop.create_connection(lambda: connection, host.strip("[]"), int(port))
        notice_silence(transport.get_extra_info("socket"))
        return
    if kind != "unix":
        raise OSError(f"{address!r} is no address of ours")
    unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        unix.setblocking(False)
        await _connect_unix(unix, where)
        await loop.create_unix_connection(lambda: connection, sock=unix)
    except BaseException:
        unix.close()
        raise


async def _connect_unix(unix: socket.socket, path: str) -> None:
    """Here and not by the loop: asyncio's own takes a socket with a full backlog for connected."""
    while True:
        try:
            unix.connect(path)
        except BlockingIOError:  # the backlog is full, and the kernel does not let us wait
            await asyncio.sleep(_BACKLOG_PAUSE_S)
        else:
            return
