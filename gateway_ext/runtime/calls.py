"""Calls of the handler: in a thread or in the loop, whole or streamed, within their time.

A generator runs in one thread from its first piece to its last: what torch keeps for each thread
(`no_grad`, autocast) would otherwise not hold from one piece to the next.
"""

import asyncio
import importlib
import math
import re
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import copy_context
from functools import partial
from typing import Any, Protocol, TypeAlias

from gateway_ext.runtime.connection import ServerConnection
from gateway_ext.runtime.handler_module import Handle, runs_in_loop
from gateway_ext.runtime.handler_threads import HandlerThreads, LeaseTurns
from gateway_ext.runtime.handler_values import (
    HandlerContext,
    HandlerData,
    HandlerEvent,
    HandlerResponse,
    Headers,
    answer_of,
    is_awaitable,
    is_whole,
    piece_of,
)
from gateway_ext.runtime.settings import RuntimeSettings

_PIECES_AHEAD = 16
MODELS, LOCAL = "X-Gpu-Models", "X-Gpu-Local"
# Calls under one lease run here in turn, so that the gateway may send the next one early.
_TAKE_TURNS = ("X-Gpu-Turns", "1")

Pairs = list[tuple[str, str]]
SecondsLeft = Callable[[], float | None]
# Logs a text about a call: the call's id, its trace's id, the text.
LogLine = Callable[[str, str, str], None]


class HandlerCalls:
    """All calls in progress, and the threads that serve them."""

    def __init__(
        self,
        handler: "Handler",
        settings: RuntimeSettings,
        *,
        exhausted: Callable[[], None],
        log_line: LogLine,
    ) -> None:
        self.hostname = settings.hostname
        self.gpu = GpuPlacements(gpu=settings.gpu)
        self.data = HandlerData(gpu=settings.gpu)
        self.log_line = log_line
        self.errors = settings.errors
        self.loop = asyncio.get_running_loop()
        self.mailbox = LoopMailbox(self.loop)
        self.deadlines = CallDeadlines(self.loop, settings.exec_timeout_s)
        self.threads = HandlerThreads(settings.threads)
        self.turns = LeaseTurns(self.threads, self.loop)
        # Other processes behind this socket would not know of these turns.
        self.answer_headers = [_TAKE_TURNS] if settings.gpu and settings.workers == 1 else []
        # Who takes a call out of these ends it: a dictionary, since only one thread can do so.
        self.live: dict[HandlerCall, bool] = {}
        self.in_threads: set[object] = set()  # calls, also those whose client has left; batches
        self._exhausted = exhausted
        self._stuck = 0
        self.handle: Handle
        self._start: Callable[[HandlerCall], None]
        self.taker: CallTaker | None = None  # of a handler of another kind
        if isinstance(handler, OtherHandler):
            self.taker, at_a_time = handler.taker(self), handler.at_a_time
            self._start = self.taker.add
        else:
            self.handle, in_loop = handler, runs_in_loop(handler)
            self._start = HandlerCall.run_in_loop if in_loop else HandlerCall.run_in_thread
            at_a_time = 0 if in_loop else settings.threads
        # The calls that all processes behind this socket serve at a time; 0 for any number.
        self.at_a_time = at_a_time * settings.workers

    def begin(self, event: HandlerEvent, connection: ServerConnection) -> "HandlerCall":
        """Start a call whose answer goes to this connection."""
        call = HandlerCall(self, event, connection)
        self.live[call] = True
        self._start(call)
        return call

    def left_thread(self, connection: ServerConnection) -> None:
        """A call has left its thread, which has sent the answer to this connection."""
        self.threads.left()
        connection.answered()

    def stuck(self, count: int) -> None:
        """Note that a call whose client has left holds a thread, or no longer does.

        Once all threads are held, no call can be served any more.
        """
        self._stuck += count
        if self._stuck >= self.threads.most:
            self._exhausted()


