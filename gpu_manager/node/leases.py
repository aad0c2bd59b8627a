"""The leases in force on a node: their holders, and when an idle one should end.

This module is pure: times are passed in. A lease that a session acquired itself stays in force
between calls, so that a loop of calls acquires once; it ends after a long idle time, or soon if
other requests wait.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NewType

from gpu_manager.worker.orders import LeaseTerms
from scheduler.api import Configuration, GpuId, GpuSpec, LeaseId, ModelId, RequestId, SlotId

SessionKey = NewType("SessionKey", str)

_CALLS_OF_QUIET = 1.5
# The last call under a lease that stands may begin at the end of its time, and use the GPU later.
_LAST_CALL_S = 0.25
_NO_LEASE = LeaseId(0)
_SOLE = RequestId("")  # names the claim of a lease that is not divided


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
    or sooner where the function claimed none of its last ones, unless a session has asked for it: a
    function that comes later asks for another lease. So it does after that time without weights
    here that a session sends: its function may be gone. One that is `own` ends after `linger_s`
    where nobody waits, as quotas count it. After `pass_on_s` a session of the function that waits
    for a lease takes one over that its caller has.
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
    pass_on_s: float = 0.03

    def grace(self, reason: EndReason) -> float:
        """Return the seconds that a call in flight has before its worker is killed."""
        if reason in _WANTED:
            return self.call_s
        return self.orphan_s if reason is EndReason.SESSION_GONE else self.grace_s


@dataclass(slots=True)
class SessionClaim:
    """What one request has of a lease: the session that claimed it, and how that uses it.

    Workers report calls with a delay, so a claim that seems to be idle is checked before it ends.
    """

    awaited: bool = False  # True once a session has asked for it
    holder: SessionKey | None = None
    given: bool = False  # True if the holder's caller acquired it, for one request
    claimed_s: float = 0.0
    used_s: float = 0.0
    runs: int = 0
    run_s: float = 0.0
    checked_s: float = 0.0

    def note_use(self, now_s: float, run_s: float) -> None:
        """Calls of the session have ended, which took `run_s` each."""
        self.used_s = now_s
        self.run_s = run_s
        self.runs += 1


@dataclass(slots=True)
class LeaseComputing:
    """What has been counted of a lease's computing, of which the processes of its models tell."""

    begun_s: float
    sum_s: float = 0.0
    told: dict[ModelId, tuple[float, float]] = field(default_factory=dict)  # when; the sum then

    def counted_s(self, model: ModelId, computed_s: float, now_s: float) -> float:
        """What counts of a model's report: time in which others computed as well counts once."""
        since_s, sum_s = self.told.get(model, (self.begun_s, 0.0))
        others_s = self.sum_s - sum_s
        if others_s > 0:
            computed_s = min(computed_s, max(0.0, now_s - since_s - others_s))
        self.sum_s += computed_s
        self.told[model] = now_s, self.sum_s
        return computed_s


@dataclass(slots=True)
class LeaseInForce:
    """One lease in force; it has a holder after a session has claimed it."""

    id: LeaseId
    slot: SlotId
    gpu: GpuId
    models: tuple[ModelId, ...]
    granted_s: float | None = None  # None: no session will claim it
    requests: tuple[RequestId, ...] = ()  # those that have not given it back
    # Its caller has it for several requests in this time: the scheduler recalls it, so that other
    # requests that wait do not end it here.
    stands_s: float = 0.0
    # It was given to a caller of this function, whose sessions need not ask for it: the one whose
    # call comes first has it, and if it stands, all of them.
    function: str = ""
    more_slots: tuple[SlotId, ...] = ()  # occupied, too
    configuration: Configuration | None = None  # its vCPUs
    own: bool = False  # given to sessions that asked for it themselves, and claim it at once
    loaded_s: float | None = None  # since when its models are loaded
    lacking_s: float | None = None  # since when weights lack that nobody sends
    admitted: bool = False  # its models let calls in
    checking: bool = False  # its models are asked whether calls are pending
    ending: EndReason | None = None
    deadline_s: float = 0.0  # for calls in flight, once the lease is ending
    # Several requests share it from its grant on: each has a claim of its own, which a session
    # makes by naming the request.
    is_divided: bool = field(init=False)
    claims: dict[RequestId, SessionClaim] = field(init=False)
    computing: LeaseComputing = field(init=False)

    def __post_init__(self) -> None:
        self.computing = LeaseComputing(self.granted_s or 0.0)
        self.is_divided = len(self.requests) > 1
        names = self.requests if self.is_divided else (_SOLE,)
        self.claims = {name: SessionClaim() for name in names}

    def claim_of(self, request: RequestId | None) -> SessionClaim | None:
        """The claim of this request; where the lease is not divided, the only one there is."""
        return self.claims.get(request or _SOLE) if self.is_divided else self.claims[_SOLE]

    def claims_of(self, session: SessionKey) -> dict[RequestId, SessionClaim]:
        return {name: claim for name, claim in self.claims.items() if claim.holder == session}

    def drop(self, request: RequestId) -> bool:
        """A request of several has given it back; return whether others have it still."""
        self.claims.pop(request, None)
        self.requests = tuple(other for other in self.requests if other != request)
        return bool(self.claims)

    @property
    def holders(self) -> set[SessionKey]:
        return {claim.holder for claim in self.claims.values() if claim.holder is not None}

    def is_for(self, session: SessionKey, function: str) -> bool:
        """Whether this session of this function may use it, and give it back."""
        if session in self.holders:
            return True
        mine = self.function != "" and self.function == function and not self.is_divided
        return mine and (not self.holders or self.is_shared)

    def is_free_for(self, session: SessionKey, request: RequestId) -> bool:
        """Whether a session that shows the token of this request may claim it."""
        claim = self.claim_of(request)
        return self.stands or (claim is not None and claim.holder in (None, session))

    @property
    def is_unclaimed(self) -> bool:
        """Whether a function's caller has all of it, and no session has asked for it yet."""
        if not self.function or self.is_divided or self.ending is not None:
            return False
        claim = self.claims[_SOLE]
        return claim.holder is None and not claim.awaited

    @property
    def is_taken_over(self) -> bool:
        """Whether a session has it whose calls its caller knows nothing of."""
        if not self.function or self.is_divided:
            return False
        claim = self.claims[_SOLE]
        return claim.holder is not None and not claim.given

    @property
    def is_shared(self) -> bool:
        """Whether all sessions of its function may call under it, one request after the other."""
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


