"""Leases that calls leave to the next calls of the same function and models.

The scheduler says for how long a lease stands, and recalls it when somebody else needs a GPU. What
runs under it is reported a moment later.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable, Sequence
from itertools import islice
from typing import NamedTuple, Protocol

from msgspec.structs import replace

from cache_manager.model.ids import ModelId
from common.tasks import BackgroundTasks
from scheduler.api import CallEnd, LeaseId, LeaseUse, LeaseUsed, RequestEnded, RequestId
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

# Asks the scheduler under this id.
Ask = Callable[[RequestId], Coroutine[None, None, Granted]]


class LeaseHome(Protocol):
    """Where kept leases come from, and go back to."""

    def report(self, reports: Sequence[LeaseUsed]) -> None: ...

    def release(self, lease: LeaseId, request: RequestId | None = None) -> None:
        """Give a lease back for good; of one that others share, only this request's part."""


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

    __slots__ = ("ask", "found", "instance", "passed_over", "question", "request", "timer")

    def __init__(self, instance: str, request: RequestId, ask: Ask) -> None:
        self.instance = instance
        self.passed_over = 0
        self.request = request
        self.ask = ask
        self.found: asyncio.Future[Found] = asyncio.get_running_loop().create_future()
        self.question: _Question | None = None
        self.timer: asyncio.TimerHandle | None = None


class _Shelf:
    """The leases of one kind, and the calls that wait for one; `unasked`: without a question.

    `shared` are those in use that more calls may join. `late` questions were not answered within
    the patience, the last of them until `FULL_S` before `full_until_s`.
    """

    __slots__ = ("count", "free", "full_until_s", "late", "shared", "turns", "unasked")

    def __init__(self) -> None:
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


class KeptLease:
    """One lease that stands, and the calls that run under it.

    `instance` is the function's instance that used it last, and need not claim it again. `promised`
    counts the calls that were given the lease and have not resumed. It is not `clean` once a call
    broke off, since its function may still be at work.
    """

    __slots__ = (
        "granted", "lines", "kind", "instance", "until_s", "slice_until_s", "calls_left",
        "for_a_slice", "recalled", "free_s", "promised", "clean", "uses", "ends", "_running",
    )  # fmt: skip

    def __init__(self, kind: LeaseKind, granted: Granted, first: LeaseUse) -> None:
        terms = granted.placement.stands
        assert terms is not None, "only such leases are kept"
        self.kind = kind
        self.granted = granted
        self.lines = granted.header_lines()
        self.until_s = first.began_s + terms.seconds
        self.slice_until_s = first.began_s + terms.slice_s
        self.calls_left = terms.calls - 1
        self.for_a_slice = terms.for_a_slice
        self.recalled = False
        self.free_s = 0.0
        self.instance = ""
        self.promised = 0
        self.clean = True
        self.uses: list[LeaseUse] = []
        self.ends: list[CallEnd] = []
        # The calls that run, and the use by which they are still to be reported.
        self._running: dict[RequestId, LeaseUse | None] = {}
        self._running[first.request] = None  # the scheduler placed the first call itself

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

    def has_room(self, now_s: float, *, gathers: bool) -> bool:
        """Whether one more call may run under it; if it `gathers`, also those of a second batch."""
        together = self.kind.together
        most = 2 * together if self.kind.is_shared and gathers else together
        return self.members < most and self.clean and not self.is_spent(now_s)

    @property
    def may_idle(self) -> bool:
        return not (self.recalled or self.for_a_slice)

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
        kind, uses, ends = self.kind, tuple(self.uses), tuple(self.ends)
        self.uses.clear()
        self.ends.clear()
        return LeaseUsed(self.id, kind.function, uses, ends)


class OwnLease(NamedTuple):
    """A lease that the scheduler gave a question: this call's, or one that it took over."""

    granted: Granted
    request: RequestId


Found = KeptLease | OwnLease


