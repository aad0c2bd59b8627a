"""GPU leases for calls: asked of the scheduler before a call, left to the next one, or given back.

The scheduler says for how long a lease stands, and recalls it when somebody else needs a GPU. Until
then calls of the same function and models follow one another under it. What runs under it is
reported a moment later (docs/decisions/0081-the-callers-lease.md).
"""

import asyncio
import logging
import math
import secrets
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import NamedTuple, Self

from msgspec.structs import replace

from cache_manager.model.ids import ModelId
from common.errors import NoResponse
from common.telemetry.traces import TraceContext
from gateway_ext import error_statuses
from gateway_ext.calls.function_table import Function, FunctionCall
from gateway_ext.metrics import GatewayMeters
from gateway_ext.model import FunctionId
from gateway_ext.tracing.journey import LEASE
from scheduler.api import (
    CallEnd,
    EventRefused,
    LeaseId,
    LeaseUse,
    LeaseUsed,
    NodeId,
    QueueFull,
    Request,
    RequestEnded,
    RequestFailed,
    RequestId,
    RequestWithdrawn,
    SchedulerError,
    StandingTerms,
)
from scheduler.client.lease_client import LeaseClient
from scheduler.wire.caller_stream import Granted

# A call waits this long for a lease that another call uses before it asks for one more, and as much
# longer for each question that is open, so many times at most. A question of a call that is served
# passes on to one that has none yet, so that few are withdrawn.
PATIENCE_S, MOST_PATIENCES = 0.003, 10
# A lease that no call used for this long is given back.
IDLE_S = 0.5
# What ran is reported this long after it began or ended, and not before so long after the last
# report: each costs the scheduler as much as twenty calls in it.
REPORT_S, REPORTS_APART_S = 0.01, 0.1
LOOK_S = 0.1  # free leases are looked at this often
_MOST_USES = 200
# How many waiting calls are looked at for one of the lease's instance, and how often the first one
# may be passed over.
_MOST_LOOKED_AT, _MOST_PASSED_OVER = 8, 8
# Calls that share leases fill one batch first. While a question has brought no further GPU within
# the patience, and for so long after it, each lease takes the calls of one more: these gather at
# the instance. If calls take less than `QUICK_S` and take turns at the instance, each lease takes
# one call more, too: else the instance would be idle until the gateway sends the next one.
FULL_S, QUICK_S = 0.5, 0.01
# After so many calls that used no GPU, one behind quick ones waits as if many questions were open:
# a further GPU would hardly help, and nodes end unclaimed leases where requests wait.
_SPARING = 32
_CALL_WEIGHT = 0.25
_MOST_SHARED = 64  # leases that are looked at for room
_CALL_ID_LETTERS = 64
_FOR_ONE_CALL = StandingTerms(0.0, 1)


class LeaseKind(NamedTuple):
    """Calls of one kind can follow one another under one lease.

    `together` is how many of them the function's handler is given at a time: they share the lease.
    """

    function: FunctionId
    models: tuple[ModelId, ...]
    together: int = 1

    @property
    def is_shared(self) -> bool:
        return self.together > 1