def terms_of(lease: LeaseInForce, spec: GpuSpec) -> LeaseTerms:
    batch, vcpus = 0, 0
    if lease.configuration is not None:
        batch, vcpus = lease.configuration.batch, lease.configuration.vcpus
    numbers = {slot.id: number for number, slot in enumerate(spec.slot_specs())}
    if len(numbers) == 1:
        return LeaseTerms((), 1, batch, vcpus)
    slots = (lease.slot, *lease.more_slots)
    positions = sorted(numbers[slot] for slot in slots if slot in numbers)
    return LeaseTerms(tuple(positions), len(numbers), batch, vcpus)


# How long a lease of a function waits for its session while others wait. Pure.
#
# A function that has no thread for its calls claims none of the leases that are granted for them.
# If each of these waited for its whole time, the calls that have the threads, and wait for leases
# themselves behind them, would not end in time either. So each lease in vain halves the time of
# the function's next ones, and each that is claimed doubles it again.

MOST_HALVINGS = 4
_MOST_FUNCTIONS = _MOST_ENDED = 1_024


class ClaimPatience:
    """The functions whose last leases nobody claimed."""

    __slots__ = ("_ended", "_halvings")

    def __init__(self) -> None:
        self._halvings: OrderedDict[str, int] = OrderedDict()
        # Leases that ended so, and until when the usual time would have lasted.
        self._ended: OrderedDict[LeaseId, tuple[str, float]] = OrderedDict()

    def of(self, function: str, usual_s: float) -> float:
        """The time that the function's sessions have; `usual_s` for most."""
        return usual_s / (1 << self._halvings.get(function, 0))

    def in_vain(self, function: str, lease: LeaseId, now_s: float, usual_s: float) -> None:
        """Nobody has claimed this lease in time."""
        self._ended[lease] = function, now_s + usual_s - self.of(function, usual_s)
        if len(self._ended) > _MOST_ENDED:
            self._ended.popitem(last=False)
        halvings = self._halvings.pop(function, 0)
        self._halvings[function] = min(halvings + 1, MOST_HALVINGS)
        if len(self._halvings) > _MOST_FUNCTIONS:
            self._halvings.popitem(last=False)

    def claimed(self, function: str, times: int = 1) -> None:
        halvings = self._halvings.get(function, 0) - times
        if halvings > 0:
            self._halvings[function] = halvings
        else:
            self._halvings.pop(function, None)

    def asked_for(self, lease: LeaseId, now_s: float) -> None:
        """A session shows the token of a lease that is over: did it only lack the usual time?

        Then the lease ended too early, and the next one shall have more time than this one had.
        """
        ended = self._ended.pop(lease, None)
        if ended is not None and now_s <= ended[1]:
            self.claimed(ended[0], times=2)


