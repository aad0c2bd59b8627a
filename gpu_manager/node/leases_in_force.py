"""The leases in force on a node: their holders, and when one that lingers should end.

Pure: times are handed in. A lease that a session asked for itself lingers between its calls, so
that a loop of calls asks once; it ends when it was idle for long, and soon when others wait.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NewType

from scheduler.api import GpuId, LeaseId, ModelId, RequestId, SlotId

SessionKey = NewType("SessionKey", str)

_CALLS_OF_QUIET = 1.5
_NO_LEASE = LeaseId(0)


class EndReason(StrEnum):
    """Why a lease ends."""

    ORDERED = "the scheduler ended it"
    RELEASED = "released"
    SESSION_GONE = "its session is gone"
    IDLE = "idle"
    CONTENDED = "others wait"
    QUIET = "others wait, and it seems to be quiet"
    EXPIRED = "it was held for long"
    UNCLAIMED = "nobody came for it"
    UNFIT = "its request wants other models"
    WORKER_LOST = "its worker is gone"
    GPU_LOST = "its GPU is lost"
    STOPPING = "the GPU manager stops"


# Reasons for which a lease may end while the answer of its call in flight is still wanted.
_WANTED = frozenset(
    {EndReason.IDLE, EndReason.CONTENDED, EndReason.QUIET, EndReason.EXPIRED, EndReason.WORKER_LOST}
)


@dataclass(frozen=True, slots=True)
class LeaseTimes:
    """How long leases stay in force, and how long their last call may take.

    Where others wait, a lease that is used has `quantum_s`, and one that is not used for `quiet_s`
    and half a call more than its calls take ends at once. It has `first_call_s` to make its first
    call, so that two sessions that both begin slowly cannot take the GPU from each other for ever.
    The answer of a call whose lease was released or whose session is gone is not wanted: it has
    `grace_s` or `orphan_s`; other calls in flight have `call_s`. A lease that no session has
    claimed, as when its caller died before it could, ends after `unclaimed_s`.
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

    def grace(self, why: EndReason) -> float:
        """Seconds for a call in flight to end before its worker is killed."""
        if why in _WANTED:
            return self.call_s
        return self.orphan_s if why is EndReason.SESSION_GONE else self.grace_s


@dataclass(slots=True)
class LeaseInForce:
    """One lease in force; it is claimed once a session has learned of it.

    Calls are reported late, so that a lease which seems to be quiet is checked before it ends.
    """

    id: LeaseId
    slot: SlotId
    gpu: GpuId
    models: tuple[ModelId, ...]
    granted_s: float | None = None  # None: no session is to claim it
    requests: tuple[RequestId, ...] = ()
    holder: SessionKey | None = None
    given: bool = False  # to the holder's caller, for one request
    claimed_s: float = 0.0
    used_s: float = 0.0
    runs: int = 0
    run_s: float = 0.0
    checking: bool = False
    checked_s: float = 0.0
    ending: EndReason | None = None
    deadline_s: float = 0.0  # for a call in flight, once it ends


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
        """The lease, while it is in force or ending."""
        return self._held.get(lease)

    def grant(
        self,
        lease: LeaseId,
        slot: SlotId,
        gpu: GpuId,
        models: tuple[ModelId, ...],
        now_s: float | None = None,
        requests: tuple[RequestId, ...] = (),
    ) -> bool:
        """A lease is in force from now on; a session is to claim it if a time is given.

        False if it was already.
        """
        if lease in self._held:
            return False
        self.latest = max(self.latest, lease)
        self._held[lease] = LeaseInForce(lease, slot, gpu, models, now_s, requests)
        return True

    def is_over(self, lease: LeaseId) -> bool:
        """Whether it was granted and has ended."""
        return lease not in self._held and lease <= self.latest

    def claim(
        self, held: LeaseInForce, holder: SessionKey, now_s: float, *, given: bool = False
    ) -> None:
        """A session has learned of it, and may call."""
        held.holder, held.given = holder, given
        held.claimed_s = held.used_s = held.checked_s = now_s

    def used(self, held: LeaseInForce, now_s: float, run_s: float) -> None:
        """Calls of it have ended, which took this long each."""
        held.used_s = now_s
        held.run_s = run_s
        held.runs += 1

    def forget(self, lease: LeaseId) -> None:
        """It has ended."""
        del self._held[lease]

    def held_by(self, holder: SessionKey) -> list[LeaseInForce]:
        """What a session holds."""
        return [held for held in self._held.values() if held.holder == holder]

    def using(self, gpu: GpuId, model: ModelId) -> list[LeaseInForce]:
        """The leases that may call this model on this GPU."""
        found = self._held.values()
        return [held for held in found if held.gpu == gpu and model in held.models]

    def due(self, now_s: float) -> list[tuple[LeaseInForce, EndReason]]:
        """Those that should end now, and why; QUIET ones after a check."""
        found = [(held, *self._end_of(held)) for held in self._lingering()]
        return [(held, why) for held, at_s, why in found if at_s <= now_s]

    def next_due_s(self) -> float | None:
        """When to ask again."""
        return min((self._end_of(held)[0] for held in self._lingering()), default=None)

    def _lingering(self) -> list[LeaseInForce]:
        found = [held for held in self._held.values() if held.ending is None and not held.checking]
        return [held for held in found if held.holder is not None or held.granted_s is not None]

    def _end_of(self, held: LeaseInForce) -> tuple[float, EndReason]:
        times = self.times
        if held.holder is None and held.granted_s is not None:
            return held.granted_s + times.unclaimed_s, EndReason.UNCLAIMED
        ends = [
            (held.used_s + times.linger_s, EndReason.IDLE),
            (held.claimed_s + times.expiry_s, EndReason.EXPIRED),
        ]
        if self.contended and held.runs:
            ends.append((held.claimed_s + times.quantum_s, EndReason.CONTENDED))
            patience_s = times.quiet_s + _CALLS_OF_QUIET * held.run_s
            ends.append((held.used_s + patience_s, EndReason.QUIET))
        elif self.contended:
            ends.append((held.claimed_s + times.first_call_s, EndReason.CONTENDED))
            patience_s = max(times.quiet_s, held.checked_s - held.claimed_s)
            ends.append((held.checked_s + min(patience_s, times.quantum_s), EndReason.QUIET))
        return min(ends)
