"""One lease on a node: who has it, and when it should end by itself.

This module is pure: times are passed in. A lease that a session acquired itself stays in force
between calls, so that a loop of calls acquires once; it ends after a long idle time, or soon if
other requests wait.
"""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

from msgspec.structs import replace

from common.latest import Latest
from gpu_manager.worker.orders import LeaseTerms
from scheduler.api import GpuId, GpuSpec, LeaseId, LiveLease, ModelId, RequestId

SessionKey = NewType("SessionKey", str)

_CALLS_OF_QUIET = 1.5
# The last call under a lease that stands may begin at the end of its time, and use the GPU later.
_LAST_CALL_S = 0.25
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


_GIVEN_BACK = (EndReason.ORDERED, EndReason.RELEASED)
# Other reasons for which no client waits for a call in flight any more.
_UNWANTED = (EndReason.UNFIT, EndReason.GPU_LOST, EndReason.STOPPING)


@dataclass(frozen=True, slots=True)
class LeaseTimes:
    """How long leases stay in force, and how long their last call may take."""

    linger_s: float = 5.0  # idle; unclaimed, too, where it is `own` and nobody waits
    expiry_s: float = 300.0  # in any case
    quantum_s: float = 0.1  # in use, if other requests wait
    quiet_s: float = 0.005  # idle then, beside 1.5 times the duration of its calls
    first_call_s: float = 2.0  # till the first call then: two slow sessions would rob each other
    grace_s: float = 2.0  # for a call in flight, if the lease was released
    orphan_s: float = 1.5  # if its session has ended
    call_s: float = 120.0  # else
    unclaimed_s: float = 120.0  # till a session claims it: its caller may have died
    # If other requests wait and no session has asked for it: since its models are loaded, or since
    # weights lack that nobody sends; less where the function claimed none of its last ones. A
    # function that comes later asks for another lease.
    claim_s: float = 1.0
    pass_on_s: float = 0.03  # till a session of its function that waits for a lease takes it over


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

    def end_for_others(self, times: LeaseTimes) -> tuple[float, EndReason]:
        """When it ends because other requests wait."""
        if self.runs:
            latest_s = self.claimed_s + times.quantum_s
            quiet_s = self.used_s + times.quiet_s + _CALLS_OF_QUIET * self.run_s
        else:
            latest_s = self.claimed_s + times.first_call_s
            longer_s = max(times.quiet_s, self.checked_s - self.claimed_s)
            quiet_s = self.checked_s + min(longer_s, times.quantum_s)
        return min((latest_s, EndReason.CONTENDED), (quiet_s, EndReason.QUIET))


