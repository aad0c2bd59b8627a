"""Handlers that take a list: which calls they get together, and each call's own answer.

A batch has a thread until its last answer is out, also where the handler is a coroutine, which runs
in the loop. The calls of a batch share a lease: that of the first one.
"""

import asyncio
import base64
import functools
import json
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from itertools import islice

from gateway_ext.runtime.calls import HandlerCall, HandlerCalls, OtherHandler, seconds_until
from gateway_ext.runtime.handler_module import HandlerKind
from gateway_ext.runtime.handler_values import (
    BadResponse,
    HandlerContext,
    HandlerEvent,
    HandlerResponse,
    answer_of,
    is_awaitable,
    is_whole,
)
from gateway_ext.runtime.settings import count_in, time_in_s

HandleList = Callable[[list[HandlerEvent], HandlerContext], object]
_HANDLE_LIST, _MOST = "handle_batch", "GPUFAAS_BATCH_HANDLER"
_ASK_FOR_MORE = "the annotation com.gpufaas.batch-handler says how many it takes"


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """How many calls a handler is given at most, and how long the first of them waits for others.

    If the handler fails for all of them, `repeats` says whether each call is made once more, alone.
    """

    most: int = 1
    wait_s: float = 0.0
    repeats: bool = True


def handlers_of_lists(environment: Mapping[str, str]) -> HandlerKind[OtherHandler]:
    """What the deployment says of them; BadRuntimeSetting for an invalid value."""
    settings = BatchSettings(
        most=count_in(environment, _MOST, 1),
        wait_s=time_in_s(environment, "GPUFAAS_BATCH_WAIT", 0.0),
        repeats=environment.get("GPUFAAS_BATCH_REPEATS") != "0",
    )
    is_asked = bool(environment.get(_MOST))
    notice = "" if is_asked else f"{_HANDLE_LIST} is given one call at a time: {_ASK_FOR_MORE}"
    make = partial(ListHandler, settings, notice)
    return HandlerKind(_HANDLE_LIST, "events", is_asked, make)


class ListHandler(OtherHandler):
    """A handler that takes a list of calls, and returns a list of answers."""

    def __init__(self, settings: BatchSettings, notice: str, handle: HandleList) -> None:
        self.at_a_time = settings.most
        self.notice = notice
        self._settings = settings
        self._handle = handle

    def taker(self, calls: HandlerCalls) -> "GatheredCalls":
        def start(members: Sequence[HandlerCall], ended: Callable[[], None]) -> None:
            BatchRun(calls, self._handle, self._settings, members, ended).start()

        return GatheredCalls(calls.loop, self._settings, start)

    def answers(
        self, events: Sequence[HandlerEvent], context: HandlerContext
    ) -> Sequence[HandlerResponse]:
        """Call the handler once; the first error of a call is raised."""
        returned = self._handle(list(events), context)
        if is_awaitable(returned):
            returned = asyncio.run(_awaited(returned))
        results = answers_in(returned, len(events))
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return [answer_of(result) for result in results]


