"""One call and its response: takes an instance, a GPU and a connection, and retries if allowed."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from common.errors import NoResponse
from common.http.asgi import ClientWatch, Message, Receive
from common.http.client import ClientSettings, HttpClient, HttpConnection
from common.time_limits import time_limit
from gateway_ext.calls import passed_headers
from gateway_ext.calls.function_call import FunctionCall
from gateway_ext.calls.function_table import Function, Instance
from gateway_ext.calls.lease_pool import CallLease, LeasePool
from gateway_ext.calls.passed_headers import RequestHeaders
from gateway_ext.errors import (
    BadRequest,
    CallerGone,
    GatewayError,
    TimedOut,
    TooLarge,
    TooSlow,
    Unreachable,
)
from gateway_ext.metrics import GatewayMeters

# The caller's disconnection is watched for only in calls that take longer than this.
_WATCH_AFTER_S = 0.01
_PAUSE_S = 0.05
# Attempts for a call that cannot have reached the function, or that is declared repeatable.
_ATTEMPTS = 3
_MOST_WAKING = 4096  # calls that wait for a function without an instance
_EXITED_S = 0.5  # from the end of a process's connections to that of its exit status


@dataclass(frozen=True, slots=True)
class InvokeSettings:
    """Bounds of the invocation path; a function's own bounds are in its options."""

    max_body_bytes: int = 512 << 20
    # An arriving body is held up to this size while its call waits for an instance.
    read_ahead_bytes: int = 1 << 20
    # How long a call waits for a function without an instance.
    wake_s: float = 60.0
    connect_s: float = 2.0
    # How long an unused connection to an instance is kept.
    idle_s: float = 30.0

    @property
    def client(self) -> ClientSettings:
        return ClientSettings(
            connect_s=self.connect_s,
            idle_s=self.idle_s,
            trailers=passed_headers.REPORTED,
        )


@dataclass(slots=True)
class CallServices:
    """Services that every call uses; `wake` starts a function that has no instance."""

    client: HttpClient
    pool: LeasePool | None
    settings: InvokeSettings
    meters: GatewayMeters
    wake: Callable[[Function], None] | None = None