class HandlerCall:
    """One call of the handler, from the request to the last byte of its answer."""

    def __init__(
        self, calls: HandlerCalls, event: HandlerEvent, connection: ServerConnection
    ) -> None:
        self._calls = calls
        self.event = event
        # Called when a call is over that waits for others, or is in a list with them.
        self._leave: Callable[[HandlerCall], None] | None = None
        # Until then the gateway waits for the answer, if its client does not leave before.
        self._awaited_until_s = connection.asked_s + calls.gpu.awaited_s(event.headers)
        self._due_s = calls.deadlines.add(self)
        self._connection = connection
        self.timing = Timing(event.headers, calls.at_a_time)
        self._context = copy_context()
        # Answered, given up or broken off: later results are dropped. Any thread may ask.
        self.over = False
        self._started = False  # a stream's head is out
        self._head: HandlerResponse | None = None  # of a stream, from its first piece on
        self._stuck = False
        self._task: asyncio.Task[None] | None = None
        self._room: threading.Semaphore | None = None  # of a stream's pieces, in a thread

    def run_in_thread(self) -> None:
        """Run the handler once no other call under the same lease runs."""
        work = partial(self._context.run, self._in_thread)
        lease = self.event.headers.get("x-gpu-lease", "") if self._calls.answer_headers else ""
        if lease:
            self._calls.turns.run(lease, work)
        else:
            self._calls.threads.run(work)

    def run_in_loop(self, returned: object = None) -> None:
        """Run an asynchronous handler, or an asynchronous result (`returned`)."""
        context = self._context.copy()  # a thread that is about to leave it may still be in it
        self._task = context.run(self._calls.loop.create_task, self._in_loop(returned))

    def cancel(self) -> None:
        """The client has left."""
        self._awaited_until_s = -math.inf
        self._end(keep_deadline=self in self._calls.in_threads)
        self._stop()

    def time_out(self) -> None:
        """The call has taken too long, or a call whose client has left still holds its thread."""
        ended, in_thread = self._end(), self in self._calls.in_threads
        if not ended and not in_thread:
            return
        self.log_line(f"took longer than {self._calls.deadlines.limit_s:g} s")
        if ended:
            if self._started:
                self._connection.break_off()
            else:
                self._connection.refuse(504, "the function took too long")
            self._stop()
        if in_thread:
            self._stuck = True
            self._calls.stuck(+1)

    def _stop(self) -> None:
        if self._leave is not None:
            self._leave(self)
        if self._task is not None:
            self._task.cancel()
        if self._room is not None:
            self._room.release(_PIECES_AHEAD)

    def _end(self, *, keep_deadline: bool = False) -> bool:
        """True for the first caller, who ends the call; any thread may call this."""
        if not self._calls.live.pop(self, False):
            return False
        self.over = True
        if not keep_deadline:
            self._calls.deadlines.remove(self)
        return True

    @property
    def until_s(self) -> float:
        """Until when the call may wait; inf without a limit. Any thread may ask."""
        return min(self._due_s, self._awaited_until_s)

    def left_s(self) -> float | None:
        """The seconds that the call may still wait; None without a limit. Any thread may ask."""
        return seconds_until(self.until_s, self._calls.loop)

    # --- taken by a handler of another kind -----------------------------------------------------

    def hold(self, leave: Callable[["HandlerCall"], None]) -> None:
        """Call `leave` in the loop, and nobody else, if the call is over before it was answered."""
        self._leave = leave

    def answer_from_thread(self, answer: HandlerResponse) -> None:
        """Send the whole answer from the taker's thread, unless the call is over."""
        answer.headers += self.timing.header()
        data = self._connection.encoded(answer)
        if self._end():
            self._send_from_thread(data, self._connection.answered)

    # --- in a thread of the pool --------------------------------------------------------------

    def _in_thread(self) -> None:
        last: Callable[[], object] = _nothing
        data: bytes | None = None
        self._calls.in_threads.add(self)
        try:
            if self.over:  # the client left while the call waited for a thread
                return
            self.timing.begins()
            with self._calls.gpu.given(self.event.headers, self.left_s):
                answer = self._called_in_thread()
            if answer is not None:
                data = self._connection.encoded(answer)
        except BaseException as error:  # noqa: BLE001 - every error of a handler becomes its response
            last = partial(self.fail, error)
        finally:
            self._calls.in_threads.discard(self)
            if data is not None and self._end():
                left = partial(self._calls.left_thread, self._connection)
                self._send_from_thread(data, left)
            else:
                self._calls.mailbox.post(self._left_thread, last)

    def _send_from_thread(self, data: bytes, sent: Callable[[], None]) -> None:
        """Send the answer without the loop, which learns of it when it is woken for another reason.

        It then calls `sent`; nothing here keeps the call until then. The connection is looked at
        once more after the step is left: for a request that came meanwhile the loop still saw a
        call in progress.
        """
        mailbox, connection = self._calls.mailbox, self._connection
        is_sent = connection.answer_from_thread(data)
        mailbox.leave(sent)
        if not is_sent or connection.has_read_ahead:
            mailbox.wake()

    def _called_in_thread(self) -> HandlerResponse | None:
        """Call the handler; its whole response, or None where it goes out in another way."""
        try:
            calls, event = self._calls, self.event
            returned = calls.handle(event, HandlerContext(calls.hostname, calls.data))
            if calls.data.wanted(event.headers) and is_whole(returned):
                returned = calls.data.exchanged(returned)
            answer = None if is_awaitable(returned) else answer_of(returned)
            if answer is None or answer.pieces_async is not None:
                self._calls.mailbox.post(self.run_in_loop, returned)
                return None
            if answer.pieces is not None:
                self._pump(answer, answer.pieces)
                return None
        except BaseException:
            self._note_end()
            raise
        answer.headers += self._report_headers()
        answer.headers += self._calls.answer_headers
        return answer

    def _note_end(self) -> None:
        """The call's times are complete; noted while the GPU's are still at hand."""
        self.timing.ends(self._calls.gpu.timing_entries())
        self._calls.data.settle()

    def _report_headers(self) -> Pairs:
        self._note_end()
        return self._calls.gpu.used() + self.timing.header()

    def _trailers(self) -> Pairs:
        """The trailers for the gateway behind a stream: what its head did not say."""
        self._note_end()
        said = self._head is not None and MODELS in dict(self._head.headers)
        used = self._calls.gpu.used()
        return self.timing.header() + [pair for pair in used if not (said and pair[0] == MODELS)]

    def _pump(self, answer: HandlerResponse, pieces: Iterator[object]) -> None:
        room = self._room = threading.Semaphore(_PIECES_AHEAD)
        try:
            for piece in pieces:
                data = piece_of(piece)
                room.acquire()
                if self.over:
                    return
                self._calls.mailbox.post(self._send, self._stream_head(answer), data)
        finally:
            getattr(pieces, "close", _nothing)()
        self._calls.mailbox.post(self._finish_stream, self._stream_head(answer), self._trailers())

    def _stream_head(self, answer: HandlerResponse) -> HandlerResponse:
        """The stream's head, with what the gateway is told at its first piece."""
        if self._head is None:
            names = ", ".join(self.timing.trailers + self._calls.gpu.trailers)
            announced = [("Trailer", names)] if names else []
            more = self._calls.gpu.used() + announced
            self._head = HandlerResponse(answer.status, answer.headers + more)
        return self._head

    # --- in the loop --------------------------------------------------------------------------

    async def _in_loop(self, returned: object) -> None:
        try:
            self.timing.begins()
            with self._calls.gpu.given(self.event.headers, self.left_s):
                await self._called_in_loop(returned)
        except asyncio.CancelledError as error:
            # The runtime cancels when the client left or the time is up; else the handler failed.
            self.fail(error)
        except BaseException as error:  # noqa: BLE001 - every error of a handler becomes its response
            self.fail(error)

    async def _called_in_loop(self, returned: object) -> None:
        try:
            if returned is None:
                context = HandlerContext(self._calls.hostname, self._calls.data)
                returned = self._calls.handle(self.event, context)
            if is_awaitable(returned):
                returned = await returned
            if self._calls.data.wanted(self.event.headers) and is_whole(returned):
                returned = await asyncio.to_thread(self._calls.data.exchanged, returned)
            answer = answer_of(returned)
            if answer.pieces_async is not None:
                await self._pump_async(answer, answer.pieces_async)
            elif answer.pieces is not None:
                await asyncio.to_thread(self._pump, answer, answer.pieces)
            else:
                answer.headers += self._report_headers()
                if self._end():
                    self._connection.answer(answer)
        except BaseException:
            self._note_end()
            raise

    async def _pump_async(self, answer: HandlerResponse, pieces: AsyncIterator[object]) -> None:
        try:
            async for piece in pieces:
                data = piece_of(piece)
                self._send(self._stream_head(answer), data)
                if self.over:
                    return
                if not self._connection.room.is_set():
                    room = asyncio.Event()
                    self._connection.when_room(room.set)
                    await room.wait()
        finally:
            close = getattr(pieces, "aclose", None)
            if close is not None:
                await close()
        self._finish_stream(self._stream_head(answer), self._trailers())

    def _send(self, head: HandlerResponse, data: bytes) -> None:
        if self.over:
            return
        self._start(head)
        self._connection.piece(data)
        if self._room is not None:
            self._connection.when_room(self._room.release)

    def _finish_stream(self, head: HandlerResponse, trailers: Pairs) -> None:
        if not self.over:
            self._start(head)
            self._end()
            self._connection.end_stream(trailers)

    def _start(self, head: HandlerResponse) -> None:
        if not self._started:
            self._started = True
            self._connection.start_stream(head.status, head.headers)

    def fail(self, error: BaseException) -> None:
        """Answer 500, unless the call is over."""
        if not self._end():
            return
        call_id = self.event.headers.get("x-call-id", "")
        status, why, logged = self._calls.errors.failure(error, call_id)
        self.log_line(logged)
        if self._started:
            self._connection.break_off()
        else:
            self._connection.refuse(status, why, headers=self.timing.header())

    def _left_thread(self, last: Callable[[], object]) -> None:
        """The thread is free; with its last word on the call, which costs one wake-up so."""
        try:
            last()
        finally:
            self._calls.threads.left()
            if self.over:  # the client left before: no thread is held
                self._calls.deadlines.remove(self)
            if self._stuck:
                self._stuck = False
                self._calls.stuck(-1)

    def log_line(self, what: str) -> None:
        call_id = self.event.headers.get("x-call-id", "-")
        text = f"{self.event.method} {self.event.path} {what}"
        self._calls.log_line(text, call_id, self.timing.trace_id)


