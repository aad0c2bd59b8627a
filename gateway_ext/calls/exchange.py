"""One call and its response: takes an instance, a GPU and a connection, and retries if allowed."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from common.errors import NoResponse
from common.http.asgi import ClientWatch, Header, Message, Receive, Send
from common.http.client import ClientSettings, HttpClient, HttpConnection
from common.time_limits import time_limit
from gateway_ext.calls import passed_headers
from gateway_ext.calls.function_table import Function, FunctionCall, Instance
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
from gateway_ext.tracing.journey import Attempt

# The caller's disconnection is watched for only in calls that take longer than this.
_WATCH_AFTER_S = 0.01
_PAUSE_S = 0.05
# Attempts for a call that cannot have reached the function, or that is declared repeatable.
_ATTEMPTS = 3
_MOST_WAKING = 4096  # calls that wait for a function without an instance
_EXITED_S = 0.5  # from the end of a process's connections to that of its exit status
_NO_LEASE = nullcontext(None)


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
    """A call in progress: all that it holds is held by the blocks of `respond`.

    As a context it is what an error from outside can break off: the end of the call's time, or its
    caller that leaves.
    """

    __slots__ = (
        "call", "_answered", "_avoid", "_broken", "_cancelling", "_headers_of",
        "_services", "_task", "_timer", "_upload",
    )  # fmt: skip

    _timer: asyncio.TimerHandle  # of the block

    def __init__(
        self,
        services: CallServices,
        call: FunctionCall,
        receive: Receive | None,
        headers_of: Callable[[FunctionCall, HttpConnection], list[Header]],
        client: ClientWatch | None = None,
    ) -> None:
        """`headers_of` gives the headers of the response to the function's answer.

        `client` says when the caller leaves, if the server of the call can do so.
        """
        self.call = call
        self._services = services
        self._headers_of = headers_of
        self._upload = RequestBody(
            call.asked, receive, services.settings, self._break_off, call.body, client
        )
        self._task: asyncio.Task[object] | None = None
        self._cancelling = 0
        self._broken: GatewayError | None = None
        self._answered = False  # by the instance, or not counted as unanswered
        self._avoid: tuple[Instance, ...] = ()  # with which attempts failed

    async def respond(self, send: Send) -> None:
        """Send the response; a GatewayError after its status was sent means that it is cut off.

        The caller may be slow: after the body's end it holds neither an instance nor a GPU.
        """
        call = self.call
        try:
            with self:
                await self._upload.begin()
                if call.function.reads_ahead:
                    await self._upload.ahead()
                call.journey.received_s = time.monotonic()
                rest = await self._attempts(send)
        finally:
            self._upload.close()
            call.body = b""  # whoever still has the call needs it no more
        for message in rest:
            await send(message)

    async def _attempts(self, send: Send) -> list[Message]:
        """Make attempts until one is answered; pass that answer on, and return what is its last."""
        call = self.call
        while True:
            try:
                return await self._attempt(send)
            except NoResponse as error:
                is_last = len(call.journey.attempts) >= _ATTEMPTS
                if is_last or not self._may_repeat(sent=error.sent):
                    raise await self._ended_by(error) from error
            self._services.meters.retried(call.function.label)
            if all(instance in self._avoid for instance in call.function.instances):
                pause_s = _PAUSE_S * len(call.journey.attempts)
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.5))

    def _may_repeat(self, *, sent: bool) -> bool:
        """Whether to retry: only a call that cannot have begun, or is declared repeatable."""
        if not self._upload.repeatable:
            return not sent and self._upload.delivered
        return not sent or self.call.function.options.retry

    async def _attempt(self, send: Send) -> list[Message]:
        call, function, attempt = self.call, self.call.function, self.call.journey.attempt()
        pool = self._services.pool if function.options.gpu else None
        instance = function.take(self._avoid, "" if pool is None else pool.best_instance(function))
        if instance is None:
            instance = await self._turn()
        self._answered, why = False, ""
        attempt.instance, attempt.seated_s = instance.address, time.monotonic()
        attempt.ahead = instance.unanswered - 1
        try:
            with _NO_LEASE if pool is None else CallLease(pool, call) as lease:
                return await self._exchange(instance, attempt, lease, send)
        except NoResponse as error:
            why, self._avoid = str(error), (*self._avoid, instance)
            if error.sent:  # it is doubted from now on, as the call may have begun
                instance.doubted_since_s = time.monotonic()
            if call.sent_status:
                # No wait for the end of its process: the caller has a status line, and no reason.
                raise self._unreachable(error, "") from error
            raise
        finally:
            function.give_back(instance, answered=self._answered)
            attempt.ended_s = time.monotonic()
            attempt.error = why if self._broken is None else str(self._broken)

    async def _exchange(
        self, instance: Instance, attempt: Attempt, lease: CallLease | None, send: Send
    ) -> list[Message]:
        # A caller sends the rest of a body that exceeds the buffer as slowly as it likes. Such a
        # call goes without a lease, and the function asks for its GPU itself. Bodies of async calls
        # are here already.
        if lease is not None and (self._upload.complete or self.call.journey.by_gateway):
            await lease.take(instance.address)
        attempt.asked_s = time.monotonic()
        client = self._services.client
        if instance.doubted_since_s:
            await until_it_answers(client, instance)
        connection = client.idle(instance.address)
        if connection is None:
            connection = await client.connect(instance.address)
        try:
            await self._ask(connection, instance, attempt, () if lease is None else lease.lines)
            return await self._pass_on(connection, send)
        finally:
            if self._upload.delivered:
                connection.let_go()
            else:
                connection.fail("its call was broken off")

    async def _turn(self) -> Instance:
        """Wait for an instance; a start of one gets time beyond the call's own limit."""
        call, function, services = self.call, self.call.function, self._services
        if function.instances:
            return await function.turn(_MOST_WAKING)
        wake_s = services.settings.wake_s
        call.deadline_s = min(call.deadline_s + wake_s, call.latest_s)
        if services.wake is not None:
            services.wake(function)
        try:
            async with time_limit(wake_s):
                instance = await function.turn(_MOST_WAKING)
        except TimeoutError as error:
            raise function.did_not_start(wake_s) from error
        call.deadline_s = min(time.monotonic() + call.timeout_s, call.latest_s)
        self._timer.cancel()
        self._tick()
        return instance

    async def _ask(
        self,
        connection: HttpConnection,
        instance: Instance,
        attempt: Attempt,
        lease: Sequence[bytes],
    ) -> None:
        """Send the request, and wait for the head of the answer."""
        asked, upload, head_only = self.call.asked, self._upload, self.call.method == "HEAD"
        if upload.complete:
            if asked.has_body:
                asked.length, asked.chunked = len(upload.body), False
            data = self._head(instance, lease) + upload.body
            await connection.ask(data, head_only=head_only)
            attempt.answered_s = time.monotonic()
            attempt.answered_in_s = attempt.answered_s - attempt.asked_s
            self._note_answered(instance)
        else:
            self._note_answered(instance)  # the instance waits for the caller
            answered = connection.ask(self._head(instance, lease), head_only=head_only)
            upload.pour(connection)
            await answered
            attempt.answered_s = time.monotonic()

    def _note_answered(self, instance: Instance) -> None:
        """Let the next call of the function go to this instance; a slow caller holds up none."""
        self._answered = True
        self.call.function.answered(instance)

    def _head(self, instance: Instance, lease: Sequence[bytes]) -> bytes:
        call, journey = self.call, self.call.journey
        target = [instance.prefix, call.rest or b"/"]
        if call.query:
            target += (b"?", call.query)
        extra = [b"x-call-id: ", journey.call_id.encode("latin-1")]
        extra.append(b"\r\nx-start-time: %d\r\n" % journey.began_ns)
        extra += journey.lines()
        if call.function.options.gpu:
            extra.append(b"x-gpu-within: %.3f\r\n" % max(0.0, call.deadline_s - time.monotonic()))
        extra += lease
        return passed_headers.request_head(
            call.method.encode(), target, call.asked, extra, call.client
        )

    async def _pass_on(self, connection: HttpConnection, send: Send) -> list[Message]:
        """Send the answer but for its last piece, which is returned, with a head not sent yet."""
        call = self.call
        start: Message = {
            "type": "http.response.start",
            "status": connection.status,
            "headers": self._headers_of(call, connection),
        }
        call.sent_status = connection.status
        is_whole, rest = connection.complete, [start]
        if not is_whole:
            rest = []
            await send(start)
            # A write of no bytes sends the head at once (`JoiningTransport`).
            await send({"type": "http.response.body", "body": b"", "more_body": True})
        while not is_whole:
            if not connection.readable:
                await connection.more()
            is_whole = connection.complete
            if not is_whole:
                piece = connection.take()
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        if connection.trailers:
            call.learn(passed_headers.read_trailers(connection.trailers))
        return [*rest, {"type": "http.response.body", "body": connection.take()}]

    async def _ended_by(self, error: NoResponse) -> Unreachable:
        """The call's error; how a process ended is known a moment after its connections have.

        The call holds nothing by now.
        """
        exited = self._avoid[-1].endpoint.exited if error.sent else None
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

    # -- reasons to break a call off ---------------------------------------------------------------

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None, "a call is in a task"
        self._task, self._cancelling = task, task.cancelling()
        self._timer = asyncio.get_running_loop().call_later(
            min(_WATCH_AFTER_S, self.call.timeout_s), self._tick
        )

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Raise the error by which the block was broken off."""
        task, self._task = self._task, None
        self._timer.cancel()
        broken, self._broken = self._broken, None
        if task is None or broken is None or task.uncancel() > self._cancelling:
            return
        if kind is asyncio.CancelledError:
            try:
                raise broken from None
            finally:
                del broken, task  # an error must not be kept by a frame that it has

    def _tick(self) -> None:
        call = self.call
        self._upload.watch()
        left_s = call.deadline_s - time.monotonic()
        if left_s > 0:
            self._timer = asyncio.get_running_loop().call_later(left_s, self._tick)
            return
        received = self._upload.complete or call.journey.received_s
        late = TimedOut(call.function.id, call.timeout_s, call.journey.call_id)
        self._break_off(late if received else TooSlow(call.timeout_s))

    def _break_off(self, error: GatewayError) -> None:
        if self._task is not None and self._broken is None:
            self._broken = error
            self._task.cancel()


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
        "_sink", "_delivered", "_held", "_reader", "_client", "_is_watched",
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
        self._delivered = False
        self._held: asyncio.Future[None] | None = None
        self._reader: asyncio.Task[None] | None = None
        self._is_watched = False

    @property
    def repeatable(self) -> bool:
        return self.complete and self._sink is None

    @property
    def delivered(self) -> bool:
        """Whether the connection that the body is written to has received all of it."""
        return self._delivered or self._sink is None

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
        self._sink = connection
        held, self.body = self.body, b""
        if held:
            connection.write(self._framed(held))
        if self._reader is not None and self._reader.done():  # it had read as much as it may hold
            self._reader = asyncio.get_running_loop().create_task(self._read())

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
                    return
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
            is_enough = self.complete or self._is_full()
            if is_enough and self._held is not None and not self._held.done():
                self._held.set_result(None)
            return
        data = self._framed(piece) if piece else b""
        if self.complete:
            self._delivered = True
            data += b"" if self._request.length is not None else b"0\r\n\r\n"
        self._sink.write(data)

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