class Exchange:
    """A call in progress; `end` releases everything that it holds, and may be called any time."""

    __slots__ = (
        "call", "interruption", "_services", "_upload", "_task", "_timer", "_instance",
        "_answered", "_lease", "_connection", "_avoid", "_ended",
    )  # fmt: skip

    def __init__(
        self,
        services: CallServices,
        call: FunctionCall,
        receive: Receive | None,
        client: ClientWatch | None = None,
    ) -> None:
        """`client` says when the caller leaves, if the server of the call can do so."""
        self.call = call
        self.interruption: GatewayError | None = None
        self._services = services
        self._upload = RequestBody(
            call.asked, receive, services.settings, self._interrupt, call.body, client
        )
        self._instance: Instance | None = None
        self._answered = False  # by the instance, or not counted as unanswered
        self._lease: CallLease | None = None
        self._connection: HttpConnection | None = None
        self._avoid: tuple[Instance, ...] = ()
        self._ended = False
        self._task = asyncio.current_task()
        self._timer = asyncio.get_running_loop().call_later(
            min(_WATCH_AFTER_S, call.timeout_s), self._tick
        )

    async def answer(self) -> HttpConnection:
        """The connection whose status and headers have arrived; the body can be read from it.

        To break the call off, the exchange cancels the task that made it, here or later;
        `broken_off` returns the reason.
        """
        await self._upload.begin()
        if self.call.function.reads_ahead:
            await self._upload.ahead()
        self.call.journey.received_s = time.monotonic()
        attempt = 1
        while True:
            try:
                return await self._try()
            except NoResponse as error:
                failed, sent = self._failed(error), error.sent
                repeats = attempt < _ATTEMPTS and self._may_repeat(sent=sent)
                self._note(str(error))
                self._let_go(lease=sent)
                if not repeats:
                    raise await self._ended_by(failed, error) from error
            self._services.meters.retried(self.call.function.label)
            self._avoid = (*self._avoid, failed) if failed is not None else self._avoid
            if all(instance in self._avoid for instance in self.call.function.instances):
                await asyncio.sleep(_PAUSE_S * attempt * random.uniform(0.5, 1.5))
            attempt += 1

    async def next_piece(self, connection: HttpConnection) -> bytes:
        """The next piece of the response's body; with the last one everything held is released.

        The caller may be slow: after the body's end it holds neither an instance nor a GPU.
        """
        if not connection.readable:
            try:
                await connection.more()
            except NoResponse as error:
                if self.interruption is not None:
                    raise self.interruption from error
                self._failed(error)
                # No wait for the end of its process: the caller has a status line, and no reason.
                raise self._unreachable(error, "") from error
        body = connection.take()
        if connection.complete:
            self.end()
        return body

    def broken_off(self) -> GatewayError | None:
        """The reason if the exchange cancelled its task, which may then continue; else None."""
        if self.interruption is not None and self._task is not None:
            self._task.uncancel()
        return self.interruption

    def outlive_its_task(self) -> None:
        """From now on any task may read the body: an interruption breaks the connection off."""
        self._task = None

    def end(self) -> None:
        if self._ended:
            return
        self._ended = True
        self._note("" if self.interruption is None else str(self.interruption))
        self._timer.cancel()
        self._upload.close()
        self.call.body = b""  # whoever still has the call needs it no more
        self._let_go(lease=True)

    async def _try(self) -> HttpConnection:
        call, services = self.call, self._services
        function = call.function
        attempt = call.journey.attempt()
        pool = services.pool if function.options.gpu else None
        preferred = "" if pool is None else pool.instance_for(function)
        instance = function.take(self._avoid, preferred)
        if instance is None:
            instance = await self._turn()
        self._instance, self._answered = instance, False
        attempt.instance, attempt.seated_s = instance.address, time.monotonic()
        attempt.ahead = instance.unanswered - 1
        if pool is not None and self._may_lease():
            self._lease = await pool.lease(call, instance.address)
        attempt.asked_s = time.monotonic()
        if instance.doubted_since_s:
            await until_it_answers(services.client, instance)
        connection = services.client.idle(instance.address)
        if connection is None:
            connection = await services.client.connect(instance.address)
        self._connection = connection
        head_only = call.method == "HEAD"
        upload = self._upload
        if upload.complete:
            if call.asked.has_body:
                call.asked.length, call.asked.chunked = len(upload.body), False
            data = self._head(instance) + upload.body
            await connection.ask(data, head_only=head_only)
            attempt.answered_s = time.monotonic()
            attempt.answered_in_s = attempt.answered_s - attempt.asked_s
            self._note_answered(instance)
        else:
            self._note_answered(instance)  # the instance waits for the caller
            answered = connection.ask(self._head(instance), head_only=head_only)
            upload.pour(connection)
            await answered
            attempt.answered_s = time.monotonic()
        return connection

    def _note_answered(self, instance: Instance) -> None:
        """Let the next call of the function go to this instance; a slow caller holds up none."""
        self._answered = True
        self.call.function.answered(instance)

    def _may_lease(self) -> bool:
        """Whether the call takes a lease now: it has none, and nothing is waited for but the GPU.

        A caller sends the rest of a body that exceeds the buffer as slowly as it likes. Such a call
        goes without a lease, and the function asks for its GPU itself. Bodies of async calls are
        here already.
        """
        return self._lease is None and (self._upload.complete or self.call.journey.by_gateway)

    async def _turn(self) -> Instance:
        """Wait for an instance; a start of one gets time beyond the call's own limit."""
        function, services = self.call.function, self._services
        if function.instances:
            return await function.turn(_MOST_WAKING)
        wake_s = services.settings.wake_s
        self.call.deadline_s = min(self.call.deadline_s + wake_s, self.call.latest_s)
        if services.wake is not None:
            services.wake(function)
        try:
            async with time_limit(wake_s):
                instance = await function.turn(_MOST_WAKING)
        except TimeoutError as error:
            raise function.did_not_start(wake_s) from error
        self.call.deadline_s = min(time.monotonic() + self.call.timeout_s, self.call.latest_s)
        self._timer.cancel()
        self._tick()
        return instance

    def _head(self, instance: Instance) -> bytes:
        call = self.call
        target = [instance.prefix, call.rest or b"/"]
        if call.query:
            target += (b"?", call.query)
        journey = call.journey
        extra = [b"x-call-id: ", journey.call_id.encode("latin-1")]
        extra.append(b"\r\nx-start-time: %d\r\n" % journey.began_ns)
        extra += journey.lines()
        if call.function.options.gpu:
            extra.append(b"x-gpu-within: %.3f\r\n" % max(0.0, call.deadline_s - time.monotonic()))
        if self._lease is not None:
            extra += self._lease.lines
        return passed_headers.request_head(
            call.method.encode(), target, call.asked, extra, call.client
        )

    def _failed(self, error: NoResponse) -> Instance | None:
        """The instance that broke off; it is doubted from now on if the call may have begun."""
        if error.sent and self._instance is not None:
            self._instance.doubted_since_s = time.monotonic()
        return self._instance

    async def _ended_by(self, failed: Instance | None, error: NoResponse) -> Unreachable:
        """The call's error; how a process ended is known a moment after its connections have.

        The call holds nothing by now.
        """
        exited = failed.endpoint.exited if error.sent and failed is not None else None
        if exited is not None:
            self._timer.cancel()  # the answer is known
            left_s = max(0.0, self.call.deadline_s - time.monotonic())
            await asyncio.wait([exited], timeout=min(_EXITED_S, left_s))
        ended = exited.result() if exited is not None and exited.done() else ""
        unreachable = self._unreachable(error, ended)
        self.call.journey.attempts[-1].error = unreachable.logged
        return unreachable

    def _unreachable(self, error: NoResponse, ended: str) -> Unreachable:
        function = self.call.function
        return Unreachable(
            function.id,
            str(error),
            sent=error.sent,
            ended=ended,
            tells_all=function.options.shows_errors,
            call_id=self.call.journey.call_id,
        )

    def _note(self, error: str) -> None:
        """Complete the attempt's record: its error, and the trace report after the response."""
        attempt = self.call.journey.attempts[-1] if self.call.journey.attempts else None
        if attempt is None or attempt.ended_s:
            return
        attempt.ended_s, attempt.error = time.monotonic(), error
        trailers = {} if self._connection is None else self._connection.trailers
        if trailers:  # of a stream: its head had what was known by then
            trace_report = trailers.get(passed_headers.GPU_TRACE, b"")
            models, local = trailers.get(passed_headers.MODELS), trailers.get(passed_headers.LOCAL)
            self.call.learn(trace_report, models or b"", local or b"")

    def _may_repeat(self, *, sent: bool) -> bool:
        """Whether to retry: only a call that cannot have begun, or is declared repeatable."""
        if not self._upload.repeatable:
            return not sent and self._upload.delivered
        return not sent or self.call.function.options.retry

    def _let_go(self, *, lease: bool) -> None:
        connection, self._connection = self._connection, None
        clean = connection is not None and connection.complete
        if connection is not None:
            if self._upload.delivered:
                connection.let_go()
            else:
                connection.fail("its call was broken off")
        instance, self._instance = self._instance, None
        if instance is not None:
            self.call.function.give_back(instance, answered=self._answered)
        if lease and self._lease is not None and self._services.pool is not None:
            held, self._lease = self._lease, None
            self._services.pool.release(held, clean=clean)

    # -- reasons to break a call off ---------------------------------------------------------------

    def _tick(self) -> None:
        self._upload.watch()
        left_s = self.call.deadline_s - time.monotonic()
        if left_s > 0:
            self._timer = asyncio.get_running_loop().call_later(left_s, self._tick)
            return
        function, timeout_s = self.call.function, self.call.timeout_s
        received = self._upload.complete or self.call.journey.received_s
        late = TimedOut(function.id, timeout_s, self.call.journey.call_id)
        self._interrupt(late if received else TooSlow(timeout_s))

    def _interrupt(self, error: GatewayError) -> None:
        if self._ended or self.interruption is not None:
            return
        self.interruption = error
        if self._task is not None:
            self._task.cancel()
        elif self._connection is not None:
            self._connection.fail(str(error))
            self.end()


