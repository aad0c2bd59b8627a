"""Which leases are in force in this worker, and how many calls of each are under way."""

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from gpu_manager.call_errors import CallRefused
from gpu_manager.worker.orders import Admission
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


@dataclass(slots=True)
class AdmittedLease:
    """A lease in force here, or with calls under way."""

    admission: Admission  # the latest
    owners: set[str] = field(default_factory=set)  # sessions, or a function; none: it has ended
    called: bool = False  # since then
    under_way: int = 0


@dataclass(eq=False)
class AdmittedLeases:
    """The gate that every call passes. Thread-safe."""

    # Both are called on whatever thread: the first when an ended lease has no call left, the other
    # when the first call, of this session, comes under a lease that was admitted for a function.
    tell_ended: Callable[[int], None]
    tell_claimed: Callable[[int, str], None]
    clocks: LeaseClocks  # the process's
    patience_s: float = _PATIENCE_S

    def __post_init__(self) -> None:
        self._changed = threading.Condition()
        self._leases: dict[int, AdmittedLease] = {}
        self._ended: deque[int] = deque(maxlen=_REMEMBERED)

    def admit(self, admission: Admission) -> None:
        """Let calls in; those of owners that were admitted before, too, if the lease is divided."""
        with self._changed:
            lease = self._leases.setdefault(admission.lease, AdmittedLease(admission))
            before = lease.owners if admission.divided else set()
            lease.owners = before | {admission.owner}
            lease.admission, lease.called = admission, False
            self._changed.notify_all()

    def end(self, lease: int) -> None:
        """Let no further call in; `tell_ended` is called at once where none is under way."""
        with self._changed:
            found = self._leases.get(lease)
            if found is not None:
                found.owners = set()
            self._ended.append(lease)
            over = self._forget(lease)
            self._changed.notify_all()
        if over:
            self.tell_ended(lease)

    def end_all(self) -> None:
        for lease in list(self._leases):
            self.end(lease)

    def in_force(self, lease: int) -> AdmittedLease:
        """The lease; CallRefused unless calls may begin under it."""
        found = self._leases.get(lease)
        if found is None or not found.owners:
            raise CallRefused(FailureKind.LEASE, f"lease {lease} is not in force here")
        return found

    def enter(self, lease: int, session: str, function: str) -> AdmittedLease:
        """A call of this function's session begins; every one that was let in must leave.

        Lease numbers are easy to guess, so a call under a lease that others own is refused: it
        would run on GPU time that they waited for.
        """
        with self._changed:
            if lease not in self._leases:
                self._changed.wait_for(
                    lambda: lease in self._leases or lease in self._ended, self.patience_s
                )
            found = self.in_force(lease)
            if found.owners.isdisjoint((session, function)):
                raise CallRefused(FailureKind.LEASE, f"lease {lease} is another session's")
            found.under_way += 1
            self.clocks.begin(lease)
            first = not found.called and session not in found.owners
            found.called = True
            if first and not found.admission.several:
                found.owners = {session}
        if first:
            self.tell_claimed(lease, session)
        return found

    def leave(self, lease: int) -> None:
        with self._changed:
            self._leases[lease].under_way -= 1
            self.clocks.end(lease)
            over = self._forget(lease)
        if over:
            self.tell_ended(lease)

    def _forget(self, lease: int) -> bool:
        """Return whether a lease is over; one that is in force, or has calls under way, is not."""
        found = self._leases.get(lease)
        if found is not None and (found.owners or found.under_way):
            return False
        self._leases.pop(lease, None)
        return True
