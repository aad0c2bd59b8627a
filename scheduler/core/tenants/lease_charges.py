"""What leases in force were charged to their owners, until what they used is known."""

from collections.abc import Sequence

from scheduler.core.state.cluster_state import ClusterState
from scheduler.core.state.slots import ActiveLease, Slot
from scheduler.core.tenants.owner_table import OwnerTable, both
from scheduler.core.tenants.owners import FunctionOwner
from scheduler.core.tenants.turn_order import TurnOrder
from scheduler.model.values import LeaseId


class LeaseCharge:
    """One lease: each of its requests' `owners` was charged `charge_s` seconds of GPU time.

    Each has a `share` of the lease's slots since `since_s`, and until `due_s` by estimate; not yet
    if it is only loading, beside the runs of others. While it is kept and no call runs (`rests_s`:
    since then; else one runs since `woke_s`), its time counts for no quota, but for what others
    wait, from `contended_s` of its slot's contention on; and for the calls that are reported when
    they have ended, `called_s` of them. Before that it was kept for `kept_s`, of which `others_s`
    were counted.
    """

    __slots__ = (
        "called_s",
        "charge_s",
        "contended_s",
        "due_s",
        "kept_s",
        "others_s",
        "owners",
        "rests_s",
        "runs",
        "share",
        "since_s",
        "slot",
        "woke_s",
    )

    def __init__(
        self, owners: Sequence[FunctionOwner], slot: Slot, share: float, since_s: float
    ) -> None:
        self.owners = owners
        self.slot = slot
        self.share = share
        self.since_s = since_s
        self.due_s = self.woke_s = since_s
        self.charge_s = 0.0
        self.runs = False
        self.rests_s: float | None = None
        self.contended_s = self.called_s = self.kept_s = self.others_s = 0.0

    def used_s(self, now: float) -> float:
        """What each request has used until now."""
        return max(0.0, now - self.since_s) * self.share if self.runs else 0.0

    def distinct(self) -> Sequence[FunctionOwner]:
        """Its functions, each once."""
        return self.owners if len(self.owners) == 1 else list(dict.fromkeys(self.owners))

    def begin(self, contended_s: float, since_s: float) -> None:
        """It has its slots from now on."""
        self.contended_s = contended_s
        self.runs, self.rests_s = True, None
        self.since_s = self.due_s = self.woke_s = since_s
        self._run(+1, since_s, since_s)

    def end(self, now: float) -> None:
        """It has them no more."""
        if self.runs and self.rests_s is None:
            self._run(-1, self.due_s, now)

    def rest(self, since_s: float, contended_s: float, now: float) -> None:
        """No call has run under it since then."""
        if self.runs and self.rests_s is None:
            kept_s = max(0.0, now - max(since_s, self.woke_s))
            self.correct(min(kept_s, contended_s - self.contended_s) - kept_s, now)
            self._run(-1, self.due_s, now)
            self.rests_s, self.contended_s = now, contended_s
            self.called_s = self.kept_s = self.others_s = 0.0

    def wake(self, contended_s: float, now: float) -> None:
        """A call runs under it again, or it ends: count for what others have waited meanwhile."""
        if self.rests_s is not None:
            self._count_rest(self.rests_s, contended_s, now)
            self.rests_s, self.due_s, self.woke_s = None, now, now
            self._run(+1, now, now)

    def called(self, began_s: float, ended_s: float, now: float) -> None:
        """A call has run under it then, while it seemed to rest."""
        if self.rests_s is not None:
            called_s = max(0.0, ended_s - max(began_s, self.rests_s))
            self.called_s += called_s
            self.correct(called_s, now)

    def computed(self, computed_s: float, contended_s: float, now: float) -> None:
        """Calls have run under it for so long since it was last said, while it seemed to rest."""
        if self.rests_s is not None:
            self.called_s += computed_s
            self.correct(computed_s, now)
            self._count_rest(self.rests_s, contended_s, now)

    def _count_rest(self, since_s: float, contended_s: float, now: float) -> None:
        """Count for what others have waited since then, and for no more than it has rested."""
        kept_s = now - since_s - self.called_s
        waited_s = min(kept_s, contended_s - self.contended_s)
        self.kept_s += kept_s
        before_s = self.others_s
        self.others_s = max(0.0, min(before_s + max(0.0, waited_s), self.kept_s))
        self.correct(self.others_s - before_s, now)
        self.rests_s, self.contended_s, self.called_s = now, contended_s, 0.0

    def correct(self, used_s: float, now: float) -> None:
        """Its calls have used its slots for so much more than was counted, or less."""
        for function in self.owners:
            for owner in both(function):
                owner.correct(self.share * used_s, now)

    def _run(self, sign: int, due_s: float, now: float) -> None:
        for function in self.owners:
            for owner in both(function):
                owner.due_sum_s += sign * self.share * due_s
                owner.run(sign * self.share, now)

    def expect(self, due_s: float) -> None:
        """Its slots should be free then."""
        if self.runs and self.rests_s is None:
            later_s, self.due_s = self.share * (due_s - self.due_s), due_s
            for function in self.owners:
                for owner in both(function):
                    owner.due_sum_s += later_s


