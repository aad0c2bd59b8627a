"""Leases that calls leave to the next calls of the same function and models.

The scheduler says for how long a lease stands, and recalls it when somebody else needs a GPU. What
runs under it is reported a moment later.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import NamedTuple, Protocol

from cache_manager.model.ids import ModelId
from common.tasks import BackgroundTasks
from scheduler.api import CallEnd, LeaseId, LeaseUse, LeaseUsed
from scheduler.client.granted_lease import GrantedLease

log = logging.getLogger(__name__)

# A call waits this long for a lease that another call uses before it asks for its own.
PATIENCE_S = 0.03
# A lease that no call used for this long is given back.
IDLE_S = 0.5
# What ran is reported this long after it began or ended, and free leases are looked at this often.
REPORT_S, LOOK_S = 0.01, 0.1
_MOST_USES = 200
_MOST_EARLY = 256

Ask = Callable[[], Coroutine[None, None, GrantedLease]]


class LeaseKind(NamedTuple):
    """Calls of one kind can follow one another under one lease."""

    function: str
    models: tuple[ModelId, ...]
    batch: int


class LeaseHome(Protocol):
    """Where kept leases come from, and go back to."""

    def report(self, reports: Sequence[LeaseUsed]) -> None:
        """Tell what ran under leases that are kept."""
        ...

    def release(self, lease: LeaseId) -> None:
        """Give a lease back for good."""
        ...


class KeptLease:
    """One lease that stands; `use` is the call that runs under it.

    `instance` is the function's instance that used it last, and need not claim it again.
    """

    __slots__ = (
        "granted", "kind", "until_s", "calls_left", "recalled", "free_s", "use", "use_known",
        "uses", "ends", "instance",
    )  # fmt: skip

    def __init__(self, kind: LeaseKind, granted: GrantedLease, first: LeaseUse) -> None:
        terms = granted.placement.stands
        assert terms is not None, "only such leases are kept"
        self.kind = kind
        self.granted = granted
        self.until_s = first.began_s + terms.seconds
        self.calls_left = terms.calls - 1
        self.recalled = False
        self.free_s = 0.0
        self.instance = ""
        self.use: LeaseUse | None = first
        self.use_known = True  # the scheduler placed the first call itself
        self.uses: list[LeaseUse] = []
        self.ends: list[CallEnd] = []

    @property
    def id(self) -> LeaseId:
        return self.granted.placement.lease

    def begin(self, use: LeaseUse) -> None:
        """The next call runs under this lease."""
        self.use, self.use_known = use, False
        self.calls_left -= 1

    def end(self, now_s: float) -> None:
        """The call has ended."""
        use, self.use = self.use, None
        if use is not None and self.use_known:
            self.ends.append(CallEnd(use.request, now_s))
        elif use is not None:
            self.uses.append(use._replace(ended_s=now_s))

    def is_spent(self, now_s: float) -> bool:
        """Whether no further call may begin under it."""
        return self.recalled or self.calls_left <= 0 or now_s >= self.until_s

    def report(self, began_before_s: float) -> LeaseUsed | None:
        """What ran since the last report, with a call that began before then and still runs."""
        use = self.use
        if use is not None and not self.use_known and use.began_s <= began_before_s:
            self.uses.append(use)
            self.use_known = True
        if not self.uses and not self.ends:
            return None
        kind, uses, ends = self.kind, tuple(self.uses), tuple(self.ends)
        self.uses.clear()
        self.ends.clear()
        return LeaseUsed(self.id, kind.function, uses, ends, kind.batch)


class _Shelf:
    """The leases of one kind, and the calls that wait for one."""

    __slots__ = ("count", "free", "turns")

    def __init__(self) -> None:
        self.count = 0
        self.free: list[KeptLease] = []
        self.turns: deque[asyncio.Future[KeptLease | GrantedLease]] = deque()


class KeptLeases:
    """All leases that this gateway keeps; a `LeaseKeeper`."""

    def __init__(self, home: LeaseHome) -> None:
        self._home = home
        self._shelves: dict[LeaseKind, _Shelf] = {}
        self._kept: dict[LeaseId, KeptLease] = {}
        # The call that a lease was granted to may not have resumed when the recall comes.
        self._early_recalls: deque[LeaseId] = deque(maxlen=_MOST_EARLY)
        self._unreported: dict[KeptLease, None] = {}
        self._reporting: asyncio.TimerHandle | None = None
        self._looking: asyncio.TimerHandle | None = None
        # The call that asks raises the errors of its question, unless it needs no answer any more.
        self._tasks = BackgroundTasks(log, "a question for a lease", lambda _: None)

    def __len__(self) -> int:
        return len(self._kept)

    # -- calls ------------------------------------------------------------------------------------

    async def lease_for(self, kind: LeaseKind, instance: str, ask: Ask) -> KeptLease | GrantedLease:
        """A lease that an earlier call left, or else the call's own, whichever comes first."""
        now_s = time.monotonic()
        while (kept := self._free(kind, instance)) is not None:
            if not kept.is_spent(now_s):
                return kept
            self._give_back(kept)
        return await self._turn(self._shelves.setdefault(kind, _Shelf()), kind, ask)

    def _free(self, kind: LeaseKind, instance: str) -> KeptLease | None:
        """A lease that no call uses, best of all one that this instance has claimed."""
        shelf = self._shelves.get(kind)
        if shelf is None or not shelf.free:
            return None
        for place in range(len(shelf.free) - 1, -1, -1):
            if shelf.free[place].instance == instance:
                return shelf.free.pop(place)
        return shelf.free.pop()

    async def _turn(self, shelf: _Shelf, kind: LeaseKind, ask: Ask) -> KeptLease | GrantedLease:
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[KeptLease | GrantedLease] = loop.create_future()
        questions: list[asyncio.Task[GrantedLease]] = []

        def begin() -> None:
            question = self._tasks.start(ask())
            question.add_done_callback(lambda done: self._answered(kind, turn, done))
            questions.append(question)

        timer = loop.call_later(PATIENCE_S, begin) if shelf.count else None
        if timer is None:
            begin()
        shelf.turns.append(turn)
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._leave(kind, turn.result())
            raise
        finally:
            if timer is not None:
                timer.cancel()
            for question in questions:
                question.cancel()
            if turn in shelf.turns:
                shelf.turns.remove(turn)
            self._tidy(kind)

    def _answered(
        self,
        kind: LeaseKind,
        turn: asyncio.Future[KeptLease | GrantedLease],
        question: asyncio.Task[GrantedLease],
    ) -> None:
        if question.cancelled():
            return
        error = question.exception()
        if turn.done():  # another call left it its lease, or it was broken off
            if error is None:
                self._leave(kind, question.result())
        elif error is not None:
            turn.set_exception(error)
        else:
            turn.set_result(question.result())

    def keep(
        self, kind: LeaseKind, instance: str, granted: GrantedLease, first: LeaseUse
    ) -> KeptLease:
        """Keep a lease that stands; its first call runs."""
        kept = self._kept[granted.placement.lease] = KeptLease(kind, granted, first)
        kept.instance = instance
        kept.recalled = kept.id in self._early_recalls
        self._shelves.setdefault(kind, _Shelf()).count += 1
        if self._looking is None:
            self._looking = asyncio.get_running_loop().call_later(LOOK_S, self._look)
        return kept

    def begin(self, kept: KeptLease, instance: str, use: LeaseUse) -> None:
        """A call runs under a lease that an earlier one left."""
        kept.instance = instance
        kept.begin(use)
        self._report_soon(kept)

    def end(self, kept: KeptLease, *, clean: bool) -> None:
        """A call has ended; after one that may still run in its function no other one follows."""
        now_s = time.monotonic()
        kept.end(now_s)
        if not clean or kept.is_spent(now_s):
            self._give_back(kept)
            return
        self._report_soon(kept)
        self._offer(kept, now_s)

    # -- recalls ----------------------------------------------------------------------------------

    def recalled(self, lease: LeaseId) -> None:
        """Begin no further call under this lease, and give it back."""
        kept = self._kept.get(lease)
        if kept is None:
            self._early_recalls.append(lease)
            return
        kept.recalled = True
        shelf = self._shelves[kept.kind]
        if kept in shelf.free:
            shelf.free.remove(kept)
            self._give_back(kept)

    def all_recalled(self) -> None:
        """The same for all leases: the stream to their leader has ended."""
        for lease in list(self._kept):
            self.recalled(lease)

    # -- inside -----------------------------------------------------------------------------------

    def _leave(self, kind: LeaseKind, found: KeptLease | GrantedLease) -> None:
        """Nobody here uses this lease: leave it to the next call, or give it back."""
        if isinstance(found, KeptLease):
            if found.is_spent(time.monotonic()):
                self._give_back(found)
            else:
                self._offer(found, time.monotonic())
        else:
            self._home.release(found.placement.lease)
            self._tidy(kind)

    def _offer(self, kept: KeptLease, now_s: float) -> None:
        shelf = self._shelves[kept.kind]
        while shelf.turns:
            turn = shelf.turns.popleft()
            if not turn.done():
                turn.set_result(kept)
                return
        kept.free_s = now_s
        shelf.free.append(kept)

    def _give_back(self, kept: KeptLease) -> None:
        report = kept.report(0.0)
        self._unreported.pop(kept, None)
        if report is not None:
            self._home.report((report,))
        if self._kept.pop(kept.id, None) is not None:
            self._shelves[kept.kind].count -= 1
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
            if kept.use is not None and not kept.use_known:  # it has just begun
                self._report_soon(kept)

    def _look(self) -> None:
        """Give back what nobody uses."""
        self._looking = None
        now_s = time.monotonic()
        for shelf in list(self._shelves.values()):
            idle = [one for one in shelf.free if now_s - one.free_s > IDLE_S or one.is_spent(now_s)]
            for kept in idle:
                shelf.free.remove(kept)
                self._give_back(kept)
        if self._kept:
            self._looking = asyncio.get_running_loop().call_later(LOOK_S, self._look)
