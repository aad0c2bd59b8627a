"""Calls of functions over HTTP: /function/NAME[.NAMESPACE][/rest], and the same from inside."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable
from typing import NamedTuple

from gateway_ext import asgi, headers, refusals
from gateway_ext.asgi import Header, Message, Receive, Scope, Send
from gateway_ext.errors import (
    BadRequest,
    CallerGone,
    GatewayError,
    TooLarge,
    UnknownFunction,
    Unreachable,
    WrongMethod,
)
from gateway_ext.exchange import Call, Exchange, Parts
from gateway_ext.leasing import Leasing
from gateway_ext.limits import InvokeSettings
from gateway_ext.meters import Load, Meters
from gateway_ext.model import DEFAULT_NAMESPACE, FunctionId
from gateway_ext.table import Function, Functions
from gateway_ext.tracing.tracer import Tracer, TracerSettings
from gateway_ext.upstream_http import Client, Connection
from scheduler.about import ABOUT

log = logging.getLogger(__name__)

PREFIX = "/function/"
_PREFIX = PREFIX.encode()
METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"})
_SERVER_ERROR, _GONE = 500, 499
_LENGTHS = (b"content-length", b"transfer-encoding")
_BODILESS = (204, 304)


class Streamed(NamedTuple):
    """A body of a call from inside that is read while it is sent."""

    size_bytes: int
    pieces: AsyncIterator[bytes]


class Direct(NamedTuple):
    """An answer to a call from inside; the body is to be read to its end, or closed."""

    status: int
    headers: list[Header]
    body: AsyncIterator[bytes]


class Invoke:
    """Answers calls of functions; an ASGI application for paths below /function/."""

    def __init__(
        self,
        functions: Functions,
        client: Client,
        leasing: Leasing | None,
        settings: InvokeSettings,
        meters: Meters,
        *,
        wake: Callable[[Function], None] | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self.tracer = Tracer(TracerSettings()) if tracer is None else tracer
        self._functions = functions
        self._parts = Parts(client, leasing, settings, meters, wake)
        meters.loads = self._loads

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one call."""
        raw_path = scope.get("raw_path") or scope["path"].encode()
        try:
            call = self._call(scope["method"], raw_path, scope["query_string"], scope["headers"])
        except GatewayError as error:
            await self._refuse(send, error)
            return
        peer = scope.get("client")
        call.client = peer[0].encode("latin-1") if peer else b""
        self._begin(call)
        ABOUT.set(call.journey)
        exchange = Exchange(self._parts, call, receive)
        await _Relay(exchange, send, self._parts.meters, self.tracer).run()

    async def direct(
        self,
        method: str,
        path: bytes,
        query: bytes,
        said: Iterable[Header],
        body: bytes | Streamed,
    ) -> Direct:
        """Call a function from inside; `path` begins with /function/, header names are lower case.

        What goes wrong before the answer is raised as a GatewayError, as is an answer that breaks
        off, where it is read.
        """
        others = [header for header in said if header[0] not in _LENGTHS]
        length = body.size_bytes if isinstance(body, Streamed) else len(body)
        call = self._call(method, path, query, [*others, (b"content-length", b"%d" % length)])
        receive: Receive | None = None
        if isinstance(body, Streamed):
            receive = _received(body)
        else:
            call.body = body
        call.journey.again = True
        self._begin(call)
        before = ABOUT.set(call.journey)
        try:
            exchange = Exchange(self._parts, call, receive)
            return await _direct(exchange, self._parts.meters, self.tracer)
        finally:
            ABOUT.reset(before)

    async def close(self) -> None:
        """Give back what the scheduler lent, and close the connections."""
        if self._parts.leasing is not None:
            await self._parts.leasing.close()
        self._parts.client.close()

    def _call(self, method: str, path: bytes, query: bytes, said: Iterable[Header]) -> Call:
        function, rest = self._find(path)
        if method not in METHODS:
            raise WrongMethod(method)
        asked = headers.asked(said)
        most_bytes = self._parts.settings.max_body_bytes
        if asked.length is not None and asked.length > most_bytes:
            raise TooLarge(most_bytes)
        call_id, trace = asked.call_id.decode("latin-1"), (asked.trace, asked.trace_state)
        gpu = function.wishes.gpu
        journey = self.tracer.begin(call_id, function.label, method, trace, gpu=gpu)
        return Call(function, method, rest, query, asked, journey, own_id=not asked.call_id)

    def _begin(self, call: Call) -> None:
        call.function.called()
        self._parts.meters.started(call.function.label)

    def _find(self, path: bytes) -> tuple[Function, bytes]:
        """The function that a path names, and the path that is the function's own."""
        # Where the prefix itself is written with escapes, there is no name to be found.
        name, slash, rest = path.removeprefix(_PREFIX).partition(b"/")
        function = self._functions.by_path(name)
        if function is not None:
            return function, slash + rest
        if not name:
            raise BadRequest("the path names no function: it is /function/NAME")
        short, _, namespace = name.decode("latin-1").partition(".")
        raise UnknownFunction(FunctionId(namespace or DEFAULT_NAMESPACE, short))

    async def _refuse(self, send: Send, error: GatewayError) -> None:
        status = refusals.status_of(error)
        self._parts.meters.refused(status)
        await asgi.say(send, status, str(error), refusals.headers_of(error))

    def _loads(self) -> Iterable[Load]:
        for function in self._functions:
            ready = len(function.instances)
            yield Load(function.label, ready, function.inflight, function.waiting)