class Lease:
    """One lease, from its grant until its slot is reported as free; `LeasesInForce` changes it."""

    def __init__(
        self,
        live: LiveLease,
        gpu: GpuId,
        granted_s: float = math.inf,
        function: str = "",
        stands_s: float = 0.0,
    ) -> None:
        """Without the time of its grant it is a prefetch's, which no session claims.

        If a caller of this `function` has it, its sessions need not ask for it: the one whose call
        comes first has it, or all of them, one request after the other, if it stands. One that
        `stands` its caller has for several requests in this time: the scheduler recalls it, and no
        others' need ends it here.
        """
        self.live = live  # as it was granted; requests may have given their parts back since
        self.id, self.models = live.lease, live.models
        self.gpu, self.granted_s, self.function = gpu, granted_s, function
        self.stands_till_s = granted_s + stands_s + _LAST_CALL_S if stands_s > 0 else 0.0
        self.is_shared = self.stands_till_s > 0 and function != ""
        self.loaded_s: float | None = None  # since when its models are loaded
        self.lacking_s: float | None = None  # since when weights lack that nobody sends
        self.admitted = False  # its models let calls in
        self.checking = False  # its models are asked whether calls are pending
        self.ending: EndReason | None = None
        self.deadline_s = 0.0  # for calls in flight, once the lease is ending
        self._computed_s = 0.0  # what has been counted of its computing
        # When each of its models told of its computing last, and what had been counted then.
        self._told: dict[ModelId, tuple[float, float]] = {}
        # Several requests share it from its grant on: each has a claim of its own, which a session
        # makes by naming the request.
        self.is_divided = len(live.requests) > 1
        names = live.requests if self.is_divided else (_SOLE,)
        self.claims = {name: SessionClaim() for name in names}

    def report(self) -> LiveLease:
        """Return what the scheduler is told of it: the requests that have not given it back."""
        return replace(self.live, requests=tuple(self.claims)) if self.is_divided else self.live

    def claim_of(self, request: RequestId | None) -> SessionClaim | None:
        """The claim of this request; where the lease is not divided, the only one there is."""
        return self.claims.get(request or _SOLE if self.is_divided else _SOLE)

    def claims_of(
        self, session: SessionKey, request: str | None = None
    ) -> dict[RequestId, SessionClaim]:
        """The session's claims; of a divided lease that of this request, if one is named."""
        mine = {name: claim for name, claim in self.claims.items() if claim.holder == session}
        return {name: mine[name] for name in mine if request is None or name in (request, _SOLE)}

    @property
    def holders(self) -> set[SessionKey]:
        return {claim.holder for claim in self.claims.values() if claim.holder is not None}

    def is_of(self, session: str) -> bool:
        """Whether a caller of the session's function has all of it."""
        mine = self.function != "" and session.startswith(f"{self.function}/")
        return mine and not self.is_divided

    def is_for(self, session: SessionKey) -> bool:
        """Whether this session may use it, and give it back."""
        mine = self.is_of(session) and (not self.holders or self.is_shared)
        return mine or session in self.holders

    def free_claim(self, session: SessionKey, request: RequestId | None) -> SessionClaim | None:
        """Return this request's part of it, if the session may claim that.

        One that stands is for one request after the other: who presents it last has it.
        """
        claim = self.claim_of(request)
        if claim is None or self.ending is not None:
            return None
        return claim if self.stands_till_s > 0 or claim.holder in (None, session) else None

    def passes_on_s(self, times: LeaseTimes) -> float:
        """Return from when on another session of its function may take it over; inf: never.

        A function's caller has all of it, and no session has asked for it yet.
        """
        claim = self.claim_of(None) if self.function and self.ending is None else None
        if claim is None or claim.holder is not None or claim.awaited or self.loaded_s is None:
            return math.inf
        return self.loaded_s + times.pass_on_s

    def note_use(self, now_s: float, run_s: float, session: str = "") -> None:
        """Calls under it have ended, which took `run_s` each; of a divided one, of this session."""
        for claim in self.claims.values():
            if not self.is_divided or claim.holder == session:
                claim.used_s, claim.run_s = now_s, run_s
                claim.runs += 1

    def count_computing(self, model: ModelId, computed_s: float, now_s: float) -> float:
        """What counts of a model's report: time in which others computed as well counts once."""
        since_s, sum_s = self._told.get(model, (self.granted_s, 0.0))
        others_s = self._computed_s - sum_s
        if others_s > 0:
            computed_s = min(computed_s, max(0.0, now_s - since_s - others_s))
        self._computed_s += computed_s
        self._told[model] = now_s, self._computed_s
        return computed_s

    def grace_s(self, times: LeaseTimes, reason: EndReason) -> float:
        """Return the seconds that a call in flight has at its end before its worker is killed.

        The caller of a lease that was taken over gives it back while another call computes.
        """
        if reason is EndReason.SESSION_GONE:
            return times.orphan_s
        claim = self.claim_of(None) if self.function and reason in _GIVEN_BACK else None
        if claim is not None and claim.holder is not None and not claim.given:
            return times.call_s
        return times.grace_s if reason in (*_GIVEN_BACK, *_UNWANTED) else times.call_s

    def end_by_itself(
        self, times: LeaseTimes, claim_s: float, *, contended: bool
    ) -> tuple[float, EndReason]:
        """Return when and why it ends if nothing happens; inf: not by itself, or not now.

        Its function has `claim_s` to claim it where others wait. QUIET ones need a check first.
        """
        if self.ending is not None or self.checking:
            return math.inf, EndReason.QUIET
        if not contended:
            claim_s = times.linger_s if self.live.own else times.unclaimed_s
        claims = self.claims.values()
        return max(self._end_of(claim, times, claim_s, contended=contended) for claim in claims)

    def _end_of(
        self, claim: SessionClaim, times: LeaseTimes, claim_s: float, *, contended: bool
    ) -> tuple[float, EndReason]:
        if claim.holder is None:
            latest_s = self.granted_s + times.unclaimed_s
            idle_s = self.lacking_s if self.loaded_s is None else self.loaded_s
            if idle_s is not None and not claim.awaited:
                latest_s = min(max(idle_s, self.granted_s) + claim_s, latest_s)
            return latest_s, EndReason.UNCLAIMED
        ends = [
            (claim.used_s + times.linger_s, EndReason.IDLE),
            (claim.claimed_s + times.expiry_s, EndReason.EXPIRED),
        ]
        if contended:
            at_s, reason = claim.end_for_others(times)
            ends.append((max(at_s, self.stands_till_s), reason))
        return min(ends)

    def terms(self, spec: GpuSpec) -> LeaseTerms:
        """Return what its calls may use of its GPU and of the host."""
        live, there = self.live, [slot.id for slot in spec.slot_specs()]
        batch = 0 if live.configuration is None else live.configuration.batch
        vcpus = 0 if live.configuration is None else live.configuration.vcpus
        mine = (live.slot, *live.more_slots) if len(there) > 1 else ()
        slots = tuple(number for number, slot in enumerate(there) if slot in mine)
        return LeaseTerms(slots, len(there), batch, vcpus)


MOST_HALVINGS = 4
_MOST_FUNCTIONS = _MOST_ENDED = 1_024


class ClaimPatience:
    """How long the leases of each function wait for a session to claim them while others wait.

    A function without a thread for its calls claims none of their leases. If each lease waited for
    its whole time, the calls that have the threads, and wait for leases behind it, would be late
    as well. So each lease in vain halves the time of the function's next ones, and each that is
    claimed doubles it again.
    """

    def __init__(self, usual_s: float) -> None:
        self._usual_s = usual_s
        self._halvings = Latest[str, int](_MOST_FUNCTIONS)
        # Leases that ended so, and until when the usual time would have lasted.
        self._ended = Latest[LeaseId, tuple[str, float]](_MOST_ENDED)

    def of(self, function: str) -> float:
        """The time that the function's sessions have."""
        return self._usual_s / (1 << self._halvings.get(function, 0))

    def in_vain(self, function: str, lease: LeaseId, now_s: float) -> None:
        """Nobody has claimed this lease in time."""
        self._ended[lease] = function, now_s + self._usual_s - self.of(function)
        self._halvings[function] = min(self._halvings.get(function, 0) + 1, MOST_HALVINGS)

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