# Instances in which a call broke off: each gets its next call only once it has answered.
#
# A process that ends may close the connection of its last call before the socket that it listens
# on. A call that connects in between could not be told from one that has begun, and must not be
# repeated. So a health request goes first: it may fail and be repeated.

_HEALTH = b"GET /_/health HTTP/1.1\r\nhost: function\r\n\r\n"


async def until_it_answers(client: HttpClient, instance: Instance) -> None:
    """Return once the instance is not doubted; NoResponse, with nothing sent, if it has ended."""
    while doubted_since_s := instance.doubted_since_s:
        await _ask(client, instance.address)
        if instance.doubted_since_s == doubted_since_s:
            instance.doubted_since_s = 0.0


async def _ask(client: HttpClient, address: str) -> None:
    """Any answer will do; its connection is kept if the whole answer came with its head."""
    connection = client.idle(address) or await client.connect(address)
    try:
        await connection.ask(_HEALTH)
    except NoResponse as error:
        raise NoResponse(str(error), sent=False) from error
    finally:
        connection.let_go()


# The body of a call, read while its caller sends it, and the caller's disconnection.


class RequestBody:
    """A body that arrives piece by piece; `complete` once all of it has arrived.

    Without a connection to write to, `body` grows up to a bound; a body that was complete before it
    was written to a connection can be sent again. `interrupt` is called if the rest of the body is
    invalid or its caller has disconnected. Without a `client` a task waits for the disconnection.
    """

    __slots__ = (
        "body", "complete", "_request", "_receive", "_settings", "_interrupt", "_came_bytes",
        "_sink", "_poured", "_delivered", "_held", "_room", "_reader", "_client", "_is_watched",
    )  # fmt: skip

    def __init__(
        self,
        request: RequestHeaders,
        receive: Receive | None,
        settings: InvokeSettings,
        interrupt: Callable[[GatewayError], None],
        body: bytes = b"",
        client: ClientWatch | None = None,
    ) -> None:
        self.body = body
        self._client = client
        self.complete = receive is None or not request.has_body
        self._request = request
        self._receive = receive
        self._settings = settings
        self._interrupt = interrupt
        self._came_bytes = 0
        self._sink: HttpConnection | None = None
        self._poured = False
        self._delivered = False
        self._held: asyncio.Future[None] | None = None
        self._room: asyncio.Future[None] | None = None
        self._reader: asyncio.Task[None] | None = None
        self._is_watched = False

    @property
    def repeatable(self) -> bool:
        return self.complete and not self._poured

    @property
    def delivered(self) -> bool:
        """Whether the connection that the body is written to has received all of it."""
        return self._delivered or not self._poured

    async def begin(self) -> None:
        """Wait for the first piece, mostly the whole body; read the rest in the background."""
        if self.complete:
            return
        assert self._receive is not None, "a body that is not received is complete"
        self._take_in(await self._receive())
        if not self.complete:
            self._reader = asyncio.get_running_loop().create_task(self._read())
        if self._is_watched:  # since before it came
            self.watch()

    async def ahead(self) -> None:
        """Wait until the body is complete or its bound is reached."""
        if not self.complete and not self._is_full():
            self._held = asyncio.get_running_loop().create_future()
            await self._held

    def watch(self) -> None:
        self._is_watched = True
        if self._reader is not None or self._receive is None or not self.complete:
            return
        if self._client is not None:
            self._client.start(self._lose_caller)
        else:
            self._reader = asyncio.get_running_loop().create_task(self._until_gone())

    def pour(self, connection: HttpConnection) -> None:
        """Send the held part, and every later piece, after a head that was sent."""
        self._poured = True
        self._sink = connection
        held, self.body = self.body, b""
        if held:
            connection.write(self._framed(held))
        if self._room is not None and not self._room.done():
            self._room.set_result(None)

    def close(self) -> None:
        """Stop reading, and let go of what was held, and of who was to be told."""
        self.body = b""
        self._interrupt = _nobody_listens
        if self._reader is not None:
            self._reader.cancel()
            self._reader = None  # a cancelled task refers to all that it worked with
        if self._client is not None:
            self._client.stop()

    async def _read(self) -> None:
        assert self._receive is not None, "there is a body to read"
        try:
            while not self.complete:
                if self._sink is None and self._is_full():
                    self._room = asyncio.get_running_loop().create_future()
                    await self._room
                if self._sink is not None:
                    await self._sink.drained()
                self._take_in(await self._receive())
        except GatewayError as error:
            self._interrupt(error)
            return
        await self._until_gone()

    async def _until_gone(self) -> None:
        assert self._receive is not None, "there is a caller"
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._lose_caller()

    def _lose_caller(self) -> None:
        self._interrupt(CallerGone())

    def _take_in(self, message: Message) -> None:
        if message["type"] == "http.disconnect":
            raise CallerGone
        piece = message.get("body", b"")
        self._came_bytes += len(piece)
        if self._came_bytes > self._settings.max_body_bytes:
            raise TooLarge(self._settings.max_body_bytes)
        self.complete = not message.get("more_body", False)
        if self.complete and self._request.length not in {None, self._came_bytes}:
            raise BadRequest("the body is shorter than its Content-Length")
        if self._sink is None:
            self.body = self.body + piece if self.body else piece
            if self.complete or self._is_full():
                self._tell_held()
            return
        data = self._framed(piece) if piece else b""
        if self.complete:
            self._delivered = True
            data += b"" if self._request.length is not None else b"0\r\n\r\n"
        self._sink.write(data)

    def _tell_held(self) -> None:
        if self._held is not None and not self._held.done():
            self._held.set_result(None)

    def _is_full(self) -> bool:
        return len(self.body) >= self._settings.read_ahead_bytes

    def _framed(self, piece: bytes) -> bytes:
        if self._request.length is not None:
            return piece
        return b"%x\r\n%b\r\n" % (len(piece), piece)


def _nobody_listens(_error: GatewayError) -> None:
    """The call is over; without this the body and its call would keep each other."""


def received(size_bytes: int, pieces: AsyncIterator[bytes]) -> Receive:
    """A body of this size as ASGI's `receive`; a caller inside the gateway never disconnects."""
    left_bytes = size_bytes

    async def receive() -> Message:
        nonlocal left_bytes
        piece = await anext(pieces, b"")
        if not piece:
            if left_bytes:
                raise BadRequest(f"the body lacks its last {left_bytes} bytes")
            await asyncio.Event().wait()
        left_bytes -= len(piece)
        return {"type": "http.request", "body": piece, "more_body": left_bytes > 0}

    return receive
