"""Calls of functions over HTTP: /function/NAME[.NAMESPACE][/rest], also by the gateway."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import NamedTuple
from uuid import uuid4

from common.http import asgi
from common.http.asgi import Header, Message, Receive, Scope, Send, watch_in
from common.http.client import HttpClient, HttpConnection
from common.tasks import BackgroundTasks
from common.telemetry.work_context import ABOUT
from gateway_ext import error_statuses
from gateway_ext.calls import passed_headers
from gateway_ext.calls.exchange import (
    CallServices,
    Exchange,
    InvokeSettings,
    received,
)
from gateway_ext.calls.function_table import CallPart, Function, FunctionCall, Functions
from gateway_ext.calls.learned import batch_size, tracing_line
from gateway_ext.calls.lease_pool import LeasePool
from gateway_ext.calls.passed_headers import BrowserGuard
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
    """The response to a call by the gateway itself; the body must be read to its end, or closed.

    A workflow's may be that a stage was `refused` for now, by the gateway or the scheduler. With
    `called` something was computed, though the status may be 429.
    """

    status: int
    headers: list[Header]
    body: AsyncGenerator[bytes, None]
    refused: bool = False
    called: bool = False


class Invoke:
    """Answers calls of functions; an ASGI application for paths below /function/."""

    def __init__(
        self,
        functions: Functions,
        client: HttpClient,
        pool: LeasePool | None,
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
        self._services = CallServices(client, pool, settings, meters, wake)
        self._inner = BackgroundTasks(log, "a call by the gateway itself")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raw_path = scope.get("raw_path") or scope["path"].encode()
        try:
            call = self._call(scope["method"], raw_path, scope["query_string"], scope["headers"])
        except GatewayError as error:
            await self._refuse(send, error, scope["headers"])
            return
        peer = scope.get("client")
        call.client = peer[0].encode("latin-1") if peer else b""
        headers_of = partial(self._confined, raw_path)
        exchange = Exchange(self._services, call, receive, headers_of, watch_in(scope))
        try:
            await self._respond(exchange, send)
        except CallerGone:
            return
        except GatewayError as error:
            if call.sent_status:  # the response is cut off
                self._services.meters.cut(call.function.label, type(error).__name__)
                return
            status, headers = error_statuses.status_of(error), error_statuses.headers_of(error)
            await asgi.send_text(send, status, str(error), [*headers, *_own_headers(call)])

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
        call = self._call(method, path, query, with_length, part)
        receive: Receive | None = None
        if isinstance(body, Streamed):
            receive = received(body.size_bytes, body.pieces)
        else:
            call.body = body
        call.journey.by_gateway = True
        exchange = Exchange(self._services, call, receive, self._back)
        answer = InnerAnswer()
        answer.task = self._inner.start(self._respond(exchange, answer.send), failed=answer.fail)
        return await answer.begun()

    def check_wait(self, function: FunctionId) -> None:
        """Busy if a call of this function that arrives now would be refused for its wait."""
        deployed = self._functions.by_id(function)
        if deployed is not None and deployed.waits.known:
            self._check_wait(deployed)

    async def close(self) -> None:
        self._services.client.close()

    def _call(
        self,
        method: str,
        path: bytes,
        query: bytes,
        headers: Iterable[Header],
        part: CallPart | None = None,
    ) -> FunctionCall:
        """A call that begins; one that comes `later` in a workflow is not refused for its wait."""
        function, rest = self._find(path)
        if method not in METHODS:
            raise WrongMethod(method)
        if function.waits.known and (part is None or not part.later):
            self._check_wait(function)  # first of all: a refusal must cost little
        asked = passed_headers.read_request(headers)
        if asked.held:
            self.guard.admit(asked)
        most_bytes = self._services.settings.max_body_bytes
        if asked.length is not None and asked.length > most_bytes:
            raise TooLarge(most_bytes)
        call_id, trace = asked.call_id.decode("latin-1"), (asked.trace, asked.trace_state)
        gpu = function.options.gpu
        journey = self.tracer.begin(call_id, function.label, method, trace, gpu=gpu)
        journey.stage = "" if part is None else part.stage
        function.called()
        self._services.meters.started(function.label)
        own_id = not asked.call_id
        return FunctionCall(function, method, rest, query, asked, journey, own_id, part=part)

    def _check_wait(self, function: Function) -> None:
        """Busy if the call would wait too long; counts it as a call, which is load to scale by."""
        try:
            function.check_wait()
        except Busy:
            function.called()
            self._services.meters.busy(function.label)
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
            self._services.meters.refused(status)
            named = next((value for name, value in asked if name == passed_headers.CALL_ID), b"")
            call_id = passed_headers.call_id_in(named) or str(uuid4()).encode()
            headers.append((passed_headers.CALL_ID, call_id))
            log.debug("call %s was refused: %s", call_id.decode("latin-1"), error)
        await asgi.send_text(send, status, str(error), headers)

    # -- responses --------------------------------------------------------------------------------

    async def _respond(self, exchange: Exchange, send: Send) -> None:
        """Make the call, and record how it ends."""
        call, journey = exchange.call, exchange.call.journey
        status, why = _SERVER_ERROR, ""
        ABOUT.set(journey)
        try:
            await exchange.respond(send)
            status = call.sent_status
        except GatewayError as error:
            _log_failure(call, error)
            status, why = error_statuses.status_of(error), error.logged
            if call.sent_status and status != _GONE:
                status = call.sent_status
            raise
        except asyncio.CancelledError:
            if journey.by_gateway:
                why = "it was not read to its end" if call.sent_status else "it was broken off"
                status = call.sent_status or _GONE
            else:  # the server stops, and answers by itself
                status, why = call.sent_status or _STOPPED, "the gateway stopped"
            raise
        except Exception as error:
            status, why = call.sent_status or _SERVER_ERROR, f"{type(error).__name__}: {error}"
            raise
        finally:
            self.tracer.ended(journey, status, why)
            took_s = journey.ended_s - journey.began_s
            self._services.meters.ended(call.function.label, status, took_s)

    def _confined(
        self, path: bytes, call: FunctionCall, connection: HttpConnection
    ) -> list[Header]:
        """The headers of a response for a browser, which got it at this path."""
        site = path[: len(path) - len(call.rest)]
        return self.guard.confine(self._back(call, connection), call.asked.host, site)

    def _back(self, call: FunctionCall, connection: HttpConnection) -> list[Header]:
        """The response's headers; learns what they report of the function."""
        back, report = passed_headers.read_response(connection.headers)
        call.learn(report, call.journey.attempts[-1].answered_in_s)
        function = call.function
        if function.options.batches.most and (together := batch_size(report.trace)):
            self._services.meters.batched(function.label, together)
        if connection.status in _BODILESS:  # our server would call a length without a body broken
            back = [header for header in back if header[0] not in _LENGTHS]
        if report.local and (tracing := tracing_line(report.local)):
            back.append((passed_headers.LOCAL, tracing))
        back += _own_headers(call)
        return back