class CallTaker(Protocol):
    """Takes the calls for a handler of another kind, in the loop."""

    def add(self, call: HandlerCall) -> None: ...

    def hurry(self) -> None:
        """Let no call wait for anything: the process is to end."""


class OtherHandler(ABC):
    """A handler of another kind than `handle(event, context)`; see `HandlerKind`."""

    at_a_time: int  # how many calls it serves at a time
    notice = ""  # for the log, before its first call

    @abstractmethod
    def taker(self, calls: HandlerCalls) -> CallTaker:
        """What takes its calls."""

    @abstractmethod
    def answers(
        self, events: Sequence[HandlerEvent], context: HandlerContext
    ) -> Sequence[HandlerResponse]:
        """Answer example calls at once, in this thread."""


Handler: TypeAlias = Handle | OtherHandler


def _nothing() -> None:
    """The call has its answer already, or its pieces need no end."""


# A call's times: the gateway reads them (docs/tracing.md), and no caller does.
_TRACE_HEADER = "X-Gpu-Trace"
_VERSION = "1"


class Timing:
    """The times of one call, from its arrival on; reported only if the request names its trace."""

    __slots__ = (
        "trace", "_arrived", "_began", "_began_ns", "_ended", "_below", "_at_a_time", "_batch",
    )  # fmt: skip

    def __init__(self, headers: Headers, at_a_time: int = 0) -> None:
        """`at_a_time` is the number of calls that are served at a time, or 0 for any number."""
        self.trace = headers.get("traceparent", "")
        self._at_a_time = at_a_time
        self._arrived = self._began = time.perf_counter_ns()
        self._began_ns = 0
        self._ended = 0
        self._below: Sequence[str] = ()
        self._batch = 0

    @property
    def trace_id(self) -> str:
        parts = self.trace.split("-")
        return parts[1] if len(parts) > 1 else ""

    def begins(self, batch: int = 0) -> None:
        """The handler is called, with a list of so many calls: the call's wait ends."""
        self._batch = batch
        self._began = time.perf_counter_ns()
        self._began_ns = time.time_ns()

    def ends(self, below: Sequence[str]) -> None:
        """The handler has answered; `below` are the times of its graph calls."""
        self._ended = time.perf_counter_ns()
        self._below = below

    @property
    def trailers(self) -> tuple[str, ...]:
        """The names that a stream announces."""
        return (_TRACE_HEADER,) if self.trace else ()

    def header(self) -> Pairs:
        if not self.trace:
            return []
        took_us = ((self._ended or time.perf_counter_ns()) - self._began) // 1_000
        queued_us = (self._began - self._arrived) // 1_000
        handler = f"{_VERSION} h;{self._began_ns // 1_000};{took_us};q={queued_us}"
        if self._at_a_time:
            handler = f"{handler};t={self._at_a_time}"
        if self._batch:
            handler = f"{handler};b={self._batch}"
        return [(_TRACE_HEADER, " ".join((handler, *self._below)) if self._below else handler)]


