"""GPU leases for calls: asked of the scheduler before a call, left to the next one, or given back.

The scheduler says for how long a lease stands, and recalls it when somebody else needs a GPU. Until
then calls of the same function and models follow one another under it. What runs under it is
reported a moment later.
"""

import asyncio
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple, Protocol

from msgspec.structs import replace

from cache_manager.model.ids import ModelId
from common.tasks import BackgroundTasks
from common.telemetry.traces import TraceContext
from gateway_ext import error_statuses
from gateway_ext.calls.function_table import Function
from gateway_ext.metrics import GatewayMeters
from gateway_ext.tracing.journey import LEASE, Journey
from scheduler.api import (
    CallEnd,
    EventRefused,
    LeaseId,
    LeaseUse,
    LeaseUsed,
    NodeId,
    OwnerTerms,
    Placement,
    QueueFull,
    Request,
    RequestEnded,
    RequestFailed,
    RequestId,
    RequestWithdrawn,
    SchedulerError,
)
from scheduler.client.lease_client import LeaseKeeper
from scheduler.wire.caller_stream import Granted

log = logging.getLogger(__name__)

# A call waits this long for a lease that another call uses before it asks for one more: not long,
# as a question costs little. While calls wait, it passes on from one to the next.
PATIENCE_S = 0.003
# A lease that no call used for this long is given back.
IDLE_S = 0.5
# What ran is reported this long after it began or ended, and free leases are looked at this often.
REPORT_S, LOOK_S = 0.01, 0.1
_MOST_USES = 200
_MOST_EARLY = 4_096
# How many waiting calls are looked at for one of the lease's instance, and how often the first one
# may be passed over.
_MOST_LOOKED_AT, _MOST_PASSED_OVER = 8, 8
# Calls that share leases fill one batch first. While a question has brought no further GPU within
# the patience, and for so long after it, each lease takes the calls of one more: these gather.
FULL_S = 0.5
_MOST_SHARED = 64  # leases that are looked at for room
_CALL_ID_LETTERS = 64


class LeaseSource(Protocol):
    """Where leases come from and go back to: `scheduler.client.lease_client.LeaseClient`."""

    async def acquire(self, request: Request, trace: TraceContext | None = None) -> Granted:
        """Wait for a lease, for this trace; cancelling the task cancels the request."""

    def release(self, lease: LeaseId, request: RequestId | None = None) -> None:
        """Give a lease back for good; of one that others share, only this request's part."""

    def report(self, reports: Sequence[LeaseUsed]) -> None: ...

    def let_stand(self, keeper: LeaseKeeper) -> None:
        """Let leases stand from now on; this keeper is told which are wanted back."""

    def tell_terms(self, function: str, terms: OwnerTerms | None) -> None:
        """Have the scheduler know the function's own terms; None: it has none."""


class CallPart(NamedTuple):
    """A call that is a stage of a workflow: it may take `within_s`, and should take `slo_s`.

    One that comes `later`, after others of its run, may wait for all of `within_s`: a refusal would
    waste what those have computed.
    """

    workflow: str
    stage: str
    within_s: float
    slo_s: float | None = None
    later: bool = False


class CallLease(NamedTuple):
    """A lease for one call; `lines` pass it to a function.

    `request` is what the scheduler knows the call by. `kept` is set if the lease may outlive it.
    """

    placement: Placement
    request: RequestId
    lines: tuple[bytes, ...]
    kept: "KeptLease | None" = None


class LeaseKind(NamedTuple):
    """Calls of one kind can follow one another under one lease.

    `together` is how many of them the function's handler is given at a time: they share the lease.
    """

    function: str
    models: tuple[ModelId, ...]
    together: int = 1

    @property
    def is_shared(self) -> bool:
        return self.together > 1


