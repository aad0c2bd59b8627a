"""The leases in force on a node: who holds which, and when one that merely lingers should end.

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


class Why(StrEnum):
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


# Why a lease may end although somebody wants the answer of the call in flight.
_WANTED = frozenset({Why.IDLE, Why.CONTENDED, Why.QUIET, Why.EXPIRED, Why.WORKER_LOST})


@dataclass(frozen=True, slots=True)
class LeaseTimes:
    """How long leases stay in force, and how long their last call may take.

    Where others wait, a lease that is used has `quantum_s`, and one that is not used for `quiet_s`
    and half a call more than its calls take ends at once. It has `first_call_s` to make its first
    call, so that two sessions that both begin slowly cannot take the GPU from each other for ever.
    Nobody wants the answer of a call whose lease was released or whose session is gone: it has
    `grace_s` or `orphan_s`; other calls in flight have `call_s`. A lease that no session has come
    for, as when its caller died with the news of it, ends after `unclaimed_s`.
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

    def grace(self, why: Why) -> float:
        """Seconds for a call in flight to end before its worker is killed."""
        if why in _WANTED:
            return self.call_s
        return self.orphan_s if why is Why.SESSION_GONE else self.grace_s


@dataclass(slots=True)
class Held:
    """One lease in force; it is claimed when a session was told of it.

    Calls are reported late, so that a lease which seems to be quiet is checked before it ends.
    """

    id: LeaseId
    slot: SlotId
    gpu: GpuId
    models: tuple[ModelId, ...]
    granted_s: float | None = None  # None: nobody is to come for it
    requests: tuple[RequestId, ...] = ()
    holder: SessionKey | None = None
    given: bool = False  # to the holder's caller, for one request
    claimed_s: float = 0.0
    used_s: float = 0.0
    runs: int = 0
    run_s: float = 0.0
    checking: bool = False
    checked_s: float = 0.0
    ending: Why | None = None
    deadline_s: float = 0.0  # for a call in flight, once it ends


@dataclass(slots=True)
class Leases:
    """Every lease from its grant to its end."""

    times: LeaseTimes
    contended: bool = False
    latest: LeaseId = _NO_LEASE
    _held: dict[LeaseId, Held] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Held]:
        return iter(list(self._held.values()))

    def __len__(self) -> int:
        return len(self._held)

    def get(self, lease: LeaseId) -> Held | None:
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
        """A lease is in force from now on, for somebody to claim if a time is given.

        False if it was already.
        """
        if lease in self._held:
            return False
        self.latest = max(self.latest, lease)
        self._held[lease] = Held(lease, slot, gpu, models, now_s, requests)
        return True

    def is_over(self, lease: LeaseId) -> bool:
        """Whether it was granted and has ended."""
        return lease not in self._held and lease <= self.latest

    def claim(self, held: Held, holder: SessionKey, now_s: float, *, given: bool = False) -> None:
        """A session was told of it, and may call."""
        held.holder, held.given = holder, given
        held.claimed_s = held.used_s = held.checked_s = now_s

    def used(self, held: Held, now_s: float, run_s: float) -> None:
        """Calls of it have ended, which took this long each."""
        held.used_s = now_s
        held.run_s = run_s
        held.runs += 1

    def forget(self, lease: LeaseId) -> None:
        """It has ended."""
        del self._held[lease]

    def held_by(self, holder: SessionKey) -> list[Held]:
        """What a session holds."""
        return [held for held in self._held.values() if held.holder == holder]

    def using(self, gpu: GpuId, model: ModelId) -> list[Held]:
        """The leases that may call this model on this GPU."""
        found = self._held.values()
        return [held for held in found if held.gpu == gpu and model in held.models]

    def due(self, now_s: float) -> list[tuple[Held, Why]]:
        """Those that should end now, and why; QUIET ones after a check."""
        found = [(held, *self._end_of(held)) for held in self._lingering()]
        return [(held, why) for held, at_s, why in found if at_s <= now_s]

    def next_due_s(self) -> float | None:
        """When to ask again."""
        return min((self._end_of(held)[0] for held in self._lingering()), default=None)

    def _lingering(self) -> list[Held]:
        found = [held for held in self._held.values() if held.ending is None and not held.checking]
        return [held for held in found if held.holder is not None or held.granted_s is not None]

    def _end_of(self, held: Held) -> tuple[float, Why]:
        times = self.times
        if held.holder is None and held.granted_s is not None:
            return held.granted_s + times.unclaimed_s, Why.UNCLAIMED
        ends = [
            (held.used_s + times.linger_s, Why.IDLE),
            (held.claimed_s + times.expiry_s, Why.EXPIRED),
        ]
        if self.contended and held.runs:
            ends.append((held.claimed_s + times.quantum_s, Why.CONTENDED))
            patience_s = times.quiet_s + _CALLS_OF_QUIET * held.run_s
            ends.append((held.used_s + patience_s, Why.QUIET))
        elif self.contended:
            ends.append((held.claimed_s + times.first_call_s, Why.CONTENDED))
            patience_s = max(times.quiet_s, held.checked_s - held.claimed_s)
            ends.append((held.checked_s + min(patience_s, times.quantum_s), Why.QUIET))
        return min(ends)
