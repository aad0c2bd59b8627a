"""Which leases are in force in this worker, and how many calls of each are under way."""

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable

from gpu_manager.call_errors import CallRefused
from gpu_manager.worker.orders import USUAL_TERMS, LeaseTerms
from torch_shim.wire.protocol import FailureKind

# A call may overtake the order that admits it, for they come over two sockets.
_PATIENCE_S = 0.5
_REMEMBERED = 256  # ended leases, whose calls are refused at once


class LeaseClocks:
    """A lease's clock runs while calls are under way; those at once count once. Thread-safe."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._lock = threading.Lock()
        self._under_way: defaultdict[int, int] = defaultdict(int)
        self._since_s: dict[int, float] = {}  # of leases with calls under way: what is not counted
        self._computed_s: defaultdict[int, float] = defaultdict(float)  # and what nobody has taken

    def begin(self, lease: int) -> None:
        with self._lock:
            self._under_way[lease] += 1
            self._since_s.setdefault(lease, self._now_s())

    def end(self, lease: int) -> None:
        with self._lock:
            self._count(lease)
            self._under_way[lease] -= 1
            if not self._under_way[lease]:
                del self._under_way[lease], self._since_s[lease]

    def take(self, lease: int) -> float:
        """For how long calls have run under a lease since this was last asked."""
        with self._lock:
            if lease in self._since_s:
                self._count(lease)
            return self._computed_s.pop(lease, 0.0)

    def _count(self, lease: int) -> None:
        since_s, self._since_s[lease] = self._since_s[lease], self._now_s()
        self._computed_s[lease] += self._since_s[lease] - since_s


class AdmittedLeases:
    """The gate that every call passes. Thread-safe."""

    def __init__(
        self,
        ended: Callable[[int], None],
        claimed: Callable[[int, str], None],
        clocks: LeaseClocks,
        patience_s: float = _PATIENCE_S,
    ) -> None:
        """`ended` and `claimed` are called on whatever thread.

        `ended` is, when an ended lease has no call left; `claimed`, when the first call comes under
        a lease that was admitted for a function, with the call's session. The process has `clocks`.
        """
        self._tell_ended = ended
        self._tell_claimed = claimed
        self._patience_s = patience_s
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._in_force: dict[int, set[str]] = {}  # the sessions, or function, that have each lease
        self._divided: set[int] = set()  # leases in force of which each session has its own part
        self._unclaimed: dict[int, bool] = {}  # a function's leases; if several sessions use it
        self._ended: deque[int] = deque(maxlen=_REMEMBERED)
        self._under_way: dict[int, int] = {}
        self._clocks = clocks
        self._terms: dict[int, LeaseTerms] = {}  # of leases in force, or with calls under way

    def admit(
        self,
        lease: int,
        owner: str,
        *,
        several: bool = False,
        divided: bool = False,
        terms: LeaseTerms = USUAL_TERMS,
    ) -> None:
        """Calls of this session under this lease may run, on these terms.

        If the owner is a function: those of its session whose call comes first, or of several. A
        `divided` lease has the owners that were admitted before, too.
        """
        with self._lock:
            before = self._in_force.get(lease, set()) if divided else set()
            self._in_force[lease] = before | {owner}
            if divided:
                self._divided.add(lease)
            self._unclaimed[lease] = several
            self._terms[lease] = terms
            self._changed.notify_all()

    def end(self, lease: int) -> None:
        """Let no further call in; `ended` is called at once where none is under way."""
        with self._lock:
            self._in_force.pop(lease, None)
            self._divided.discard(lease)
            self._unclaimed.pop(lease, None)
            self._ended.append(lease)
            over = lease not in self._under_way
            if over:
                self._terms.pop(lease, None)
            self._changed.notify_all()
        if over:
            self._tell_ended(lease)

    def end_all(self) -> None:
        with self._lock:
            leases = list(self._in_force)
        for lease in leases:
            self.end(lease)

    def terms(self, lease: int) -> LeaseTerms:
        return self._terms.get(lease, USUAL_TERMS)

    def check(self, lease: int) -> None:
        if lease not in self._in_force:
            raise CallRefused(FailureKind.LEASE, f"lease {lease} is not in force here")

    def enter(self, lease: int, session: str, function: str) -> None:
        """A call of this function's session begins; every one that was let in must leave.

        Lease numbers are easy to guess, so a call under a lease that others own is refused: it
        would run on GPU time that they waited for.
        """
        with self._lock:
            if lease not in self._in_force:
                self._changed.wait_for(lambda: self._is_known(lease), self._patience_s)
            self.check(lease)
            owners = self._in_force[lease]
            if owners.isdisjoint((session, function)):
                raise CallRefused(FailureKind.LEASE, f"lease {lease} is another session's")
            self._under_way[lease] = self._under_way.get(lease, 0) + 1
            self._clocks.begin(lease)
            several = self._unclaimed.pop(lease, None)
            first = several is not None and session not in owners
            if first and not several:
                self._in_force[lease] = {session}
        if first:
            self._tell_claimed(lease, session)

    def reported_session(self, lease: int, session: str) -> str:
        """The session, if calls under its lease are reported for each session by itself."""
        return session if lease in self._divided else ""

    def leave(self, lease: int) -> None:
        with self._lock:
            left = self._under_way.pop(lease) - 1
            self._clocks.end(lease)
            if left:
                self._under_way[lease] = left
            over = not left and lease not in self._in_force
            if over:
                self._terms.pop(lease, None)
        if over:
            self._tell_ended(lease)

    def _is_known(self, lease: int) -> bool:
        return lease in self._in_force or lease in self._ended