class LeasePool:
    """The leases of this gateway, and the calls of GPU functions that wait for them."""

    def __init__(self, source: LeaseClient, meters: GatewayMeters) -> None:
        self._source = source
        self._meters = meters
        self.standing: dict[LeaseId, PooledLease] = {}
        self._queues: dict[LeaseKind, _Queue] = {}
        self._unreported: dict[PooledLease, None] = {}
        self._reporting: asyncio.TimerHandle | None = None
        self._reported_s = -math.inf
        self._looking: asyncio.TimerHandle | None = None
        source.let_stand(self._recalled)

    def best_instance(self, function: Function) -> str:
        """The instance that best takes a call, as it has left a lease for one; empty: any."""
        if len(function.instances) == 1:
            return ""
        queue = self._queues.get(_kind(function))
        return queue.free[-1].instance if queue is not None and queue.free else ""

    async def take(self, call: "CallLease") -> None:
        """Wait for a lease; there is none if the scheduler no longer knows the models."""
        kind, attempt = _kind(call.call.function), call.call.journey.attempts[-1]
        lease = self._at_hand(kind, call)
        if lease is not None:
            self._begin(lease, call)
        else:
            try:
                answer = await self._wait(kind, call)
            except asyncio.CancelledError:
                self._meters.lease("cancelled", time.monotonic() - call.asked_s)
                raise
            if isinstance(answer, SchedulerError):
                self._refused(call, answer)
                return
            lease = answer
        call.lease, call.has_lease = lease, True
        attempt.leased_s = time.monotonic()
        attempt.request, attempt.placement = call.request, lease.granted.placement
        self._meters.lease("hit" if call.hit else "miss", attempt.leased_s - call.asked_s)

    def release(self, call: "CallLease", *, clean: bool, answered: bool = False) -> None:
        """The call is over; without `clean` its function may still be at work for it."""
        lease = call.lease
        lease.leave(call, time.monotonic(), answered=answered)
        lease.clean = lease.clean and clean
        self._hand_on(lease)

    def report(self) -> None:
        """Tell what ran and has not been told yet."""
        if self._reporting is not None:
            self._report()

    # -- calls that wait, and their questions -----------------------------------------------------

    def _at_hand(self, kind: LeaseKind, call: "CallLease") -> "PooledLease | None":
        """A lease that an earlier call has left, or shares."""
        queue = self._queues.get(kind)
        if queue is None:
            return None
        if kind.is_shared and (joined := queue.joined(call)) is not None:
            return joined
        while (lease := queue.take_free(call.instance)) is not None:
            if not lease.is_spent(call.asked_s):
                break
            self._give_back(lease)
        return lease

    async def _wait(self, kind: LeaseKind, call: "CallLease") -> "PooledLease | SchedulerError":
        """Wait until the call has a lease; the error if the scheduler refuses one."""
        if (queue := self._queues.get(kind)) is None:
            queue = self._queues[kind] = _Queue(kind)
        call.wish = call.needs()  # now: the function's models may change while it waits
        loop = asyncio.get_running_loop()
        if self._looking is None:
            self._looking = loop.call_later(LOOK_S, self._look)
        call.served = loop.create_future()
        queue.waiting[call] = None
        if queue.has_leases or (kind.is_shared and len(queue.waiting) > 1):
            queue.unasked[call] = loop.time()
            if queue.asking is None:
                self._ask_due(queue)
        else:
            self._ask(queue, call)
        try:
            return await call.served
        except asyncio.CancelledError:
            if call in queue.waiting:
                self._leave(queue, call)
            elif isinstance(lease := call.served.result(), PooledLease):
                call.lease = lease
                self.release(call, clean=True)
            raise

    def _ask_due(self, queue: "_Queue") -> None:
        """Ask for the calls that have waited for long enough, and come back for the next one."""
        loop = asyncio.get_running_loop()
        if queue.asking is not None:
            queue.asking.cancel()
            queue.asking = None
        while queue.unasked:
            call, since_s = next(iter(queue.unasked.items()))
            due_s, now_s = since_s + queue.patience_s, loop.time()
            if due_s > now_s:
                look_s = min(due_s, now_s + QUICK_S)  # the patience may be shorter then
                queue.asking = loop.call_at(look_s, self._ask_due, queue)
                return
            self._ask(queue, call)

    def _ask(self, queue: "_Queue", call: "CallLease") -> None:
        queue.unasked.pop(call, None)
        request = call.wish
        if queue.has_leases:
            # A question says what is needed, and not for which call.
            request = replace(request, id=RequestId(f"{request.id}~ask"))
        else:  # the call's name is that of the question, which may be asked for another one
            call.request = RequestId(f"{request.id}~kept")
        question = call.question = _Question(request.id, call, call)
        answered = partial(self._answered, queue, question)
        queue.open += 1
        loop = asyncio.get_running_loop()
        question.timer = loop.call_later(PATIENCE_S, self._unanswered, queue, question)
        question.number = self._source.ask(request, call.trace, answered)

    def _answered(
        self, queue: "_Queue", question: "_Question", answer: Granted | SchedulerError
    ) -> None:
        queue.settle(question, got_gpu=not isinstance(answer, SchedulerError))
        self._take_answer(queue, question, answer)
        self._ask_due(queue)  # fewer questions are open: the next one is due earlier

    def _take_answer(
        self, queue: "_Queue", question: "_Question", answer: Granted | SchedulerError
    ) -> None:
        call, question.call.question = question.call, None
        waits = not call.served.done()
        if isinstance(answer, SchedulerError):
            if waits and call is not question.asker and isinstance(answer, RequestEnded):
                self._ask(queue, call)  # for example after the deadline of the call that asked
            elif waits:
                self._leave(queue, call)
                call.served.set_result(answer)
            return
        call.hit = answer.placement.hit
        lease = PooledLease(queue, answer, question.request, call.instance)
        if lease.stands:
            self.standing[lease.id] = lease
            queue.in_use[lease] = None
        if waits and (question.request == call.wish.id or not lease.stands):
            call.request = question.request
            self._serve(call, lease)
        else:  # no call that runs is known by the question's name
            lease.end(question.request, time.monotonic())
            if waits:
                self._begin(lease, call)
                self._serve(call, lease)
        self._hand_on(lease)

    def _unanswered(self, queue: "_Queue", question: "_Question") -> None:
        """No further GPU is free, it seems: the next calls gather under each lease.

        One that takes its turn is sent only when a call ends: behind one that has just begun.
        """
        queue.late[question] = None
        if queue.kind.is_shared:
            now_s = time.monotonic()
            for lease in list(queue.in_use):
                self._fill(lease, now_s)

    def _leave(self, queue: "_Queue", call: "CallLease") -> None:
        """The call waits no more; its question is the next one's: it says what is needed."""
        queue.waiting.pop(call)
        queue.unasked.pop(call, None)
        question, call.question = call.question, None
        if question is None:
            return
        heir = next(iter(queue.unasked), None)
        if heir is None:
            queue.settle(question, got_gpu=False)
            self._source.withdraw(question.number)
            return
        del queue.unasked[heir]
        heir.question, question.call = question, heir

    # -- leases and what runs under them ----------------------------------------------------------

    def _begin(self, lease: "PooledLease", call: "CallLease") -> None:
        """The call runs under this lease, which the scheduler has not granted to it by name."""
        lease.begin(call)
        self._report_soon(lease)

    def _serve(self, call: "CallLease", lease: "PooledLease") -> None:
        self._leave(lease.queue, call)
        call.served.set_result(lease)

    def _fill(self, lease: "PooledLease", now_s: float) -> None:
        """Give the lease to calls that wait, as far as it has room."""
        while lease.has_room(now_s):
            in_turn = bool(lease.running) and not lease.queue.kind.is_shared
            call = lease.queue.next_call(lease.instance, here_only=in_turn)
            if call is None:
                return
            self._begin(lease, call)
            self._serve(call, lease)

    def _hand_on(self, lease: "PooledLease") -> None:
        """Give the lease to calls that wait; if no call has it then, keep it or give it back."""
        now_s = time.monotonic()
        self._fill(lease, now_s)
        if lease.running:
            self._report_soon(lease)
        elif lease.recalled or lease.terms.for_a_slice or not lease.clean or lease.is_spent(now_s):
            self._give_back(lease)
        else:
            self._report_soon(lease)
            lease.free_s = now_s
            lease.queue.in_use.pop(lease)
            lease.queue.free.append(lease)

    def _recalled(self, lease: LeaseId) -> None:
        """Begin no further call under this lease, and give it back."""
        wanted = self.standing.get(lease)
        if wanted is None:
            return
        wanted.recalled = True
        if wanted in wanted.queue.free:
            wanted.queue.free.remove(wanted)
            self._give_back(wanted)

    def _give_back(self, lease: "PooledLease") -> None:
        self._unreported.pop(lease, None)
        if (report := lease.report(0.0)) is not None:
            self._source.report((report,))
        self.standing.pop(lease.id, None)
        lease.queue.in_use.pop(lease, None)
        self._source.release(lease.id, None if lease.stands else lease.first)

    def _report_soon(self, lease: "PooledLease") -> None:
        self._unreported[lease] = None
        if len(lease.uses) >= _MOST_USES:
            self._report()
        elif self._reporting is None:
            loop = asyncio.get_running_loop()
            due_s = max(loop.time() + REPORT_S, self._reported_s + REPORTS_APART_S)
            self._reporting = loop.call_at(due_s, self._report)

    def _report(self) -> None:
        if self._reporting is not None:
            self._reporting.cancel()
            self._reporting = None
        self._reported_s = asyncio.get_running_loop().time()
        unreported, self._unreported = self._unreported, {}
        before_s = time.monotonic() - REPORT_S / 2
        reports = [report for lease in unreported if (report := lease.report(before_s)) is not None]
        if reports:
            self._source.report(reports)
        for lease in unreported:
            if any(use is not None for use in lease.running.values()):  # a call has just begun
                self._report_soon(lease)

    def _look(self) -> None:
        """Give back leases that nobody uses, and forget queues without any."""
        self._looking = None
        now_s = time.monotonic()
        for queue in list(self._queues.values()):
            for lease in list(queue.free):
                if now_s - lease.free_s > IDLE_S or lease.is_spent(now_s):
                    queue.free.remove(lease)
                    self._give_back(lease)
            if not queue.has_leases and not queue.waiting:
                del self._queues[queue.kind]
        if self._queues:
            self._looking = asyncio.get_running_loop().call_later(LOOK_S, self._look)

    def _refused(self, taking: "CallLease", error: SchedulerError) -> None:
        """Continue without a lease if the scheduler does not know the models; else raise NoGpu."""
        call, now_s = taking.call, time.monotonic()
        function, waited_s = call.function, now_s - taking.asked_s
        if isinstance(error, EventRefused | RequestFailed | RequestWithdrawn):
            text = "call %s: %s continues without a lease: %s"
            cause, call_id = type(error).__name__, call.journey.call_id
            function.log.log(logging.INFO, cause, text, call_id, function.id, error)
            function.learned.forget()
            self._meters.lease("refused", waited_s)
            call.journey.attempts[-1].leased_s = now_s
            return
        if isinstance(error, QueueFull):
            function.waits.saw_full_gpus(error.wait_s, function.most_wait_s, now_s)
        self._meters.lease(type(error).__name__, waited_s)
        raise error_statuses.no_gpu(error) from error