@dataclass(slots=True)
class LeasesInForce:
    """Every lease from its grant to its end."""

    times: LeaseTimes
    contended: bool = False
    latest: LeaseId = _NO_LEASE
    patience: ClaimPatience = field(default_factory=ClaimPatience)
    _held: dict[LeaseId, LeaseInForce] = field(default_factory=dict)

    def __iter__(self) -> Iterator[LeaseInForce]:
        return iter(list(self._held.values()))

    def __len__(self) -> int:
        return len(self._held)

    def get(self, lease: LeaseId) -> LeaseInForce | None:
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

    def note_unclaimed(self, held: LeaseInForce, now_s: float) -> None:
        if self.contended and held.function:
            self.patience.in_vain(held.function, held.id, now_s, self.times.claim_s)

    def is_over(self, lease: LeaseId) -> bool:
        return lease not in self._held and lease <= self.latest

    def claim(
        self,
        held: LeaseInForce,
        holder: SessionKey,
        now_s: float,
        request: RequestId | None = None,
        *,
        given: bool = False,
    ) -> None:
        """Set the session that has the lease, or this request's part of it, and may call."""
        claim = held.claim_of(request)
        assert claim is not None, "this request has no part of the lease"
        claim.holder, claim.given = holder, given
        if given:
            self.patience.claimed(held.function)
        claim.claimed_s = claim.used_s = claim.checked_s = now_s

    def record_use(self, held: LeaseInForce, now_s: float, run_s: float, session: str = "") -> None:
        """Record that calls under the lease have ended; of a divided one, calls of this session."""
        for claim in held.claims.values():
            if not held.is_divided or claim.holder == session:
                claim.note_use(now_s, run_s)

    def grace_s(self, held: LeaseInForce, reason: EndReason) -> float:
        """Return the seconds that a call in flight has at the end of a lease.

        The caller of a lease that was taken over gives it back while another call computes.
        """
        given_back = reason in (EndReason.ORDERED, EndReason.RELEASED)
        if given_back and held.is_taken_over:
            return self.times.call_s
        return self.times.grace(reason)

    def forget(self, lease: LeaseId) -> None:
        del self._held[lease]

    def held_by(self, holder: SessionKey) -> list[LeaseInForce]:
        return [held for held in self._held.values() if holder in held.holders]

    def using(self, gpu: GpuId, model: ModelId) -> list[LeaseInForce]:
        in_force = self._held.values()
        return [held for held in in_force if held.gpu == gpu and model in held.models]

    def on(self, gpu: GpuId) -> int:
        return sum(held.gpu == gpu for held in self._held.values())

    def due(self, now_s: float) -> list[tuple[LeaseInForce, EndReason]]:
        """Return the leases that should end now, with reasons; QUIET ones need a check first."""
        ends = [(held, *self._end_of(held)) for held in self._with_due_time()]
        return [(held, reason) for held, at_s, reason in ends if at_s <= now_s]

    def is_due(self, held: LeaseInForce, now_s: float) -> EndReason | None:
        at_s, reason = self._end_of(held)
        return reason if at_s <= now_s else None

    def next_due_s(self) -> float | None:
        return min((self._end_of(held)[0] for held in self._with_due_time()), default=None)

    def _with_due_time(self) -> list[LeaseInForce]:
        leases = [held for held in self._held.values() if held.ending is None and not held.checking]
        return [
            held for held in leases if held.claims and (held.holders or held.granted_s is not None)
        ]

    def _end_of(self, held: LeaseInForce) -> tuple[float, EndReason]:
        return max(self._end_of_claim(held, claim) for claim in held.claims.values())

    def _end_of_claim(self, held: LeaseInForce, claim: SessionClaim) -> tuple[float, EndReason]:
        times = self.times
        if claim.holder is None and held.granted_s is not None:
            return self._end_of_unclaimed(held, claim, held.granted_s), EndReason.UNCLAIMED
        ends = [
            (claim.used_s + times.linger_s, EndReason.IDLE),
            (claim.claimed_s + times.expiry_s, EndReason.EXPIRED),
        ]
        if self.contended:
            at_s, reason = min(self._ends_for_others(claim))
            ends.append((max(at_s, held.stands_until_s), reason))
        return min(ends)

    def _end_of_unclaimed(self, held: LeaseInForce, claim: SessionClaim, granted_s: float) -> float:
        times = self.times
        idle_s = held.lacking_s if held.loaded_s is None else held.loaded_s
        if idle_s is None or claim.awaited or not (held.own or self.contended):
            return granted_s + times.unclaimed_s
        claim_s = self.patience.of(held.function, times.claim_s)
        wait_s = claim_s if self.contended else times.linger_s
        return min(max(idle_s, granted_s) + wait_s, granted_s + times.unclaimed_s)

    def _ends_for_others(self, claim: SessionClaim) -> list[tuple[float, EndReason]]:
        """When a claim ends because other requests wait."""
        times = self.times
        if claim.runs:
            quiet_s = times.quiet_s + _CALLS_OF_QUIET * claim.run_s
            return [
                (claim.claimed_s + times.quantum_s, EndReason.CONTENDED),
                (claim.used_s + quiet_s, EndReason.QUIET),
            ]
        quiet_s = max(times.quiet_s, claim.checked_s - claim.claimed_s)
        return [
            (claim.claimed_s + times.first_call_s, EndReason.CONTENDED),
            (claim.checked_s + min(quiet_s, times.quantum_s), EndReason.QUIET),
        ]
