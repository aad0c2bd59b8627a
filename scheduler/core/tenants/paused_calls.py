"""Calls that have used a GPU and need one again, while a quota of GPU time is used up."""

from math import inf

from scheduler.core.tenants.owner_table import both
from scheduler.core.tenants.owners import FunctionOwner, Turn
from scheduler.core.tenants.quotas import is_over_gpu_s

# There is room once less than the quota is used, by so much at least; and a part of a window leaves
# it at a time that is computed in two ways.
_LEAST_S, _LATER_S = 1e-6, 0.001


class PausedCalls:
    """The functions that have such calls.

    Of each function one goes on at a time, once the quota has room: what it will use is not known,
    and all at once could use far more than there is.
    """

    def __init__(self) -> None:
        self.count = 0
        self._room_s: dict[FunctionOwner, float] = {}  # when there may be room; not before
        self._resumed: dict[FunctionOwner, Turn] = {}

    def add(self, turn: Turn, now: float) -> None:
        """This call goes on when there is room."""
        owner = turn.owner
        owner.paused[turn] = None
        self.count += 1
        if owner not in self._room_s:
            self._room_s[owner] = _room_s(owner, now)

    def remove(self, turn: Turn) -> bool:
        """Pause this call no longer; whether it was paused."""
        owner = turn.owner
        if turn not in owner.paused:
            return False
        del owner.paused[turn]
        self.count -= 1
        if not owner.paused:
            del self._room_s[owner]
            self._resumed.pop(owner, None)
        return True

    def due(self, now: float) -> list[Turn]:
        """Those that may go on now; their caller removes them."""
        found = []
        for owner, room_s in self._room_s.items():
            last = self._resumed.get(owner)
            if room_s > now or (last is not None and last.queued and last not in owner.paused):
                continue
            if is_used_up(owner, now):
                self._room_s[owner] = _room_s(owner, now)
                continue
            turn = self._resumed[owner] = next(iter(owner.paused))
            found.append(turn)
        return found

    def next_s(self, now: float) -> float | None:
        """When there may be room next; None: not without another event."""
        coming = [room_s for room_s in self._room_s.values() if now < room_s < inf]
        return min(coming) if coming else None

    def terms_changed(self) -> None:
        """There may be room at once."""
        for owner in self._room_s:
            self._room_s[owner] = 0.0


def is_used_up(function: FunctionOwner, now: float) -> bool:
    """Whether the function, or its namespace, has used all the GPU time that it may have."""
    return is_over_gpu_s(function, now) or is_over_gpu_s(function.space, now)


def _room_s(function: FunctionOwner, now: float) -> float:
    """When both have room again, if nothing more is used until then."""
    at_s = 0.0
    for owner in both(function):
        window, most_s = owner.window, owner.terms.gpu_s
        if window is None or most_s is None or not is_over_gpu_s(owner, now):
            continue
        left_s = window.frees_in_s(owner.used_s(now) - most_s + _LEAST_S, now)
        at_s = max(at_s, inf if left_s is None else now + left_s + _LATER_S)
    return at_s
