"""Calls that have used a GPU and need one again, while a quota of GPU time has no room."""

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from math import inf

from scheduler.core.state.pending import Bundle
from scheduler.core.tenants.owner_table import OwnerTable, both
from scheduler.core.tenants.owners import FunctionOwner, Owner, TenantSpace, Turn
from scheduler.core.tenants.quotas import is_over_gpu_s

# There is room once less than the quota is used, by so much at least; and a part of a window leaves
# it at a time that is computed in two ways.
_LEAST_S, _LATER_S = 1e-6, 0.001
_COMPACT_BEYOND = 64
_LOOKS = 10  # in a window, while it is not known when there is room


class PausedCalls:
    """The functions that have such calls.

    Of each function one goes on at a time, once the quota has room by estimate beside what runs and
    what goes on already; the next one when that one has its lease.
    """

    def __init__(self, owners: OwnerTable) -> None:
        self.count = 0
        self.resumed: dict[FunctionOwner, Turn] = {}  # those that wait for their lease
        self._owners = owners
        # When each function is looked at next: `inf` while its call before, or nothing, has room.
        self._look_s: dict[FunctionOwner, float] = {}
        self._looks: list[tuple[float, int, FunctionOwner]] = []  # a heap
        # Functions of each namespace that may have room when something of it needs less.
        self._behind: dict[TenantSpace, dict[FunctionOwner, None]] = {}
        # What the resumed calls of each namespace need, by estimate.
        self._coming_s: dict[TenantSpace, dict[FunctionOwner, float]] = {}

    def add(self, turn: Turn, now: float) -> None:
        """This call goes on when there is room."""
        owner = turn.owner
        owner.paused_turns[turn] = None
        self._count(owner, 1)
        if self._let_go(turn):  # there is no room any more
            owner.paused_turns.move_to_end(turn, last=False)
            self._wait_for_room(owner, now)
        elif owner not in self._look_s:
            self._look_s[owner] = inf
            if owner not in self.resumed:
                self._wait_for_room(owner, now)

    def remove(self, turn: Turn) -> bool:
        """Pause this call no longer; whether it was paused."""
        owner = turn.owner
        if turn not in owner.paused_turns:
            return False
        del owner.paused_turns[turn]
        self._count(owner, -1)
        if not owner.paused_turns:
            del self._look_s[owner]
            behind = self._behind.get(owner.space, {})
            behind.pop(owner, None)
            if not behind:
                self._behind.pop(owner.space, None)
        return True

    def waits_no_more(self, turn: Turn) -> None:
        """This request has its lease, or has ended."""
        if self._let_go(turn) and turn.owner.paused_turns:
            self._look(turn.owner, 0.0)

    def may_have_room(self, owner: FunctionOwner) -> None:
        """Something of it needs less GPU time than was expected."""
        for each in self._behind.pop(owner.space, ()):
            if each in self._look_s:
                self._look(each, 0.0)

    def may_be_due(self, now: float) -> bool:
        """Whether `due` has to be asked."""
        return bool(self._looks) and self._looks[0][0] <= now

    def due(self, now: float, estimate_s: Callable[[Bundle], float]) -> list[Turn]:
        """Those that may go on now; their caller removes them."""
        found = []
        while self.may_be_due(now):
            look_s, _, owner = heappop(self._looks)
            if self._look_s.get(owner) != look_s:
                continue
            self._look_s[owner] = inf
            if owner in self.resumed:
                continue
            if any(self.short_s(each, now) > 0.0 for each in both(owner)):
                self._wait_for_room(owner, now)
                continue
            turn = self.resumed[owner] = next(iter(owner.paused_turns))
            needs_s = estimate_s(turn.pending.bundle)
            self._coming_s.setdefault(owner.space, {})[owner] = needs_s
            found.append(turn)
        return found

    def next_s(self) -> float | None:
        """When there may be room next; None: not without another event."""
        looks = self._looks
        while looks and self._look_s.get(looks[0][2]) != looks[0][0]:
            heappop(looks)
        return looks[0][0] if looks else None

    def terms_changed(self) -> None:
        """There may be room at once."""
        for owner in self._look_s:
            self._look(owner, 0.0)

    def clear(self) -> None:
        """No terms hold any more; nothing is paused."""
        self.resumed.clear()
        self._looks.clear()
        self._behind.clear()
        self._coming_s.clear()

    def _count(self, owner: FunctionOwner, more: int) -> None:
        self.count += more
        self._owners.count(owner, 0, 0, more)

    def _let_go(self, turn: Turn) -> bool:
        """Count this call no more as the one of its function that goes on; whether it was that."""
        owner = turn.owner
        if self.resumed.get(owner) is not turn:
            return False
        del self.resumed[owner]
        coming = self._coming_s[owner.space]
        del coming[owner]
        if not coming:
            del self._coming_s[owner.space]
        self.may_have_room(owner)
        return True

    def short_s(self, owner: Owner, now: float) -> float:
        """By how much GPU time an owner lacks room; what runs and what comes counts by estimate."""
        most_s = owner.terms.gpu_s
        if most_s is None:
            return 0.0
        coming_s = 0.0
        if isinstance(owner, TenantSpace):  # a function is not asked while a call of it comes
            coming_s = sum(self._coming_s.get(owner, {}).values())
        running_s = owner.running_s(now) if owner.leases else 0.0
        return max(0.0, owner.used_s(now) + running_s + coming_s - most_s + _LEAST_S)

    def _wait_for_room(self, function: FunctionOwner, now: float) -> None:
        """Look again when both owners have room, if nothing more is used until then."""
        self._behind.setdefault(function.space, {})[function] = None
        at_s = 0.0
        for owner in both(function):
            short_s = self.short_s(owner, now)
            if owner.window is not None and short_s > 0.0:
                left_s = owner.window.frees_in_s(short_s, now)
                if left_s is None and owner.terms.gpu_s:  # what has not been used yet leaves later
                    left_s = owner.window.window_s / _LOOKS
                at_s = max(at_s, inf if left_s is None else now + left_s + _LATER_S)
        self._look(function, at_s)

    def _look(self, owner: FunctionOwner, at_s: float) -> None:
        self._look_s[owner] = at_s
        if at_s < inf:
            heappush(self._looks, (at_s, owner.number, owner))
        if len(self._looks) > 2 * len(self._look_s) + _COMPACT_BEYOND:
            self._looks = [each for each in self._looks if self._look_s.get(each[2]) == each[0]]
            heapify(self._looks)


def is_used_up(function: FunctionOwner, now: float) -> bool:
    """Whether the function, or its namespace, has used all the GPU time that it may have."""
    return is_over_gpu_s(function, now) or is_over_gpu_s(function.space, now)