_WITHIN = "x-gpu-within"
_SECONDS = re.compile(r"[0-9]{1,18}(\.[0-9]*)?(e[-+]?[0-9]{1,3})?")


class GpuPlacements:
    """Passes a call's lease from its headers to the shim, and the models used back.

    The module of the shim that it uses needs no torch. Without a `gpu` nothing is passed.
    """

    def __init__(self, *, gpu: bool) -> None:
        self.trailers = (MODELS, LOCAL) if gpu else ()  # what a stream may be followed by
        self._shim: Any = None
        if gpu:
            self._shim = importlib.import_module("torch_shim.leases.request_context")
            self._shim.expect_calls()

    def awaited_s(self, headers: Headers) -> float:
        """For how long the gateway waits for the answer, from the request's head on, as it says."""
        text = headers.get(_WITHIN, "") if self._shim is not None else ""
        return float(text) if _SECONDS.fullmatch(text) else math.inf

    def given(self, headers: Headers, left_s: SecondsLeft) -> AbstractContextManager[None]:
        """A context for the call of the handler, which has this much time left."""
        if self._shim is None:
            return nullcontext()
        address, lease = headers.get("x-gpu-address"), headers.get("x-gpu-lease")
        context: AbstractContextManager[None] = self._shim.given(
            address, lease, trace=headers.get("traceparent"), left_s=left_s
        )
        return context

    def used(self) -> Pairs:
        """Headers with the digests of the models, and what ran without a GPU; inside `given`."""
        if self._shim is None:
            return []
        pairs = (MODELS, ",".join(self._shim.used())), (LOCAL, "|".join(self._shim.told()))
        return [pair for pair in pairs if pair[1]]

    def timing_entries(self) -> Sequence[str]:
        """The times of the call's GPU calls, in the format of X-Gpu-Trace; inside `given`."""
        return () if self._shim is None else self._shim.timing_entries()