class BatchRun:
    """The calls that the handler is given together."""

    def __init__(
        self,
        services: HandlerCalls,
        handle: HandleList,
        settings: BatchSettings,
        members: Sequence[HandlerCall],
        ended: Callable[[], None],
    ) -> None:
        """`ended` is called once, in the loop, when the next batch may begin."""
        self._services = services
        self._handle = handle
        self._settings = settings
        self._members = members
        self._ended: Callable[[], None] | None = ended
        self._due_s = math.inf
        self._stuck = False
        self._coroutine: Future[object] | None = None
        for member in members:
            member.hold(self.left)

    def start(self) -> None:
        """Begin, in the loop: the batch's own time runs from now on."""
        self._due_s = self._services.deadlines.add(self)
        self._services.threads.run(partial(copy_context().run, self._in_thread))

    def left(self, call: HandlerCall) -> None:
        """A client has left; nobody needs the results of a coroutine that all have left."""
        del call
        if all(member.over for member in self._members):
            self._cancel()

    def time_out(self) -> None:
        """The batch holds its thread beyond the time limit; its calls were all answered 504."""
        if self._ended is None:
            return
        self._cancel()
        self._stuck = True
        self._let_next_begin()
        self._services.stuck(+1)

    def _cancel(self) -> None:
        coroutine = self._coroutine  # its thread may take it away meanwhile
        if coroutine is not None:
            coroutine.cancel()

    # --- in the batch's thread ----------------------------------------------------------------

    def _in_thread(self) -> None:
        self._services.in_threads.add(self)
        try:
            members = [member for member in self._members if not member.over]
            if members and not self._is_served(members):
                for member in members:
                    if not member.over:
                        self._is_served([member])
        finally:
            self._services.in_threads.discard(self)
            self._services.mailbox.post(self._left_thread)

    def _is_served(self, members: Sequence[HandlerCall]) -> bool:
        """Call the handler; False if each of the calls has to be made once more, alone."""
        services = self._services
        for member in members:
            member.timing.begins(len(members))
        answers: Sequence[HandlerResponse | BaseException]
        error: BaseException | None = None  # for which each call is made once more
        left_s = partial(self._left_s, members)
        with services.gpu.given(members[0].event.headers, left_s):
            try:
                returned = self._called(members)
            except BaseException as raised:  # noqa: BLE001 - every error of a handler is answered
                answers = [raised] * len(members)
                error = raised if self._settings.repeats and len(members) > 1 else None
            else:
                answers = self._answers(members, returned)
            below = list(services.gpu.timing_entries())
            services.data.settle()
            reported = services.gpu.used()
        if error is not None:
            raised_text = services.errors.raised(error)
            members[0].log_line(
                f"raised in a batch of {len(members)} calls; each is made once more, alone\n"
                f"{raised_text}"
            )
            return False
        for member, answer in zip(members, answers, strict=True):
            member.timing.ends(below)
            if isinstance(answer, BaseException):
                services.mailbox.post(member.fail, answer)
            else:
                answer.headers += reported
                member.answer_from_thread(answer)
        return True

    def _left_s(self, members: Sequence[HandlerCall]) -> float | None:
        """The seconds for which somebody waits for one of these; None without a limit."""
        awaited = (member.until_s for member in members if not member.over)
        until_s = min(self._due_s, max(awaited, default=-math.inf))
        return seconds_until(until_s, self._services.loop)

    def _called(self, members: Sequence[HandlerCall]) -> object:
        services = self._services
        context = HandlerContext(services.hostname, services.data)
        returned = self._handle([member.event for member in members], context)
        if not is_awaitable(returned):
            return returned
        self._coroutine = asyncio.run_coroutine_threadsafe(_awaited(returned), services.loop)
        try:
            return self._coroutine.result()
        finally:
            self._coroutine = None

    def _answers(
        self, members: Sequence[HandlerCall], returned: object
    ) -> Sequence[HandlerResponse | BaseException]:
        """Each call's answer, or its error; what is no list of so many is every call's error."""
        try:
            results = answers_in(returned, len(members))
        except BadResponse as error:
            return [error] * len(members)
        return [self._answer(*pair) for pair in zip(members, results, strict=True)]

    def _answer(self, member: HandlerCall, returned: object) -> HandlerResponse | BaseException:
        if isinstance(returned, BaseException):
            return returned
        try:
            if not is_whole(returned):
                raise BadResponse(f"a call in a batch is answered with {type(returned).__name__}")
            if self._services.data.wanted(member.event.headers):
                returned = self._services.data.exchanged(returned)
            answer = answer_of(returned)
            if answer.pieces is not None or answer.pieces_async is not None:
                raise BadResponse("a call in a batch cannot be answered with a stream")
        except BaseException as error:  # noqa: BLE001 - one call's error is not that of the others
            return error
        return answer

    # --- in the loop --------------------------------------------------------------------------

    def _left_thread(self) -> None:
        self._services.threads.left()
        self._services.deadlines.remove(self)
        if self._stuck:
            self._services.stuck(-1)
        self._let_next_begin()

    def _let_next_begin(self) -> None:
        ended, self._ended = self._ended, None
        if ended is not None:
            ended()