class GpuLeasing:
    """Leases for the calls of GPU functions, and all leases that this gateway keeps.

    A `LeaseKeeper`: the scheduler says here which leases it wants back.
    """

    def __init__(self, leases: LeaseSource, meters: GatewayMeters) -> None:
        self._leases = leases
        self._meters = meters
        self._shelves: dict[LeaseKind, _Shelf] = {}
        self._kept: dict[LeaseId, KeptLease] = {}
        # The call that a lease was granted to may not have resumed when the recall comes.
        self._early_recalls: dict[LeaseId, None] = {}
        self._unreported: dict[KeptLease, None] = {}
        self._reporting: asyncio.TimerHandle | None = None
        self._looking: asyncio.TimerHandle | None = None
        self._tasks = BackgroundTasks(log, "a question for a lease")
        leases.let_stand(self)

    @property
    def kept_leases(self) -> int:
        return len(self._kept)

    def instance_for(self, function: Function) -> str:
        """The instance that best takes the next call, as it has a lease for it; empty: any."""
        if len(function.instances) == 1:
            return ""
        shelf = self._shelves.get(_kind(function))
        return shelf.free[-1].instance if shelf is not None and shelf.free else ""

    async def acquire(
        self,
        function: Function,
        instance: str,
        journey: Journey,
        deadline_s: float,
        *,
        own_id: bool,
        near: str = "",
        part: CallPart | None = None,
    ) -> CallLease | None:
        """A lease for the models that the call is expected to use, waited for until `deadline_s`.

        None if no model is expected, or if the scheduler no longer knows the models: the function
        then asks for its GPU by itself. NoGpu if the scheduler refuses. `instance` is the address
        that the call goes to; `own_id`: no other call can have this id. `near` is the node that has
        the call's data, if that is known, `part` is set of a call that is a stage of a workflow.
        """
        if not function.learned.models:
            return None
        attempt, asked_s = journey.attempts[-1], time.monotonic()
        request_id = use_id = _request_id(journey.call_id, attempt.number, own_id=own_id)
        attempt.request = request_id
        trace = journey.context(LEASE, attempt.number)
        kind = _kind(function)
        given: Found | None = self._at_hand(kind, instance, asked_s)
        if given is None:
            request = _request(function, request_id, deadline_s, near, part)
            turn = _Turn(instance, request, trace)
            try:
                given = await self._turn(self._shelf(kind), turn)
            except asyncio.CancelledError:
                self._meters.lease("cancelled", time.monotonic() - asked_s)
                raise
            except SchedulerError as error:
                self._refused(function, journey, error, asked_s)
                return None
            if turn.asked:  # its own question may still be asked, on behalf of another call
                use_id = RequestId(f"{request_id}~kept")
        attempt.leased_s = time.monotonic()
        use = LeaseUse(use_id, asked_s, attempt.leased_s, parent=trace.header)
        hit = isinstance(given, KeptLease) or given.granted.placement.hit
        lease = self._taken(kind, instance, given, use, request_id)
        attempt.request, attempt.placement = lease.request, lease.placement
        self._meters.lease("hit" if hit else "miss", attempt.leased_s - asked_s)
        return lease

    def release(self, lease: CallLease, *, clean: bool) -> None:
        """The call is over: give its lease back, or leave it to the next call.

        Without `clean` the function may still be at work for this call: no other one follows.
        """
        kept = lease.kept
        if kept is None:
            self._leases.release(lease.placement.lease, lease.request)
            return
        kept.end(lease.request, time.monotonic())
        kept.clean = kept.clean and clean
        self._left(kept)

    def recalled(self, lease: LeaseId) -> None:
        """Begin no further call under this lease, and give it back."""
        kept = self._kept.get(lease)
        if kept is None:
            self._early_recalls[lease] = None
            if len(self._early_recalls) > _MOST_EARLY:
                del self._early_recalls[next(iter(self._early_recalls))]
            return
        kept.recalled = True
        if kept in kept.shelf.free:
            kept.shelf.free.remove(kept)
            self._give_back(kept)

    def all_recalled(self, held: Iterable[LeaseId]) -> None:
        """The same for all leases that were granted: the stream to their leader has ended."""
        for lease in held:
            self.recalled(lease)

    # -- a lease for a call -----------------------------------------------------------------------

    def _at_hand(self, kind: LeaseKind, instance: str, now_s: float) -> "KeptLease | None":
        """A lease that an earlier call has left, or shares."""
        shelf = self._shelves.get(kind)
        if shelf is None:
            return None
        if kind.is_shared and (joined := shelf.joined(instance, now_s)) is not None:
            return joined
        while (kept := shelf.take_free(instance)) is not None and kept.is_spent(now_s):
            self._give_back(kept)
        return kept

    def _taken(
        self, kind: LeaseKind, instance: str, given: "Found", use: LeaseUse, own: RequestId
    ) -> CallLease:
        """What was found, as the call's lease; `own` is the id of the call's own question."""
        if isinstance(given, KeptLease):
            kept = given
        elif given.granted.placement.stands is None:
            lines = given.granted.header_lines()
            return CallLease(given.granted.placement, given.request, lines)
        else:
            kept = self._keep(kind, instance, given.granted, replace(use, request=given.request))
            if given.request == own:
                return CallLease(given.granted.placement, given.request, kept.lines, kept)
            # Another call asked for this lease, and no longer needs it.
            kept.end(given.request, use.began_s)
        kept.instance = instance
        kept.begin(use)
        if kind.is_shared:
            kept.shelf.shared[kept] = None
        self._report_soon(kept)
        return CallLease(kept.granted.placement, use.request, kept.lines, kept)

    def _keep(
        self, kind: LeaseKind, instance: str, granted: Granted, first: LeaseUse
    ) -> "KeptLease":
        shelf = self._shelf(kind)
        kept = self._kept[granted.placement.lease] = KeptLease(shelf, granted, instance, first)
        kept.recalled = kept.id in self._early_recalls
        self._early_recalls.pop(kept.id, None)
        shelf.count += 1
        if kind.is_shared:
            shelf.shared[kept] = None
            shelf.fill(kept, first.began_s)
        if self._looking is None:
            self._looking = asyncio.get_running_loop().call_later(LOOK_S, self._look)
        return kept

    def _refused(
        self, function: Function, journey: Journey, error: SchedulerError, asked_s: float
    ) -> None:
        """Continue without a lease if the scheduler does not know the models; else raise NoGpu."""
        if isinstance(error, EventRefused | RequestFailed | RequestWithdrawn):
            text = "call %s: %s continues without a lease: %s"
            cause = type(error).__name__
            function.log.log(logging.INFO, cause, text, journey.call_id, function.id, error)
            function.learned.forget()
            self._meters.lease("refused", time.monotonic() - asked_s)
            journey.attempts[-1].leased_s = time.monotonic()
            return
        if isinstance(error, QueueFull):
            function.waits.saw_full_gpus(error.wait_s, function.most_wait_s, time.monotonic())
        self._meters.lease(type(error).__name__, time.monotonic() - asked_s)
        raise error_statuses.no_gpu(error) from error

    # -- calls that wait, and their questions -----------------------------------------------------

    def _shelf(self, kind: LeaseKind) -> "_Shelf":
        shelf = self._shelves.get(kind)
        if shelf is None:
            shelf = self._shelves[kind] = _Shelf(kind)
        return shelf

    async def _turn(self, shelf: "_Shelf", turn: "_Turn") -> "Found":
        shelf.turns[turn] = shelf.unasked[turn] = None
        if shelf.count or (shelf.kind.is_shared and len(shelf.turns) > 1):
            loop = asyncio.get_running_loop()
            turn.timer = loop.call_later(PATIENCE_S, self._ask, shelf, turn)
        else:
            self._ask(shelf, turn)
        try:
            result = await turn.found
            if isinstance(result, KeptLease):
                result.promised -= 1
            return result
        except asyncio.CancelledError:
            found = turn.found
            if found.done() and not found.cancelled() and found.exception() is None:
                self._leave(found.result())
            raise
        finally:
            shelf.turns.pop(turn, None)
            shelf.unasked.pop(turn, None)
            if turn.timer is not None:
                turn.timer.cancel()
            self._pass_on(shelf, turn)
            self._tidy(shelf)

    def _ask(self, shelf: "_Shelf", turn: "_Turn") -> None:
        shelf.unasked.pop(turn, None)
        # While other calls have leases, a question says what is needed, and not for which call.
        request = RequestId(f"{turn.request.id}~ask") if shelf.count else turn.request.id
        turn.asked = turn.asked or request == turn.request.id
        asked = self._leases.acquire(replace(turn.request, id=request), turn.trace)
        asking = self._tasks.start(asked, failed=_leave_to_call)
        question = turn.question = _Question(request, turn, asking)
        asking.add_done_callback(lambda _: self._answered(shelf, question))
        if shelf.kind.is_shared:
            asyncio.get_running_loop().call_later(PATIENCE_S, _unanswered, shelf, question)

    def _answered(self, shelf: "_Shelf", question: "_Question") -> None:
        task, turn = question.task, question.turn
        if question.late:
            shelf.late -= 1
            shelf.full_until_s = time.monotonic() + FULL_S
        if task.cancelled():
            return
        error = task.exception()
        if turn is None or turn.found.done():  # nobody here waits any more
            if error is None:
                self._leases.release(task.result().placement.lease, question.request)
            return
        turn.question = None
        if error is None:
            turn.found.set_result(OwnLease(task.result(), question.request))
        elif question.taken_over and isinstance(error, RequestEnded):
            self._ask(shelf, turn)  # for example after the deadline of the call that asked
        else:
            turn.found.set_exception(error)

    def _pass_on(self, shelf: "_Shelf", turn: "_Turn") -> None:
        """Leave a question to the next call that has none: it says what is needed, not for whom."""
        question, turn.question = turn.question, None
        if question is None or question.task.done():
            return
        heir = next(iter(shelf.unasked), None)
        question.turn, question.taken_over = heir, True
        if heir is None:
            question.task.cancel()
            return
        del shelf.unasked[heir]
        heir.question = question
        if heir.timer is not None:
            heir.timer.cancel()

    # -- leases that calls leave ------------------------------------------------------------------

    def _leave(self, found: "Found") -> None:
        """Nobody here uses this lease: leave it to the next call, or give it back."""
        if isinstance(found, OwnLease):
            self._leases.release(found.granted.placement.lease, found.request)
        else:
            found.promised -= 1
            self._left(found)

    def _left(self, kept: "KeptLease") -> None:
        """One call fewer uses the lease: leave it to the next ones, or give it back."""
        now_s, shelf = time.monotonic(), kept.shelf
        if not kept.members and (not kept.clean or kept.is_spent(now_s)):
            self._give_back(kept)
            return
        self._report_soon(kept)
        shelf.fill(kept, now_s)
        if kept.members:
            return
        if not kept.recalled and not kept.for_a_slice:
            kept.free_s = now_s
            shelf.shared.pop(kept, None)
            shelf.free.append(kept)
        else:
            self._give_back(kept)

    def _give_back(self, kept: "KeptLease") -> None:
        report = kept.report(0.0)
        self._unreported.pop(kept, None)
        if report is not None:
            self._leases.report((report,))
        if self._kept.pop(kept.id, None) is not None:
            kept.shelf.count -= 1
            kept.shelf.shared.pop(kept, None)
            self._tidy(kept.shelf)
        self._leases.release(kept.id)

    def _tidy(self, shelf: "_Shelf") -> None:
        if not shelf.count and not shelf.turns and self._shelves.get(shelf.kind) is shelf:
            del self._shelves[shelf.kind]

    def _report_soon(self, kept: "KeptLease") -> None:
        self._unreported[kept] = None
        if len(kept.uses) >= _MOST_USES:
            self._report()
        elif self._reporting is None:
            self._reporting = asyncio.get_running_loop().call_later(REPORT_S, self._report)

    def _report(self) -> None:
        if self._reporting is not None:
            self._reporting.cancel()
            self._reporting = None
        unreported, self._unreported = self._unreported, {}
        before_s = time.monotonic() - REPORT_S / 2
        reports = [report for kept in unreported if (report := kept.report(before_s)) is not None]
        if reports:
            self._leases.report(reports)
        for kept in unreported:
            if kept.has_unknown:  # a call has just begun
                self._report_soon(kept)

    def _look(self) -> None:
        """Give back what nobody uses."""
        self._looking = None
        now_s = time.monotonic()
        for shelf in list(self._shelves.values()):
            for kept in list(shelf.free):
                if now_s - kept.free_s > IDLE_S or kept.is_spent(now_s):
                    shelf.free.remove(kept)
                    self._give_back(kept)
        if self._kept:
            self._looking = asyncio.get_running_loop().call_later(LOOK_S, self._look)


