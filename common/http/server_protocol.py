"""uvicorn's HTTP protocol, with bounds on all that a client may send before it is served."""

import asyncio
import logging
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import unquote

import httptools
from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from common.frame_line import LineBroken
from common.http.accepted_line import AcceptedLine, StreamHandler
from common.http.asgi import Scope, offer_watch, watch_in
from common.http.connection_table import ConnectionTable
from common.http.joining_transport import JoiningTransport
from common.http.request_head import (
    MALFORMED,
    NO_ROOM,
    TOO_LARGE,
    TOO_MANY_REQUESTS,
    BadHead,
    Refusal,
    check_head,
)
from common.stream_upgrade import PROTOCOL, StreamRequest

log = logging.getLogger(__name__)

MOST_PIPELINED = 64  # requests that wait behind the first one of their connection
_BODY_HEADERS = frozenset({b"content-length", b"transfer-encoding"})


@dataclass(frozen=True, slots=True)
class Limits:
    """What a client may take of a server before the application sees a request.

    `connections` is the most that wait or are served at once (`connection_table`).
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
        table: ConnectionTable,
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
        """After a complete message only another head can follow."""
        self._quiet_bytes = 0
        super().on_message_complete()
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

    def _refuse(self, refusal: Refusal) -> None:
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


async def _serve_stream(streams: StreamHandler, request: StreamRequest, line: AcceptedLine) -> None:
    try:
        async with line:
            await streams(request, line)
    except LineBroken as error:
        log.debug("the stream %r: %s", request.path[:200], error)
    except Exception:
        log.exception("the stream %r failed", request.path[:200])
