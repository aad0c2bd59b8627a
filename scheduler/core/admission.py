"""Which new requests are not accepted, because too many wait or a quota is used up."""

from scheduler.core.leases.adopted_leases import AdoptedLeases
from scheduler.core.placer import Placer
from scheduler.core.state.pending import Pending
from scheduler.core.tenants.quotas import QuotaRefusal


class Admission:
    """Knows how many wait, and for how long; a request with a lease of before is always let in."""

    def __init__(self, placer: Placer, adopted: AdoptedLeases, max_waiting: int | None) -> None:
        self._placer = placer
        self._adopted = adopted
        self._max_waiting = max_waiting

    def full(self, pending: Pending, now: float) -> str:
        """Why the queue takes no such request now; empty if it does.

        The wait of a request that names no longest wait is not bounded. Where namespaces take
        turns, a request waits for those of its own, and one namespace does not fill the queue.
        """
        placer, limit, request = self._placer, self._max_waiting, pending.request
        tenancy = placer.tenancy
        pauses = tenancy.on and tenancy.order.is_to_pause(pending, now)
        if limit is not None:
            if (tenancy.order.paused.count if pauses else placer.contending) >= limit:
                return f"{limit} requests wait already"
            if tenancy.takes_turns and not tenancy.owners.may_wait(
                request.function, limit, paused=pauses
            ):
                return f"{placer.queued} requests wait, and of its namespace more than its part"
        if pauses or request.max_wait_s is None or self._adopted.is_promised(pending):
            return ""
        most_s, wait_s = request.max_wait_s, placer.expected_wait_s(request.function)
        if request.deadline_s is not None:
            most_s = min(most_s, max(0.0, request.deadline_s - now))
        if wait_s <= most_s:
            return ""
        return f"{placer.queued} requests wait, and its turn comes in {wait_s:.1f} s"

    def over_quota(self, pending: Pending) -> QuotaRefusal | None:
        """Which quota a new request exceeds."""
        tenancy = self._placer.tenancy
        if not tenancy.on or self._adopted.is_promised(pending):
            return None
        return tenancy.refusal(pending.request, pending.bundle)