class LeaseCharges:
    """All leases in force whose functions are known.

    One that functions share is charged to each in equal parts, and counts as a lease of each.
    """

    def __init__(self, owners: OwnerTable, order: TurnOrder, cluster: ClusterState) -> None:
        self._charges: dict[LeaseId, LeaseCharge] = {}
        self._cluster = cluster
        self._owners = owners
        self._order = order

    def of(self, lease: LeaseId) -> LeaseCharge | None:
        """What a lease is charged, if its functions are known."""
        return self._charges.get(lease)

    def owners_of(self, lease: LeaseId) -> Sequence[FunctionOwner]:
        """The functions that a lease counts for."""
        charge = self._charges.get(lease)
        return () if charge is None else charge.distinct()

    def granted(
        self, lease: ActiveLease, owners: list[FunctionOwner], expected_s: float, now: float
    ) -> None:
        """Requests of these owners have a lease, perhaps beside others that had it already."""
        known = self._charges.get(lease.id)
        if known is not None:
            owners = [*known.owners, *owners]
            self.ended(lease.id, now)
        share = (1 + len(lease.more)) / len(owners)
        charge = self._charges[lease.id] = LeaseCharge(owners, lease.slot, share, now)
        for owner in charge.distinct():
            self._owners.count(owner, 0, 1)
        if not lease.beside:
            charge.begin(self._cluster.contended_s(charge.slot, now), now)
            charge.expect(now + expected_s)
        self._recharge(charge, expected_s * share)

    def used(self, lease: ActiveLease, owner: FunctionOwner, expected_s: float, now: float) -> None:
        """A call runs under a lease that its caller keeps: charge what was used, and this call."""
        charge = self._charges.get(lease.id)
        if charge is None:
            self.granted(lease, [owner], expected_s, now)
            return
        charge.wake(self._cluster.contended_s(charge.slot, now), now)
        self._recharge(charge, charge.used_s(now) + expected_s * charge.share)
        charge.expect(now + expected_s)
        for each in charge.distinct():
            self._order.paused.may_have_room(each)

    def rests(self, lease: ActiveLease, since_s: float, now: float) -> None:
        """No call has run since then under a lease that is kept."""
        charge = self._charges.get(lease.id)
        if charge is not None:
            charge.rest(since_s, self._cluster.contended_s(charge.slot, now), now)
            for each in charge.distinct():
                self._order.paused.may_have_room(each)

    def called(self, lease: ActiveLease, began_s: float, ended_s: float, now: float) -> None:
        """A call has run then under a lease that its caller keeps, and no other one."""
        charge = self._charges.get(lease.id)
        if charge is not None:
            charge.called(began_s, ended_s, now)

    def computed(self, lease: ActiveLease, computed_s: float, now: float) -> None:
        """Calls have run for so long, since it was last said, under a lease that is kept."""
        charge = self._charges.get(lease.id)
        if charge is not None:
            charge.computed(computed_s, self._cluster.contended_s(charge.slot, now), now)

    def computes(self, lease: ActiveLease, now: float) -> None:
        """A lease has its slot from now on."""
        charge = self._charges.get(lease.id)
        if charge is not None:
            charge.begin(self._cluster.contended_s(charge.slot, now), now)
            charge.expect(lease.due_s)

    def stands_aside(self, lease: ActiveLease, now: float) -> None:
        """A lease has its slot no more, until what it loads is there."""
        charge = self._charges.get(lease.id)
        if charge is not None:
            charge.wake(self._cluster.contended_s(charge.slot, now), now)
            charge.end(now)
            charge.runs = False
            for owner in charge.distinct():
                self._order.paused.may_have_room(owner)

    def ended(self, lease: LeaseId, now: float) -> None:
        """A lease is over: its owners are charged for what it has used."""
        charge = self._charges.pop(lease, None)
        if charge is None:
            return
        self._recharge(charge, charge.used_s(now))
        for owner in charge.distinct():
            self._owners.count(owner, 0, -1)
        charge.wake(self._cluster.contended_s(charge.slot, now), now)
        charge.end(now)
        for owner in charge.distinct():
            self._order.list(owner)
            self._order.paused.may_have_room(owner)

    def clear(self) -> None:
        """Follow no lease any more."""
        self._charges.clear()

    def _recharge(self, charge: LeaseCharge, seconds: float) -> None:
        change_s, charge.charge_s = seconds - charge.charge_s, seconds
        for owner in charge.owners:
            self._order.charge(owner, change_s)