class _Relay:
    """Passes the answer of one call on to its caller."""

    __slots__ = ("_exchange", "_meters", "_send", "_status", "_tracer")

    def __init__(self, exchange: Exchange, send: Send, meters: Meters, tracer: Tracer) -> None:
        self._exchange = exchange
        self._send = send
        self._meters = meters
        self._tracer = tracer
        self._status = 0

    async def run(self) -> None:
        """Answer, whatever comes; only a cancellation from outside is raised."""
        exchange = self._exchange
        try:
            await self._pass_on(await exchange.answer())
        except GatewayError as error:
            await self._fail(error)
        except asyncio.CancelledError:
            reason = exchange.broken_off()
            if reason is None:
                self._ended(_GONE, "it was broken off")
                raise
            await self._fail(reason)
        finally:
            exchange.end()

    async def _pass_on(self, connection: Connection) -> None:
        exchange, send = self._exchange, self._send
        status = connection.status
        start = {
            "type": "http.response.start",
            "status": status,
            "headers": _back(exchange.call, connection),
        }
        if connection.complete:
            body = connection.take()
            exchange.end()  # a slow caller holds neither an instance nor a GPU
            self._status = status
            await send(start)
            await send({"type": "http.response.body", "body": body})
        else:
            self._status = status
            await send(start)
            # The head is not to wait for the first piece (`gathering.py`).
            await send({"type": "http.response.body", "body": b"", "more_body": True})
            more = True
            while more:
                if not connection.has_news:
                    await connection.more()
                body, more = connection.take(), not connection.complete
                if not more:
                    exchange.end()
                await send({"type": "http.response.body", "body": body, "more_body": more})
        self._ended(status)

    async def _fail(self, error: GatewayError) -> None:
        """Say what is wrong; an answer that has begun can only be cut off."""
        self._exchange.end()
        call = self._exchange.call
        _note(call, error)
        if isinstance(error, CallerGone):
            self._ended(_GONE, str(error))
        elif self._status:
            self._meters.cut(call.function.label, type(error).__name__)
            self._ended(self._status, str(error))
        else:
            status = refusals.status_of(error)
            self._ended(status, str(error))
            said = [*refusals.headers_of(error), *_ours(call)]
            await asgi.say(self._send, status, str(error), said)

    def _ended(self, status: int, error: str = "") -> None:
        call = self._exchange.call
        self._tracer.ended(call.journey, status, error)
        self._meters.ended(call.function.label, status, call.journey.ended_s - call.began_s)


def _received(body: Streamed) -> Receive:
    """A body from inside as ASGI has it; its caller never leaves, but is cancelled."""
    left_bytes = body.size_bytes

    async def receive() -> Message:
        nonlocal left_bytes
        piece = await anext(body.pieces, b"")
        if not piece:
            if left_bytes:
                raise BadRequest(f"the body lacks its last {left_bytes} bytes")
            await asyncio.Event().wait()
        left_bytes -= len(piece)
        return {"type": "http.request", "body": piece, "more_body": left_bytes > 0}

    return receive


async def _direct(exchange: Exchange, meters: Meters, tracer: Tracer) -> Direct:
    call = exchange.call
    code, connection, why = _GONE, None, "it was broken off"
    try:
        connection = await exchange.answer()
        code = connection.status
    except asyncio.CancelledError:
        reason = exchange.broken_off()
        if reason is None:
            raise
        _note(call, reason)
        code, why = refusals.status_of(reason), str(reason)
        raise reason from None
    except GatewayError as error:
        _note(call, error)
        code, why = refusals.status_of(error), str(error)
        raise
    finally:
        meters.ended(call.function.label, code, time.monotonic() - call.began_s)
        if connection is None:
            exchange.end()
            tracer.ended(call.journey, code, why)
    exchange.outlive_its_task()
    back = _back(call, connection)
    if not connection.complete:
        return Direct(connection.status, back, _pieces(exchange, connection, tracer))
    status, body = connection.status, connection.take()
    exchange.end()
    tracer.ended(call.journey, status)
    return Direct(status, back, _whole(body))


async def _whole(body: bytes) -> AsyncIterator[bytes]:
    if body:
        yield body


async def _pieces(
    exchange: Exchange, connection: Connection, tracer: Tracer
) -> AsyncIterator[bytes]:
    status, why = connection.status, "it was not read to its end"
    try:
        more = True
        while more:
            if not connection.has_news:
                await connection.more()
            body, more = connection.take(), not connection.complete
            if body:
                yield body
        why = ""
    except Unreachable as error:
        told = exchange.interruption or error
        _note(exchange.call, told)
        why = str(told)
        raise told from error
    finally:
        exchange.end()
        tracer.ended(exchange.call.journey, status, why)


def _back(call: Call, connection: Connection) -> list[Header]:
    """The headers of the answer; what it says of its models is learned."""
    back, models, told = headers.answered(connection.headers)
    if told:
        call.journey.attempts[-1].tells(told)
    if connection.status in _BODILESS:  # a length without a body is a broken answer to our server
        back = [header for header in back if header[0] not in _LENGTHS]
    if models:
        call.function.learned.saw(models)
    back += _ours(call)
    return back


def _ours(call: Call) -> list[Header]:
    return [
        (headers.CALL_ID, call.call_id.encode("latin-1")),
        (headers.START_TIME, b"%d" % call.journey.began_ns),
        (headers.DURATION, b"%.6f" % (time.monotonic() - call.began_s)),
    ]


def _note(call: Call, error: GatewayError) -> None:
    """One line for a call that failed; what only the caller has to do with is for debugging."""
    ours = refusals.status_of(error) >= _SERVER_ERROR
    level = logging.WARNING if ours else logging.DEBUG
    log.log(level, "call %s: %s: %s", call.call_id, call.function.id, error)