def _kind(function: Function) -> LeaseKind:
    together = max(1, function.options.batches.most)
    return LeaseKind(function.id.for_scheduler, function.learned.models, together)


def _request(
    function: Function, request: RequestId, deadline_s: float, near: str, part: CallPart | None
) -> Request:
    options, wait_s = function.options, function.most_wait_s
    asked = Request(
        id=request,
        function=function.id.for_scheduler,
        models=function.learned.models,
        deadline_s=deadline_s,
        priority=options.priority,
        slo_s=options.slo_s,
        near=NodeId(near) if near else None,
        registered_only=function.learned.reported,
        max_wait_s=wait_s,
        exit_rule=options.exit_rule,
    )
    if part is None:
        return asked
    return replace(
        asked,
        application=part.workflow,
        stage=part.stage,
        slo_s=options.slo_s if part.slo_s is None else part.slo_s,
        max_wait_s=part.within_s if part.later else min(wait_s, part.within_s),
    )


def _request_id(call_id: str, attempt: int, *, own_id: bool) -> RequestId:
    """A unique id for each lease: two requests with one id are one request to the scheduler.

    What an earlier attempt asked for may still be asked for, or have been given back.
    """
    if own_id:
        return RequestId(f"{call_id}~{attempt + 1}" if attempt else call_id)
    return RequestId(f"{call_id[:_CALL_ID_LETTERS]}~{secrets.token_hex(6)}")