class InnerAnswer:
    """The answer to a call by the gateway itself: sent by a task of its own, read by its caller."""

    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None
        self._messages: asyncio.Queue[Message | BaseException] = asyncio.Queue()

    async def send(self, message: Message) -> None:
        """As ASGI has it; waits until the reader has taken a piece that is not the last one."""
        self._messages.put_nowait(message)
        if message.get("more_body"):
            await self._messages.join()

    def fail(self, error: BaseException) -> None:
        self.task = None  # which has the error, and so the frames of the reader, which has this
        self._messages.put_nowait(error)

    async def begun(self) -> StreamedResponse:
        """The response, as soon as its head has been sent."""
        try:
            start = await self._next()
        except asyncio.CancelledError:
            await self._end()
            raise
        return StreamedResponse(start["status"], start["headers"], self._pieces())

    async def _pieces(self) -> AsyncGenerator[bytes, None]:
        try:
            more = True
            while more:
                message = await self._next()
                more = message.get("more_body", False)
                if message["body"]:
                    yield message["body"]
        finally:
            await self._end()

    async def _next(self) -> Message:
        message = await self._messages.get()
        self._messages.task_done()
        if isinstance(message, BaseException):
            try:
                raise message
            finally:
                del message  # an error must not be kept by a frame that it has
        return message

    async def _end(self) -> None:
        """Nobody reads the rest; return when the call holds nothing any more."""
        task = self.task
        if task is not None and not task.done():
            try:
                await asyncio.sleep(0)  # a task that has not begun would record no end
            finally:  # also if the reader is cancelled a second time meanwhile
                task.cancel()
            await asyncio.wait([task])


async def close_body(body: AsyncGenerator[bytes, None]) -> None:
    """End a call by the gateway itself, read or not.

    A generator that never started would not clean up.
    """
    with suppress(GatewayError):  # the rest of the answer is not needed
        await anext(body, b"")
    await body.aclose()


def _own_headers(call: FunctionCall) -> list[Header]:
    return [
        (passed_headers.CALL_ID, call.journey.call_id.encode("latin-1")),
        (passed_headers.START_TIME, b"%d" % call.journey.began_ns),
        (passed_headers.DURATION, b"%.6f" % (time.monotonic() - call.journey.began_s)),
    ]


def _log_failure(call: FunctionCall, error: GatewayError) -> None:
    """Log a failed call; the caller's own errors are logged for debugging only."""
    ours = error_statuses.status_of(error) >= _SERVER_ERROR
    level, cause = logging.WARNING if ours else logging.DEBUG, type(error).__name__
    text = "call %s: %s: %s"
    call.function.log.log(level, cause, text, call.journey.call_id, call.function.id, error.logged)
