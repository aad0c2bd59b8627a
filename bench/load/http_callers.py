"""HTTP/1.1 calls to one gateway: the product's client, with callbacks and no task for each call.

The generator's CPU time would limit the load (docs/decisions/0010-command-line-libraries.md).
"""

import asyncio
import re
import ssl
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import NamedTuple
from urllib.parse import quote

from common.errors import NoResponse
from common.foreign_text import plain
from common.http.client import ClientSettings, HttpClient, HttpConnection
from gpufaas.remote.http_request import HttpUrl, http_url

NO_ANSWER = 0
_NO_HEADERS: Mapping[str, str] = MappingProxyType({})
_FIRST_FAILURE = 400
_MOST_SAID = 200  # bytes of a failure's text
_ID = re.compile(r"\b[0-9a-f-]{12,}\b")  # of a call: it would make each failure another one
# Too many requests; service unavailable.
REFUSALS = frozenset({429, 503})
_CONNECT_S = 5.0
# The server may be about to close a connection that was idle for longer than half as much again.
_MOST_IDLE_S = 2.0


class DueCall(NamedTuple):
    """A call to make: the function's index, when it is due, and a number for its caller alone."""

    function: int
    due_s: float
    number: int = 0


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

    @property
    def address(self) -> str:
        """Where a client connects to."""
        return f"{'tls' if self.url.secure else 'tcp'}:{self.url.host}:{self.url.port}"

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


class GatewayCalls:
    """Calls of one gateway; `on_ended` gets every call once.

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
        self._address = target.address
        self._client = HttpClient(_settings(most, target.tls))
        self._requests = requests
        self._on_ended = on_ended
        self._most = most
        self._timeout_s = timeout_s
        self._on_answer = on_answer
        self._on_refusal = on_refusal
        self._running: dict[HttpConnection, _Running] = {}
        self._opening: set[asyncio.Task[None]] = set()
        self._waiting: deque[DueCall] = deque()
        self._closed = False

    @property
    def in_flight(self) -> int:
        """The number of calls that have not ended."""
        return len(self._running) + len(self._opening) + len(self._waiting)

    def call(self, call: DueCall) -> None:
        """Make a call now, or at the connection limit as soon as a connection is free."""
        connection = self._client.idle(self._address)
        if connection is not None:
            self._make(connection, call)
        elif len(self._running) + len(self._opening) < self._most:
            opening = asyncio.get_running_loop().create_task(self._open(call))
            self._opening.add(opening)
            opening.add_done_callback(self._opening.discard)
        else:
            self._waiting.append(call)

    def end_overdue(self) -> None:
        """End the calls that exceed the timeout; to be called periodically."""
        before_s = time.monotonic() - self._timeout_s
        overdue = [one for one, running in self._running.items() if running.begun_s < before_s]
        for connection in overdue:
            connection.fail(f"no answer within {self._timeout_s:g} s")

    async def close(self) -> None:
        """Close all connections; calls in flight are not reported."""
        self._closed = True
        self._waiting.clear()
        for connection in self._running:
            connection.fail("the load is over")
        self._client.close()
        await asyncio.sleep(0)  # until they have left
        for opening in list(self._opening):
            opening.cancel()
        await asyncio.gather(*self._opening, return_exceptions=True)

    async def _open(self, call: DueCall) -> None:
        try:
            connection = await self._client.connect(self._address)
        except NoResponse as error:
            self._opening -= {asyncio.current_task()}  # its place is free for a call that waits
            self._end(call, NO_ANSWER, f"the gateway: {error}")
        else:
            self._make(connection, call)

    def _make(self, connection: HttpConnection, call: DueCall) -> None:
        self._running[connection] = _Running(call, time.monotonic())
        try:
            connection.ask(self._requests[call.function]).add_done_callback(
                partial(self._advance, connection)
            )
        except NoResponse as error:
            self._leave(connection, NO_ANSWER, f"the gateway: {error}")

    def _advance(self, connection: HttpConnection, arrived: asyncio.Future[None]) -> None:
        """More of an answer has arrived, or nothing will."""
        error = arrived.exception()
        if error is not None:
            self._leave(connection, NO_ANSWER, f"the gateway: {error}")
            return
        body = connection.take()
        running = self._running[connection]
        if self._on_answer is not None or len(running.body) < _MOST_SAID:
            running.body += body
        if connection.complete:
            self._answered(connection, running)
        else:
            connection.more().add_done_callback(partial(self._advance, connection))

    def _answered(self, connection: HttpConnection, running: "_Running") -> None:
        status, function, body = connection.status, running.call.function, running.body
        if self._on_answer is not None:
            self._on_answer(function, status, body)
        if self._on_refusal is not None and status in REFUSALS:
            self._on_refusal(function, status, _retry_after(connection))
        said = _first_line(body) if status >= _FIRST_FAILURE and body else ""
        self._leave(connection, status, f"{status}: {said}" if said else "")

    def _leave(self, connection: HttpConnection, status: int, reason: str) -> None:
        running = self._running.pop(connection)
        connection.let_go()
        self._end(running.call, status, reason)

    def _end(self, call: DueCall, status: int, reason: str) -> None:
        if not self._closed:
            self._on_ended(call, status, reason)
        if self._waiting:
            self.call(self._waiting.popleft())


@dataclass(slots=True)
class _Running:
    """A call that a connection makes, and what came of its answer."""

    call: DueCall
    begun_s: float
    body: bytes = b""


def _settings(most: int, tls: ssl.SSLContext | None) -> ClientSettings:
    return ClientSettings(connect_s=_CONNECT_S, max_idle=most, idle_s=_MOST_IDLE_S, tls=tls)


def _retry_after(connection: HttpConnection) -> str:
    return dict(connection.headers).get(b"retry-after", b"").decode("latin-1")


def _first_line(said: bytes) -> str:
    """The first line of a failure's text, without the call's id."""
    lines = said[:_MOST_SAID].decode("utf-8", "replace").strip().splitlines()
    return _ID.sub("...", plain(lines[0])) if lines else ""