class KeptLease:
    """One lease that stands, and the calls that run under it.

    `instance` is the function's instance that used it last, and need not claim it again. `promised`
    counts the calls that were given the lease and have not resumed. It is not `clean` once a call
    broke off, since its function may still be at work.
    """

    __slots__ = (
        "granted", "lines", "shelf", "instance", "until_s", "slice_until_s", "calls_left",
        "for_a_slice", "recalled", "free_s", "promised", "clean", "uses", "ends", "_running",
    )  # fmt: skip

    def __init__(self, shelf: "_Shelf", granted: Granted, instance: str, first: LeaseUse) -> None:
        terms = granted.placement.stands
        assert terms is not None, "only such leases are kept"
        self.shelf = shelf
        self.granted = granted
        self.lines = granted.header_lines()
        self.until_s = first.began_s + terms.seconds
        self.slice_until_s = first.began_s + terms.slice_s
        self.calls_left = terms.calls - 1
        self.for_a_slice = terms.for_a_slice
        self.recalled = False
        self.free_s = 0.0
        self.instance = instance
        self.promised = 0
        self.clean = True
        self.uses: list[LeaseUse] = []
        self.ends: list[CallEnd] = []
        # The calls that run, and the use by which they are still to be reported: the scheduler
        # placed the first call itself.
        self._running: dict[RequestId, LeaseUse | None] = {first.request: None}

    @property
    def id(self) -> LeaseId:
        return self.granted.placement.lease

    @property
    def members(self) -> int:
        """How many calls run under it, or are about to."""
        return len(self._running) + self.promised

    def begin(self, use: LeaseUse) -> None:
        self._running[use.request] = use
        self.calls_left -= 1

    def end(self, request: RequestId, now_s: float) -> None:
        use = self._running.pop(request)
        if use is None:
            self.ends.append(CallEnd(request, now_s))
        else:
            self.uses.append(replace(use, ended_s=now_s))

    def is_spent(self, now_s: float) -> bool:
        """Whether no further call may begin under it."""
        until_s = self.slice_until_s if self.recalled else self.until_s
        return self.calls_left <= self.promised or now_s >= until_s

    def has_room(self, now_s: float) -> bool:
        """Whether one more call may run under it; of a second batch, where calls gather."""
        most = self.shelf.kind.together
        if self.shelf.kind.is_shared and self.shelf.gathers(now_s):
            most *= 2
        return self.members < most and self.clean and not self.is_spent(now_s)

    @property
    def has_unknown(self) -> bool:
        """Whether a call runs that the scheduler has not been told of."""
        return any(use is not None for use in self._running.values())

    def report(self, began_before_s: float) -> LeaseUsed | None:
        """What ran since the last report, with the calls that began before then and still run."""
        for request, use in self._running.items():
            if use is not None and use.began_s <= began_before_s:
                self.uses.append(use)
                self._running[request] = None
        if not self.uses and not self.ends:
            return None
        uses, ends = tuple(self.uses), tuple(self.ends)
        self.uses.clear()
        self.ends.clear()
        return LeaseUsed(self.id, self.shelf.kind.function, uses, ends)