class LoopMailbox:
    """Steps for the loop, in the order in which they came."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._steps: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._woken = False

    def post(self, step: Callable[..., object], *values: Any) -> None:
        """Have the loop take this step soon; any thread may call this."""
        self._steps.append((step, values))
        self.wake()

    def leave(self, step: Callable[..., object], *values: Any) -> None:
        """Have the loop take this step when it next catches up; any thread may call this."""
        self._steps.append((step, values))

    def wake(self) -> None:
        """Have the loop catch up soon; any thread may call this."""
        # The loop resets the mark before it looks: what came before this line is not missed.
        if not self._woken and not self._loop.is_closed():
            self._woken = True
            self._loop.call_soon_threadsafe(self._catch_up_when_woken)

    def catch_up(self) -> None:
        """Take the steps that wait now, in the loop; later ones have a wake-up of their own."""
        for _ in range(len(self._steps)):
            step, values = self._steps.popleft()
            try:
                step(*values)
            except Exception as error:  # noqa: BLE001 - it is not the error of whoever catches up
                context = {"message": f"{step!r} failed", "exception": error}
                self._loop.call_exception_handler(context)

    def _catch_up_when_woken(self) -> None:
        self._woken = False
        self.catch_up()


def seconds_until(until_s: float, loop: asyncio.AbstractEventLoop) -> float | None:
    """The seconds until then, 0 at least; None if that is never (inf). From any thread."""
    return None if until_s == math.inf else max(0.0, until_s - loop.time())


class TimedCall(Protocol):
    """A call, or several in a list, that may take no longer than the time limit."""

    def time_out(self) -> None:
        """The time is up."""


class CallDeadlines:
    """The time limit of all calls, with one timer for the oldest, not one for each."""

    def __init__(self, loop: asyncio.AbstractEventLoop, limit_s: float) -> None:
        """Without a limit (0) no call is ever timed out."""
        self.limit_s = limit_s
        self._loop = loop
        self._due_s: dict[TimedCall, float] = {}  # the oldest call first
        self._timer: asyncio.TimerHandle | None = None

    def add(self, call: TimedCall) -> float:
        """Let a call's time run from now on; until when, inf without a limit."""
        if not self.limit_s:
            return math.inf
        due_s = self._due_s[call] = self._loop.time() + self.limit_s
        if self._timer is None:
            self._timer = self._loop.call_at(due_s, self._look)
        return due_s

    def remove(self, call: TimedCall) -> None:
        """Never time the call out; any thread may call this."""
        self._due_s.pop(call, None)

    def _look(self) -> None:
        self._timer = None
        now_s = self._loop.time()
        for call in list(self._due_s):  # a copy, as threads remove theirs meanwhile
            due_s = self._due_s.get(call, now_s)
            if due_s > now_s:
                self._timer = self._loop.call_at(due_s, self._look)
                return
            if self._due_s.pop(call, None) is not None:
                call.time_out()
