"""Calls of functions over HTTP: /function/NAME[.NAMESPACE][/rest], also by the gateway."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from contextlib import suppress
from typing import NamedTuple
from uuid import uuid4

from common.http import asgi
from common.http.asgi import Header, Receive, Scope, Send, watch_in
from common.http.client import HttpClient, HttpConnection
from common.telemetry.work_context import ABOUT
from gateway_ext import error_statuses
from gateway_ext.calls import passed_headers
from gateway_ext.calls.exchange import CallServices, Exchange, FunctionCall
from gateway_ext.calls.function_table import Function, Functions
from gateway_ext.calls.gpu_leasing import CallPart, GpuLeasing
from gateway_ext.calls.learned import batch_size, tracing_line
from gateway_ext.calls.passed_headers import BrowserGuard
from gateway_ext.calls.upload import InvokeSettings, received
from gateway_ext.errors import (
    BadRequest,
    Busy,
    CallerGone,
    GatewayError,
    TooLarge,
    UnknownFunction,
    WrongMethod,
)
from gateway_ext.metrics import GatewayMeters
from gateway_ext.model import DEFAULT_NAMESPACE, FunctionId
from gateway_ext.tracing.tracer import CallTracer

log = logging.getLogger(__name__)

PREFIX = "/function/"
_PREFIX = PREFIX.encode()
METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"})
_SERVER_ERROR, _GONE, _STOPPED = 500, 499, 503
_LENGTHS = (b"content-length", b"transfer-encoding")
_BODILESS = (204, 304)


class Streamed(NamedTuple):
    """The body of a call by the gateway itself, read while it is sent."""

    size_bytes: int
    pieces: AsyncIterator[bytes]


class StreamedResponse(NamedTuple):
    """The response to a call by the gateway itself; the body must be read to its end, or closed."""

    status: int
    headers: list[Header]
    body: AsyncGenerator[bytes, None]


class Invoke:
    """Answers calls of functions; an ASGI application for paths below /function/."""

    def __init__(
        self,
        functions: Functions,
        client: HttpClient,
        leasing: GpuLeasing | None,
        settings: InvokeSettings,
        meters: GatewayMeters,
        *,
        wake: Callable[[Function], None] | None = None,
        tracer: CallTracer | None = None,
        guard: BrowserGuard | None = None,
    ) -> None:
        self.guard = BrowserGuard() if guard is None else guard
        self.tracer = CallTracer() if tracer is None else tracer
        self._functions = functions
        self._parts = CallServices(client, leasing, settings, meters, wake)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raw_path = scope.get("raw_path") or scope["path"].encode()
        try:
            call = self._call(scope["method"], raw_path, scope["query_string"], scope["headers"])
        except GatewayError as error:
            await self._refuse(send, error, scope["headers"])
            return
        peer = scope.get("client")
        call.client = peer[0].encode("latin-1") if peer else b""
        self._begin(call)
        ABOUT.set(call.journey)
        exchange = Exchange(self._parts, call, receive, watch_in(scope))
        relay = _Relay(exchange, send, self._parts.meters, self.tracer, self.guard, raw_path)
        await relay.run()

    async def direct(
        self,
        method: str,
        path: bytes,
        query: bytes,
        headers: Iterable[Header],
        body: bytes | Streamed,
        part: CallPart | None = None,
    ) -> StreamedResponse:
        """Call a function from inside; `path` begins with /function/, header names are lower case.

        `part` is set of a stage of a workflow.

        A failure before the response is raised as a GatewayError; a response that breaks off
        raises one where the body is read.
        """
        others = [header for header in headers if header[0] not in _LENGTHS]
        length = body.size_bytes if isinstance(body, Streamed) else len(body)
        with_length = [*others, (b"content-length", b"%d" % length)]
        begun = part is not None and part.later
        call = self._call(method, path, query, with_length, begun=begun)
        receive: Receive | None = None
        if isinstance(body, Streamed):
            receive = received(body.size_bytes, body.pieces)
        else:
            call.body = body
        call.journey.by_gateway = True
        if part is not None:
            call.part, call.journey.stage = part, part.stage
        self._begin(call)
        before = ABOUT.set(call.journey)
        try:
            exchange = Exchange(self._parts, call, receive)
            return await _direct(exchange, self._parts.meters, self.tracer)
        finally:
            ABOUT.reset(before)

    def check_wait(self, function: FunctionId) -> None:
        """Busy if a call of this function that arrives now would be refused for its wait."""
        deployed = self._functions.by_id(function)
        if deployed is not None and deployed.waits.known:
            self._check_wait(deployed)

    async def close(self) -> None:
        self._parts.client.close()

    def _call(
        self,
        method: str,
        path: bytes,
        query: bytes,
        headers: Iterable[Header],
        *,
        begun: bool = False,
    ) -> FunctionCall:
        """The call; not refused for its wait if what it belongs to has `begun`."""
        function, rest = self._find(path)
        if method not in METHODS:
            raise WrongMethod(method)
        if function.waits.known and not begun:
            self._check_wait(function)  # first of all: a refusal must cost little
        asked = passed_headers.read_request(headers)
        if asked.held:
            self.guard.admit(asked)
        most_bytes = self._parts.settings.max_body_bytes
        if asked.length is not None and asked.length > most_bytes:
            raise TooLarge(most_bytes)
        call_id, trace = asked.call_id.decode("latin-1"), (asked.trace, asked.trace_state)
        gpu = function.options.gpu
        journey = self.tracer.begin(call_id, function.label, method, trace, gpu=gpu)
        return FunctionCall(function, method, rest, query, asked, journey, own_id=not asked.call_id)

    def _begin(self, call: FunctionCall) -> None:
        call.function.called()
        self._parts.meters.started(call.function.label)

    def _check_wait(self, function: Function) -> None:
        """Busy if the call would wait too long; counts it as a call, which is load to scale by."""
        try:
            function.check_wait()
        except Busy:
            function.called()
            self._parts.meters.busy(function.label)
            raise

    def _find(self, path: bytes) -> tuple[Function, bytes]:
        # If the prefix itself is written with escapes, no name can be found.
        name, slash, rest = path.removeprefix(_PREFIX).partition(b"/")
        function = self._functions.by_path(name)
        if function is not None:
            return function, slash + rest
        if not name:
            raise BadRequest("the path names no function: it is /function/NAME")
        short, _, namespace = name.decode("latin-1").partition(".")
        raise UnknownFunction(FunctionId(namespace or DEFAULT_NAMESPACE, short))

    async def _refuse(self, send: Send, error: GatewayError, asked: Iterable[Header]) -> None:
        status, headers = error_statuses.status_of(error), [*error_statuses.headers_of(error)]
        if not isinstance(error, Busy):  # which is counted as an answer of its function
            self._parts.meters.refused(status)
            named = next((value for name, value in asked if name == passed_headers.CALL_ID), b"")
            call_id = passed_headers.call_id_in(named) or str(uuid4()).encode()
            headers.append((passed_headers.CALL_ID, call_id))
            log.debug("call %s was refused: %s", call_id.decode("latin-1"), error)
        await asgi.send_text(send, status, str(error), headers)


async def close_body(body: AsyncGenerator[bytes, None]) -> None:
    """End a call by the gateway itself, read or not.

    A generator that never started would not clean up.
    """
    with suppress(GatewayError):  # the rest of the answer is not needed
        await anext(body, b"")
    await body.aclose()


class _Relay:
    """Passes the response of one call on to its caller."""

    __slots__ = ("_exchange", "_guard", "_meters", "_path", "_send", "_status", "_tracer")

    def __init__(
        self,
        exchange: Exchange,
        send: Send,
        meters: GatewayMeters,
        tracer: CallTracer,
        guard: BrowserGuard,
        path: bytes,
    ) -> None:
        self._exchange = exchange
        self._guard = guard
        self._path = path
        self._send = send
        self._meters = meters
        self._tracer = tracer
        self._status = 0

    async def run(self) -> None:
        """Respond to the call; only a cancellation from outside is raised."""
        exchange = self._exchange
        try:
            await self._pass_on(await exchange.answer())
        except GatewayError as error:
            await self._fail(error)
        except asyncio.CancelledError:
            reason = exchange.broken_off()
            if reason is None:  # the server stops, and answers by itself
                self._ended(self._status or _STOPPED, "the gateway stopped")
                raise
            await self._fail(reason)
        finally:
            exchange.end()

    async def _pass_on(self, connection: HttpConnection) -> None:
        exchange, send = self._exchange, self._send
        call, status = exchange.call, connection.status
        site = self._path[: len(self._path) - len(call.rest)]
        headers = self._guard.confine(_back(call, connection, self._meters), call.asked.host, site)
        start = {"type": "http.response.start", "status": status, "headers": headers}
        self._status = status
        if connection.complete:
            body = await exchange.next_piece(connection)
            await send(start)
            await send({"type": "http.response.body", "body": body})
        else:
            await send(start)
            # A write of no bytes sends the head at once (`JoiningTransport`).
            await send({"type": "http.response.body", "body": b"", "more_body": True})
            more = True
            while more:
                body = await exchange.next_piece(connection)
                more = not connection.complete
                await send({"type": "http.response.body", "body": body, "more_body": more})
        self._ended(status)

    async def _fail(self, error: GatewayError) -> None:
        """Respond with the error; a response that has begun is cut off instead."""
        self._exchange.end()
        call = self._exchange.call
        _note(call, error)
        if isinstance(error, CallerGone):
            self._ended(_GONE, str(error))
        elif self._status:
            self._meters.cut(call.function.label, type(error).__name__)
            self._ended(self._status, error.logged)
        else:
            status = error_statuses.status_of(error)
            self._ended(status, error.logged)
            headers = [*error_statuses.headers_of(error), *_ours(call)]
            await asgi.send_text(self._send, status, str(error), headers)

    def _ended(self, status: int, error: str = "") -> None:
        call = self._exchange.call
        self._tracer.ended(call.journey, status, error)
        self._meters.ended(call.function.label, status, call.journey.ended_s - call.began_s)


async def _direct(
    exchange: Exchange, meters: GatewayMeters, tracer: CallTracer
) -> StreamedResponse:
    call = exchange.call
    reason: GatewayError | None = None
    code, connection, why = _GONE, None, "it was broken off"
    try:
        connection = await exchange.answer()
        code = connection.status
    except asyncio.CancelledError:
        reason = exchange.broken_off()
        if reason is None:
            raise
        _note(call, reason)
        code, why = error_statuses.status_of(reason), str(reason)
        raise reason from None
    except GatewayError as error:
        _note(call, error)
        code, why = error_statuses.status_of(error), error.logged
        raise
    finally:
        meters.ended(call.function.label, code, time.monotonic() - call.began_s)
        if connection is None:
            exchange.end()
            tracer.ended(call.journey, code, why)
            # An error that has this frame must not be kept by it: both would stay, with the body.
            reason = exchange.interruption = None
    exchange.outlive_its_task()
    back = _back(call, connection, meters)
    if not connection.complete:
        return StreamedResponse(connection.status, back, _pieces(exchange, connection, tracer))
    status, body = connection.status, await exchange.next_piece(connection)
    tracer.ended(call.journey, status)
    return StreamedResponse(status, back, _whole(body))


async def _whole(body: bytes) -> AsyncGenerator[bytes, None]:
    if body:
        yield body


async def _pieces(
    exchange: Exchange, connection: HttpConnection, tracer: CallTracer
) -> AsyncGenerator[bytes, None]:
    status, why = connection.status, "it was not read to its end"
    try:
        more = True
        while more:
            body = await exchange.next_piece(connection)
            more = not connection.complete
            if body:
                yield body
        why = ""
    except GatewayError as error:
        _note(exchange.call, error)
        why = error.logged
        raise
    finally:
        exchange.end()
        tracer.ended(exchange.call.journey, status, why)


def _back(call: FunctionCall, connection: HttpConnection, meters: GatewayMeters) -> list[Header]:
    """The response's headers; learns the models that they report."""
    back, models, trace_report, local = passed_headers.read_response(connection.headers)
    if trace_report:
        attempt = call.journey.attempts[-1]
        attempt.keep_report(trace_report)
        if call.function.options.batches.most and (together := batch_size(trace_report)):
            meters.batched(call.function.label, together)
        waits = call.function.waits
        if attempt.ahead >= waits.at_a_time:
            waits.saw_report(attempt.ahead, trace_report, attempt.answered_in_s)
    if connection.status in _BODILESS:  # our server would treat a length without a body as broken
        back = [header for header in back if header[0] not in _LENGTHS]
    if models:
        call.function.learned.saw(models)
    if local:
        call.function.local.saw(local)
        if tracing := tracing_line(local):
            back.append((passed_headers.LOCAL, tracing))
    back += _ours(call)
    return back


def _ours(call: FunctionCall) -> list[Header]:
    return [
        (passed_headers.CALL_ID, call.call_id.encode("latin-1")),
        (passed_headers.START_TIME, b"%d" % call.journey.began_ns),
        (passed_headers.DURATION, b"%.6f" % (time.monotonic() - call.began_s)),
    ]


def _note(call: FunctionCall, error: GatewayError) -> None:
    """Log a failed call; the caller's own errors are logged for debugging only."""
    ours = error_statuses.status_of(error) >= _SERVER_ERROR
    level, cause = logging.WARNING if ours else logging.DEBUG, type(error).__name__
    text = "call %s: %s: %s"
    call.function.log.log(level, cause, text, call.call_id, call.function.id, error.logged)