class OwnLease(NamedTuple):
    """A lease that the scheduler gave a question: this call's, or one that it took over."""

    granted: Granted
    request: RequestId


Found = KeptLease | OwnLease


class _Question:
    """A question that the scheduler has not answered, and the call that needs the answer now."""

    __slots__ = ("late", "request", "taken_over", "task", "turn")

    def __init__(self, request: RequestId, turn: "_Turn", task: asyncio.Task[Granted]) -> None:
        self.request = request
        self.task = task
        self.turn: _Turn | None = turn
        self.taken_over = self.late = False


class _Turn:
    """One call that waits for a lease of its kind."""

    __slots__ = (
        "asked", "found", "instance", "passed_over", "question", "request", "timer", "trace",
    )  # fmt: skip

    def __init__(self, instance: str, request: Request, trace: TraceContext) -> None:
        self.instance = instance
        self.passed_over = 0
        self.request = request
        self.trace = trace
        self.asked = False  # under its own id
        self.found: asyncio.Future[Found] = asyncio.get_running_loop().create_future()
        self.question: _Question | None = None
        self.timer: asyncio.TimerHandle | None = None


class _Shelf:
    """The leases of one kind, and the calls that wait for one; `unasked`: without a question.

    `shared` are those in use that more calls may join. `late` questions were not answered within
    the patience, the last of them until `FULL_S` before `full_until_s`.
    """

    __slots__ = ("count", "free", "full_until_s", "kind", "late", "shared", "turns", "unasked")

    def __init__(self, kind: LeaseKind) -> None:
        self.kind = kind
        self.count = self.late = 0
        self.free: list[KeptLease] = []
        self.shared: dict[KeptLease, None] = {}
        self.full_until_s = 0.0
        # The first one is asked for all the time: a plain dict would look through what was deleted.
        self.turns: OrderedDict[_Turn, None] = OrderedDict()
        self.unasked: OrderedDict[_Turn, None] = OrderedDict()

    def gathers(self, now_s: float) -> bool:
        """Whether a second batch gathers under each lease, as no further GPU is free."""
        return self.late > 0 or now_s < self.full_until_s

    def take_free(self, instance: str) -> KeptLease | None:
        """A lease that no call uses, best of all one that this instance has claimed."""
        free = self.free
        for place in range(len(free) - 1, -1, -1):
            if free[place].instance == instance:
                return free.pop(place)
        return free.pop() if free else None

    def joined(self, instance: str, now_s: float) -> KeptLease | None:
        """A lease in use with room for one more call, best of all one of this instance."""
        roomy = [kept for kept in islice(self.shared, _MOST_SHARED) if kept.has_room(now_s)]
        return min(roomy, key=lambda kept: (kept.instance != instance, kept.members), default=None)

    def fill(self, kept: KeptLease, now_s: float) -> None:
        """Give the lease to calls that wait, as far as it has room."""
        while kept.has_room(now_s):
            waiting = (turn for turn in self.turns if not turn.found.done())
            turns = list(islice(waiting, _MOST_LOOKED_AT))
            if not turns:
                return
            kept.promised += 1
            _fitting(turns, kept.instance).found.set_result(kept)


def _fitting(turns: Sequence[_Turn], instance: str) -> _Turn:
    """The first call for this instance, which has claimed the lease; else the first of all."""
    first = turns[0]
    if first.passed_over < _MOST_PASSED_OVER:
        for turn in turns:
            if turn.instance == instance:
                first.passed_over += turn is not first
                return turn
    return first


def _unanswered(shelf: _Shelf, question: _Question) -> None:
    if question.task.done():
        return
    question.late, shelf.late = True, shelf.late + 1
    now_s = time.monotonic()
    for kept in shelf.shared:
        shelf.fill(kept, now_s)


def _leave_to_call(_: BaseException) -> None:
    """The call that asks raises the error of its question, unless it needs no answer any more."""
