"""The leases in force on a node: their holders, and when an idle one should end.

This module is pure: times are passed in. A lease that a session acquired itself stays in force
between calls, so that a loop of calls acquires once; it ends after a long idle time, or soon if
other requests wait.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NewType

from scheduler.api import Configuration, GpuId, LeaseId, ModelId, RequestId, SlotId

SessionKey = NewType("SessionKey", str)

_CALLS_OF_QUIET = 1.5
# The last call under a lease that stands may begin at the end of its time, and use the GPU later.
_LAST_CALL_S = 0.25
_NO_LEASE = LeaseId(0)


class EndReason(StrEnum):
    """Why a lease ends."""

    ORDERED = "the scheduler ended it"
    RECALLED = "other requests wait, and its caller kept it"
    RELEASED = "released"
    SESSION_GONE = "its session has ended"
    IDLE = "idle"
    CONTENDED = "other requests wait"
    QUIET = "other requests wait, and it is idle"
    EXPIRED = "it was held for too long"
    UNCLAIMED = "no session claimed it"
    UNFIT = "its request needs other models"
    WORKER_LOST = "its worker has ended"
    GPU_LOST = "its GPU is lost"
    STOPPING = "the GPU manager stops"


# Reasons for which a lease may end although the client still waits for a call in flight.
_WANTED = frozenset(
    {
        EndReason.IDLE,
        EndReason.CONTENDED,
        EndReason.QUIET,
        EndReason.EXPIRED,
        EndReason.RECALLED,
        EndReason.UNCLAIMED,  # the first call may be on its way to us
        EndReason.WORKER_LOST,
    }
)


@dataclass(frozen=True, slots=True)
class LeaseTimes:
    """How long leases stay in force, and how long their last call may take.

    A lease ends when it is idle for `linger_s`, and after `expiry_s` in any case. If other requests
    wait, a lease in use ends after `quantum_s`, and a lease that is idle for `quiet_s` plus 1.5
    times the duration of its calls ends at once. The first call may take `first_call_s` to arrive,
    so that two slow sessions do not keep taking the GPU from each other.

    A call in flight may take `grace_s` if its lease was released, `orphan_s` if its session has
    ended, else `call_s`. A lease that no session claims, for example because the caller died, ends
    after `unclaimed_s`. If other requests wait, it ends `claim_s` after its models are loaded,
    unless a session has asked for it: a function that comes later asks for another lease.
    """

    linger_s: float = 5.0
    quantum_s: float = 0.1
    quiet_s: float = 0.005
    first_call_s: float = 2.0
    expiry_s: float = 300.0
    grace_s: float = 2.0
    orphan_s: float = 1.5
    call_s: float = 120.0
    unclaimed_s: float = 120.0
    claim_s: float = 1.0

    def grace(self, reason: EndReason) -> float:
        """Return the seconds that a call in flight has before its worker is killed."""
        if reason in _WANTED:
            return self.call_s
        return self.orphan_s if reason is EndReason.SESSION_GONE else self.grace_s


@dataclass(slots=True)
class LeaseInForce:
    """One lease in force; it has a holder after a session has claimed it.

    Workers report calls with a delay, so a lease that seems to be idle is checked before it ends.
    A lease that stands for a time is for several requests of its caller: the scheduler recalls it,
    so that other requests that wait do not end it here in that time. One with a `function` was
    given to a caller of that function, whose sessions need not ask for it: the one whose call comes
    first has it, and if it stands, all of them. It occupies `more_slots` too, and has the vCPUs of
    its configuration.
    """

    id: LeaseId
    slot: SlotId
    gpu: GpuId
    models: tuple[ModelId, ...]
    granted_s: float | None = None  # None: no session will claim it
    requests: tuple[RequestId, ...] = ()
    stands_s: float = 0.0
    function: str = ""
    more_slots: tuple[SlotId, ...] = ()
    configuration: Configuration | None = None
    loaded_s: float | None = None  # since when its models are loaded
    awaited: bool = False  # True once a session has asked for it
    admitted: bool = False  # its models let calls in
    holder: SessionKey | None = None
    given: bool = False  # True if the holder's caller acquired it, for one request
    claimed_s: float = 0.0
    used_s: float = 0.0
    runs: int = 0
    run_s: float = 0.0
    checking: bool = False
    checked_s: float = 0.0
    ending: EndReason | None = None
    deadline_s: float = 0.0  # for calls in flight, once the lease is ending

    def is_for(self, session: SessionKey, function: str) -> bool:
        """Whether this session of this function may use it, and give it back."""
        if self.holder == session:
            return True
        mine = self.function != "" and self.function == function
        return mine and (self.holder is None or self.is_shared)

    @property
    def is_shared(self) -> bool:
        """Whether several sessions of its function may call under it."""
        return self.stands and self.function != ""

    @property
    def stands(self) -> bool:
        return self.stands_s > 0.0

    @property
    def stands_until_s(self) -> float:
        """Until when those who wait do not end it; at once, if it is for one request."""
        if self.granted_s is None or not self.stands:
            return 0.0
        return self.granted_s + self.stands_s + _LAST_CALL_S


@dataclass(slots=True)
class LeasesInForce:
    """Every lease from its grant to its end."""

    times: LeaseTimes
    contended: bool = False
    latest: LeaseId = _NO_LEASE
    _held: dict[LeaseId, LeaseInForce] = field(default_factory=dict)

    def __iter__(self) -> Iterator[LeaseInForce]:
        return iter(list(self._held.values()))

    def __len__(self) -> int:
        return len(self._held)

    def get(self, lease: LeaseId) -> LeaseInForce | None:
        """Return the lease while it is in force or ending."""
        return self._held.get(lease)

    def grant(self, lease: LeaseInForce) -> bool:
        """Put a lease in force; a session will claim it if it has the time of its grant.

        Return False if one of its number was in force already.
        """
        if lease.id in self._held:
            return False
        self.latest = max(self.latest, lease.id)
        self._held[lease.id] = lease
        return True

    def is_over(self, lease: LeaseId) -> bool:
        """Whether the lease was granted and has ended."""
        return lease not in self._held and lease <= self.latest

    def claim(
        self, held: LeaseInForce, holder: SessionKey, now_s: float, *, given: bool = False
    ) -> None:
        """Set the session that holds the lease and may call under it."""
        held.holder, held.given = holder, given
        held.claimed_s = held.used_s = held.checked_s = now_s

    def record_use(self, held: LeaseInForce, now_s: float, run_s: float) -> None:
        """Record that calls under the lease have ended, which took `run_s` each."""
        held.used_s = now_s
        held.run_s = run_s
        held.runs += 1

    def forget(self, lease: LeaseId) -> None:
        """Remove a lease that has ended."""
        del self._held[lease]

    def held_by(self, holder: SessionKey) -> list[LeaseInForce]:
        """Return the leases that a session holds."""
        return [held for held in self._held.values() if held.holder == holder]

    def using(self, gpu: GpuId, model: ModelId) -> list[LeaseInForce]:
        """Return the leases that allow calls of this model on this GPU."""
        found = self._held.values()
        return [held for held in found if held.gpu == gpu and model in held.models]

    def due(self, now_s: float) -> list[tuple[LeaseInForce, EndReason]]:
        """Return the leases that should end now, with reasons; QUIET ones need a check first."""
        found = [(held, *self._end_of(held)) for held in self._with_due_time()]
        return [(held, reason) for held, at_s, reason in found if at_s <= now_s]

    def next_due_s(self) -> float | None:
        """Return the time when the next lease is due."""
        return min((self._end_of(held)[0] for held in self._with_due_time()), default=None)

    def _with_due_time(self) -> list[LeaseInForce]:
        found = [held for held in self._held.values() if held.ending is None and not held.checking]
        return [held for held in found if held.holder is not None or held.granted_s is not None]

    def _end_of(self, held: LeaseInForce) -> tuple[float, EndReason]:
        times = self.times
        if held.holder is None and held.granted_s is not None:
            if self.contended and held.loaded_s is not None and not held.awaited:
                return held.loaded_s + times.claim_s, EndReason.UNCLAIMED
            return held.granted_s + times.unclaimed_s, EndReason.UNCLAIMED
        ends = [
            (held.used_s + times.linger_s, EndReason.IDLE),
            (held.claimed_s + times.expiry_s, EndReason.EXPIRED),
        ]
        if self.contended:
            at_s, reason = min(self._ends_for_others(held))
            ends.append((max(at_s, held.stands_until_s), reason))
        return min(ends)

    def _ends_for_others(self, held: LeaseInForce) -> list[tuple[float, EndReason]]:
        """When a lease that was claimed ends because other requests wait."""
        times = self.times
        if held.runs:
            quiet_s = times.quiet_s + _CALLS_OF_QUIET * held.run_s
            return [
                (held.claimed_s + times.quantum_s, EndReason.CONTENDED),
                (held.used_s + quiet_s, EndReason.QUIET),
            ]
        quiet_s = max(times.quiet_s, held.checked_s - held.claimed_s)
        return [
            (held.claimed_s + times.first_call_s, EndReason.CONTENDED),
            (held.checked_s + min(quiet_s, times.quantum_s), EndReason.QUIET),
        ]