_LEASE = "x-gpu-lease"
# Calls that wait, and some that came with the same leases before.
_MOST_TOKENS = 256

# Starts a batch of these calls; calls back in the loop once the next one may begin.
Start = Callable[[Sequence[HandlerCall], Callable[[], None]], None]


class _Group:
    """The calls of one lease: when each came, and whether a batch of them is under way."""

    __slots__ = ("look", "runs", "waiting")

    def __init__(self) -> None:
        self.waiting: dict[HandlerCall, float] = {}
        self.runs = False
        self.look: asyncio.Handle | None = None


class GatheredCalls:
    """Gathers calls for batches; all of it runs in the loop.

    One batch of a lease is under way at a time, while the next one gathers. A lease is for one GPU,
    so batches of two leases are for two. Calls without a lease are one group. Those that share a
    lease may each have a token of their own, which names it.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, settings: BatchSettings, start: Start
    ) -> None:
        self._loop = loop
        self._most = settings.most
        self._wait_s = settings.wait_s
        self._start = start
        self._groups: dict[str, _Group] = {}

    def add(self, call: HandlerCall) -> None:
        lease = _lease_of(call)
        group = self._groups.setdefault(lease, _Group())
        group.waiting[call] = self._loop.time()
        call.hold(self.left)
        if group.runs:
            return
        if group.look is None or len(group.waiting) >= self._most:
            self._look_at(lease, group, 0.0)

    def left(self, call: HandlerCall) -> None:
        """The call waits no more: its client has left, or its time is up."""
        group = self._groups.get(_lease_of(call))
        if group is not None:
            group.waiting.pop(call, None)

    def hurry(self) -> None:
        """Let no call wait for further ones: the process is to end."""
        self._wait_s = 0.0
        for lease, group in self._groups.items():
            if not group.runs:
                self._look_at(lease, group, 0.0)

    def _look_at(self, lease: str, group: _Group, after_s: float) -> None:
        """Look in the loop's next round, so that what has arrived by then comes along, or later."""
        if group.look is not None:
            group.look.cancel()
        if after_s > 0:
            group.look = self._loop.call_later(after_s, self._look, lease, group)
        else:
            group.look = self._loop.call_soon(self._look, lease, group)

    def _look(self, lease: str, group: _Group) -> None:
        group.look = None
        if not group.waiting:
            del self._groups[lease]
            return
        most, came_s = self._most, next(iter(group.waiting.values()))
        left_s = came_s + self._wait_s - self._loop.time()
        if len(group.waiting) < most and left_s > 0:
            self._look_at(lease, group, left_s)
            return
        members = list(islice(group.waiting, most))
        for call in members:
            del group.waiting[call]
        group.runs = True
        self._start(members, partial(self._next, lease, group))

    def _next(self, lease: str, group: _Group) -> None:
        group.runs = False
        self._look(lease, group)


def _lease_of(call: HandlerCall) -> str:
    """The call's lease, by its number and node; what is no token stands for itself."""
    token = call.event.headers.get(_LEASE, "")
    return _named_by(token) if token else ""


@functools.lru_cache(maxsize=_MOST_TOKENS)
def _named_by(token: str) -> str:
    try:
        claims = json.loads(base64.urlsafe_b64decode(token.rpartition(".")[0] + "=="))
        return f"{claims['node']} {claims['lease']} {claims['function']}"
    except (ValueError, LookupError, TypeError, RecursionError):
        return token


def answers_in(returned: object, count: int) -> Sequence[object]:
    """The results for a list of so many calls, one each; BadResponse for anything else."""
    if not isinstance(returned, list | tuple):
        raise BadResponse(
            f"handle_batch returned {type(returned).__name__}, not a list of {count} answers"
        )
    if len(returned) != count:
        raise BadResponse(f"handle_batch returned {len(returned)} answers for {count} calls")
    return returned


async def _awaited(returned: Awaitable[object]) -> object:
    return await returned