def _kind(function: Function) -> LeaseKind:
    together = max(1, function.options.batches.most)
    return LeaseKind(function.id, function.learned.models, together)


@dataclass(slots=True, eq=False)
class CallLease:
    """The lease of one attempt at the call, from when it is taken to the end of the context.

    Then it is left to the next call, or given back. After an error the function may still be at
    work for this call, and no other one follows, unless the attempt cannot have begun. `request`
    is the call's name at the scheduler.
    """

    _pool: LeasePool
    call: FunctionCall
    has_lease: bool = False
    hit: bool = True
    passed_over: int = 0
    question: "_Question | None" = None
    # From `take` on; `wish` and `served` while the call waits, `lease` behind that.
    instance: str = field(init=False)
    asked_s: float = field(init=False)
    request: RequestId = field(init=False)
    trace: TraceContext = field(init=False)
    wish: Request = field(init=False)
    served: "asyncio.Future[PooledLease | SchedulerError]" = field(init=False)
    lease: "PooledLease" = field(init=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self.has_lease:
            unbegun = isinstance(error, NoResponse) and not error.sent
            self._pool.release(self, clean=error is None or unbegun, answered=error is None)

    async def take(self, instance: str) -> None:
        """Wait for a lease on the models that the call is expected to use, at this instance.

        There is none if no model is expected, or if the scheduler no longer knows the models: the
        function then asks for its GPU by itself. NoGpu if the scheduler refuses.
        """
        journey = self.call.journey
        if self.call.function.learned.models:
            attempt = journey.attempts[-1]
            self.instance, self.asked_s = instance, time.monotonic()
            attempt.request = self.request = _request_id(self.call, attempt.number)
            self.trace = journey.context(LEASE, attempt.number)
            await self._pool.take(self)

    @property
    def lines(self) -> tuple[bytes, ...]:
        """Lines of a request's head that pass the lease to a function; nothing without one.

        An address that no header can have must fail only calls.
        """
        if not self.has_lease:
            return ()
        granted = self.lease.granted
        addresses = ",".join(granted.addresses).encode("latin-1")
        token = granted.token.encode("latin-1")
        return (b"x-gpu-address: ", addresses, b"\r\nx-gpu-lease: ", token, b"\r\n")

    def needs(self) -> Request:
        """What the call needs, as the scheduler is asked for it."""
        call, function, part = self.call, self.call.function, self.call.part
        options, slo_s, wait_s = function.options, function.options.slo_s, function.most_wait_s
        if part is not None:
            slo_s = slo_s if part.slo_s is None else part.slo_s
            wait_s = part.within_s if part.later else min(wait_s, part.within_s)
        return Request(
            id=self.request,
            function=function.id.for_scheduler,
            models=function.learned.models,
            deadline_s=call.deadline_s,
            priority=options.priority,
            slo_s=slo_s,
            near=NodeId(call.asked.near) if call.asked.near else None,
            registered_only=function.learned.reported,
            max_wait_s=wait_s,
            exit_rule=options.exit_rule,
            application="" if part is None else part.workflow,
            stage="" if part is None else part.stage,
        )


def _request_id(call: FunctionCall, attempt: int) -> RequestId:
    """A unique id for each lease: two requests with one id are one request to the scheduler.

    What an earlier attempt asked for may still be asked for, or have been given back.
    """
    call_id = call.journey.call_id
    if call.own_id:
        return RequestId(f"{call_id}~{attempt + 1}" if attempt else call_id)
    return RequestId(f"{call_id[:_CALL_ID_LETTERS]}~{secrets.token_hex(6)}")


class PooledLease:
    """One lease, and the calls that run under it: for the `first` alone, unless it `stands`.

    `instance` is the function's instance that used it last, and need not claim it again. It is not
    `clean` once a call broke off, since its function may still be at work. The call whose turn it
    is has it since `turn_s`. It `takes_turns` once an answer of this instance has said that calls
    take turns there; by then the models are loaded.
    """

    __slots__ = (
        "began_s", "calls_left", "clean", "ends", "first", "free_s", "granted", "id", "instance",
        "queue", "recalled", "running", "stands", "takes_turns", "terms", "turn_s", "uses",
    )  # fmt: skip

    def __init__(self, queue: "_Queue", granted: Granted, first: RequestId, instance: str) -> None:
        self.queue = queue
        self.granted = granted
        self.id = granted.placement.lease
        self.first = first
        self.stands = granted.placement.stands is not None
        self.terms = granted.placement.stands or _FOR_ONE_CALL
        self.began_s = self.turn_s = time.monotonic()
        self.calls_left = self.terms.calls - 1
        self.recalled = False
        self.free_s = 0.0
        self.instance = instance
        self.takes_turns = False
        self.clean = True
        self.uses: list[LeaseUse] = []
        self.ends: list[CallEnd] = []
        # The calls that run, and the use by which they are still to be reported: the scheduler
        # placed the first call itself.
        self.running: dict[RequestId, LeaseUse | None] = {first: None}

    def begin(self, call: CallLease) -> None:
        """The call runs from now on, or in its turn after the one that runs."""
        now_s = time.monotonic()
        waits = self.running and not self.queue.kind.is_shared
        if not waits:
            self.turn_s = now_s
        began_s = math.inf if waits else now_s
        self.running[call.request] = LeaseUse(
            call.request, call.asked_s, began_s, parent=call.trace.header
        )
        self.calls_left -= 1
        self.takes_turns = self.takes_turns and call.instance == self.instance
        self.instance = call.instance
        self.queue.in_use[self] = None

    def leave(self, call: CallLease, now_s: float, *, answered: bool) -> None:
        """A call is over; what its answer shows decides whether further ones are sent early."""
        turn_s = self.turn_s
        had_turn = self.end(call.request, now_s, answered=answered)
        if answered and had_turn:
            self.queue.saw(now_s - turn_s, spared_gpu=call.call.spared_gpu)
            self.takes_turns = call.call.takes_turns and call.instance == self.instance

    def end(self, request: RequestId, now_s: float, *, answered: bool = False) -> bool:
        """Whether the call had its turn; one that is answered without has run beside others."""
        use = self.running.pop(request)
        had_turn = use is None or use.began_s < math.inf
        if use is not None:
            out_of_turn_s = self.turn_s if answered else now_s
            self.uses.append(replace(use, began_s=min(use.began_s, out_of_turn_s), ended_s=now_s))
        elif self.stands:
            self.ends.append(CallEnd(request, now_s))
        if had_turn and not self.queue.kind.is_shared:
            self._next_turn(now_s)
        return had_turn

    def _next_turn(self, now_s: float) -> None:
        """The call that waited for its turn at the instance begins, if there is one."""
        self.turn_s = now_s
        for request, use in self.running.items():
            if use is not None and use.began_s == math.inf:
                self.running[request] = replace(use, began_s=now_s)
                return

    def is_spent(self, now_s: float) -> bool:
        """Whether no further call may begin under it."""
        stands_s = self.terms.slice_s if self.recalled else self.terms.seconds
        return self.calls_left <= 0 or now_s >= self.began_s + stands_s

    def has_room(self, now_s: float) -> bool:
        """Whether one more call may run under it, or take its turn there, where calls gather."""
        most = self.queue.kind.together
        if (self.takes_turns or self.queue.kind.is_shared) and self.queue.gathers(now_s):
            most *= 2
        return len(self.running) < most and self.clean and not self.is_spent(now_s)

    def report(self, began_before_s: float) -> LeaseUsed | None:
        """What ran since the last report, with the calls that began before then and still run."""
        for request, use in self.running.items():
            if use is not None and use.began_s <= began_before_s:
                self.uses.append(use)
                self.running[request] = None
        if not self.uses and not self.ends:
            return None
        uses, ends = tuple(self.uses), tuple(self.ends)
        self.uses.clear()
        self.ends.clear()
        return LeaseUsed(self.id, self.queue.kind.function.for_scheduler, uses, ends)


@dataclass(slots=True, eq=False)
class _Question:
    """A question that the scheduler has not answered, and the call that needs the answer now."""

    request: RequestId
    asker: CallLease
    call: CallLease
    number: int = 0
    timer: asyncio.TimerHandle = field(init=False)  # of its patience


@dataclass(slots=True, eq=False)
class _Queue:
    """The leases of one kind, and the calls that wait for one.

    `unasked` are those for which nothing is asked, with the time since which they wait; `open` is
    the number of questions. `late` ones were not answered within the patience. Until `full_until_s`
    the last of them counts as if it were still open. `call_s` is the recent average of how long a
    call takes; `spared` counts the calls since one may have used a GPU.
    """

    kind: LeaseKind
    free: list[PooledLease] = field(default_factory=list)
    in_use: dict[PooledLease, None] = field(default_factory=dict)
    # The first one is asked for all the time: a plain dict would look through what was deleted.
    waiting: OrderedDict[CallLease, None] = field(default_factory=OrderedDict)
    unasked: OrderedDict[CallLease, float] = field(default_factory=OrderedDict)
    asking: asyncio.TimerHandle | None = None
    open: int = 0
    late: dict[_Question, None] = field(default_factory=dict)
    full_until_s: float = 0.0
    call_s: float = math.inf
    spared: int = 0

    @property
    def has_leases(self) -> bool:
        return bool(self.in_use or self.free)

    @property
    def patience_s(self) -> float:
        """How long a call waits before one more question is asked."""
        if self.spared >= _SPARING and self.call_s < QUICK_S:
            begun_s = time.monotonic() - QUICK_S
            if all(lease.turn_s > begun_s for lease in self.in_use):
                return PATIENCE_S * MOST_PATIENCES
        return PATIENCE_S * min(1 + self.open, MOST_PATIENCES)

    def gathers(self, now_s: float) -> bool:
        """Whether more calls gather under each lease, as no further GPU is free."""
        may = self.kind.is_shared or self.call_s < QUICK_S
        return may and (bool(self.late) or now_s < self.full_until_s)

    def saw(self, took_s: float, *, spared_gpu: bool) -> None:
        """A call was answered, so long after its turn had come."""
        self.spared = self.spared + 1 if spared_gpu else 0
        known_s = self.call_s if self.call_s < math.inf else took_s
        self.call_s = known_s + _CALL_WEIGHT * (took_s - known_s)

    def settle(self, question: _Question, *, got_gpu: bool) -> None:
        """The question is not asked any more; calls in turn gather no more if a GPU was free."""
        self.open -= 1
        question.timer.cancel()
        if question in self.late:
            del self.late[question]
            if self.kind.is_shared or not got_gpu:
                self.full_until_s = time.monotonic() + FULL_S

    def take_free(self, instance: str) -> PooledLease | None:
        """A lease that no call uses, best of all one that this instance has claimed."""
        free = self.free
        for place in range(len(free) - 1, -1, -1):
            if free[place].instance == instance:
                return free.pop(place)
        return free.pop() if free else None

    def joined(self, call: CallLease) -> PooledLease | None:
        """A lease in use with room for one more call, best of all one of this instance."""
        leases = islice(self.in_use, _MOST_SHARED)
        roomy = [lease for lease in leases if lease.has_room(call.asked_s)]
        instance = call.instance
        return min(
            roomy, key=lambda lease: (lease.instance != instance, len(lease.running)), default=None
        )

    def next_call(self, instance: str, *, here_only: bool = False) -> CallLease | None:
        """The first call for this instance, which has claimed the lease; else the first of all.

        With `here_only` there is no other, as the call takes its turn at this instance.
        """
        live = (call for call in self.waiting if not call.served.done())
        calls = list(islice(live, _MOST_LOOKED_AT))
        first = calls[0] if calls else None
        if first is not None and first.passed_over < _MOST_PASSED_OVER:
            for call in calls:
                if call.instance == instance:
                    first.passed_over += call is not first
                    return call
        return None if first is None or (here_only and first.instance != instance) else first