class KeptLeases:
    """All leases that this gateway keeps; a `LeaseKeeper`."""

    def __init__(self, home: LeaseHome) -> None:
        self._home = home
        self._shelves: dict[LeaseKind, _Shelf] = {}
        self._kept: dict[LeaseId, KeptLease] = {}
        # The call that a lease was granted to may not have resumed when the recall comes.
        self._early_recalls: dict[LeaseId, None] = {}
        self._unreported: dict[KeptLease, None] = {}
        self._reporting: asyncio.TimerHandle | None = None
        self._looking: asyncio.TimerHandle | None = None
        self._tasks = BackgroundTasks(log, "a question for a lease")

    def __len__(self) -> int:
        return len(self._kept)

    def claimed_by(self, kind: LeaseKind) -> str:
        """An instance that has claimed a lease of this kind that no call uses; none: empty."""
        shelf = self._shelves.get(kind)
        return shelf.free[-1].instance if shelf is not None and shelf.free else ""

    # -- calls ------------------------------------------------------------------------------------

    async def lease_for(
        self, kind: LeaseKind, instance: str, request: RequestId, ask: Ask
    ) -> Found:
        """A lease that an earlier call left or shares, or that `ask` brings for this request."""
        now_s = time.monotonic()
        if kind.is_shared and (joined := self._joined(kind, instance, now_s)) is not None:
            return joined
        while (kept := self._free(kind, instance)) is not None:
            if not kept.is_spent(now_s):
                return kept
            self._give_back(kept)
        return await self._turn(kind, _Turn(instance, request, ask))

    def _free(self, kind: LeaseKind, instance: str) -> KeptLease | None:
        """A lease that no call uses, best of all one that this instance has claimed."""
        shelf = self._shelves.get(kind)
        if shelf is None or not shelf.free:
            return None
        for place in range(len(shelf.free) - 1, -1, -1):
            if shelf.free[place].instance == instance:
                return shelf.free.pop(place)
        return shelf.free.pop()

    def _joined(self, kind: LeaseKind, instance: str, now_s: float) -> KeptLease | None:
        """A lease in use with room for one more call, best of all one of this instance."""
        shelf = self._shelves.get(kind)
        if shelf is None:
            return None
        gathers, looked_at = shelf.gathers(now_s), islice(shelf.shared, _MOST_SHARED)
        roomy = [kept for kept in looked_at if kept.has_room(now_s, gathers=gathers)]
        return min(roomy, key=lambda kept: (kept.instance != instance, kept.members), default=None)

    async def _turn(self, kind: LeaseKind, turn: _Turn) -> Found:
        shelf = self._shelves.setdefault(kind, _Shelf())
        shelf.turns[turn] = shelf.unasked[turn] = None
        if shelf.count or (kind.is_shared and len(shelf.turns) > 1):
            loop = asyncio.get_running_loop()
            turn.timer = loop.call_later(PATIENCE_S, self._ask, kind, shelf, turn)
        else:
            self._ask(kind, shelf, turn)
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
            self._tidy(kind)

    # -- questions --------------------------------------------------------------------------------

    def _ask(self, kind: LeaseKind, shelf: _Shelf, turn: _Turn) -> None:
        shelf.unasked.pop(turn, None)
        # While other calls have leases, a question says what is needed, and not for which call.
        request = RequestId(f"{turn.request}~ask") if shelf.count else turn.request
        asking = self._tasks.start(turn.ask(request), failed=_leave_to_call)
        question = _Question(request, turn, asking)
        turn.question = question
        question.task.add_done_callback(lambda _: self._answered(kind, shelf, question))
        if kind.is_shared:
            loop = asyncio.get_running_loop()
            loop.call_later(PATIENCE_S, self._unanswered, shelf, question)

    def _answered(self, kind: LeaseKind, shelf: _Shelf, question: _Question) -> None:
        task, turn = question.task, question.turn
        if question.late:
            shelf.late -= 1
            shelf.full_until_s = time.monotonic() + FULL_S
        if task.cancelled():
            return
        error = task.exception()
        if turn is None or turn.found.done():  # nobody here waits any more
            if error is None:
                self._home.release(task.result().placement.lease, question.request)
            return
        turn.question = None
        if error is None:
            turn.found.set_result(OwnLease(task.result(), question.request))
        elif question.taken_over and isinstance(error, RequestEnded):
            self._ask(kind, shelf, turn)  # for example after the deadline of the call that asked
        else:
            turn.found.set_exception(error)

    def _unanswered(self, shelf: _Shelf, question: _Question) -> None:
        if question.task.done():
            return
        question.late, shelf.late = True, shelf.late + 1
        now_s = time.monotonic()
        for kept in shelf.shared:
            _fill(shelf, kept, now_s)

    def _pass_on(self, shelf: _Shelf, turn: _Turn) -> None:
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

    # -- leases -----------------------------------------------------------------------------------

    def keep(self, kind: LeaseKind, instance: str, granted: Granted, first: LeaseUse) -> KeptLease:
        kept = self._kept[granted.placement.lease] = KeptLease(kind, granted, first)
        kept.instance = instance
        kept.recalled = kept.id in self._early_recalls
        self._early_recalls.pop(kept.id, None)
        shelf = self._shelves.setdefault(kind, _Shelf())
        shelf.count += 1
        if kind.is_shared:
            shelf.shared[kept] = None
            _fill(shelf, kept, first.began_s)
        if self._looking is None:
            self._looking = asyncio.get_running_loop().call_later(LOOK_S, self._look)
        return kept

    def begin(self, kept: KeptLease, instance: str, use: LeaseUse) -> None:
        kept.instance = instance
        kept.begin(use)
        if kept.kind.is_shared:
            self._shelves[kept.kind].shared[kept] = None
        self._report_soon(kept)

    def end(self, kept: KeptLease, request: RequestId, *, clean: bool) -> None:
        """A call has ended; after one that may still run in its function no other one follows."""
        kept.end(request, time.monotonic())
        kept.clean = kept.clean and clean
        self._left(kept)

    # -- recalls ----------------------------------------------------------------------------------

    def recalled(self, lease: LeaseId) -> None:
        """Begin no further call under this lease, and give it back."""
        kept = self._kept.get(lease)
        if kept is None:
            self._early_recalls[lease] = None
            if len(self._early_recalls) > _MOST_EARLY:
                del self._early_recalls[next(iter(self._early_recalls))]
            return
        kept.recalled = True
        shelf = self._shelves[kept.kind]
        if kept in shelf.free:
            shelf.free.remove(kept)
            self._give_back(kept)

    def all_recalled(self, held: Iterable[LeaseId]) -> None:
        """The same for all leases that were granted: the stream to their leader has ended."""
        for lease in held:
            self.recalled(lease)

    # -- inside -----------------------------------------------------------------------------------

    def _leave(self, found: Found) -> None:
        """Nobody here uses this lease: leave it to the next call, or give it back."""
        if isinstance(found, OwnLease):
            self._home.release(found.granted.placement.lease, found.request)
        else:
            found.promised -= 1
            self._left(found)

    def _left(self, kept: KeptLease) -> None:
        """One call fewer uses the lease: leave it to the next ones, or give it back."""
        now_s = time.monotonic()
        shelf = self._shelves[kept.kind]
        if not kept.members and (not kept.clean or kept.is_spent(now_s)):
            self._give_back(kept)
            return
        self._report_soon(kept)
        _fill(shelf, kept, now_s)
        if kept.members:
            return
        if kept.may_idle:
            kept.free_s = now_s
            shelf.shared.pop(kept, None)
            shelf.free.append(kept)
        else:
            self._give_back(kept)

    def _give_back(self, kept: KeptLease) -> None:
        report = kept.report(0.0)
        self._unreported.pop(kept, None)
        if report is not None:
            self._home.report((report,))
        if self._kept.pop(kept.id, None) is not None:
            shelf = self._shelves[kept.kind]
            shelf.count -= 1
            shelf.shared.pop(kept, None)
            self._tidy(kept.kind)
        self._home.release(kept.id)

    def _tidy(self, kind: LeaseKind) -> None:
        shelf = self._shelves.get(kind)
        if shelf is not None and not shelf.count and not shelf.turns:
            del self._shelves[kind]

    def _report_soon(self, kept: KeptLease) -> None:
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
            self._home.report(reports)
        for kept in unreported:
            if kept.has_unknown:  # a call has just begun
                self._report_soon(kept)

    def _look(self) -> None:
        """Give back what nobody uses."""
        self._looking = None
        now_s = time.monotonic()
        for shelf in list(self._shelves.values()):
            idle = [
                lease
                for lease in shelf.free
                if now_s - lease.free_s > IDLE_S or lease.is_spent(now_s)
            ]
            for kept in idle:
                shelf.free.remove(kept)
                self._give_back(kept)
        if self._kept:
            self._looking = asyncio.get_running_loop().call_later(LOOK_S, self._look)


def _fill(shelf: _Shelf, kept: KeptLease, now_s: float) -> None:
    while kept.has_room(now_s, gathers=shelf.gathers(now_s)):
        waiting = (turn for turn in shelf.turns if not turn.found.done())
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


def _leave_to_call(_: BaseException) -> None:
    """The call that asks raises the error of its question, unless it needs no answer any more."""
