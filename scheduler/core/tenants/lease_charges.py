"""What leases in force were charged to their owners, until what they used is known."""

from collections.abc import Sequence

from scheduler.core.state.slots import ActiveLease
from scheduler.core.tenants.owner_table import OwnerTable, both
from scheduler.core.tenants.owners import FunctionOwner
from scheduler.core.tenants.turn_order import TurnOrder
from scheduler.model.values import LeaseId


class LeaseCharge:
    """One lease: each of its requests' `owners` was charged `charge_s` seconds of GPU time.

    Each has a `share` of the lease's slots since `since_s`, and until `due_s` by estimate; not yet
    if it is only loading, beside the runs of others.
    """

    __slots__ = ("charge_s", "due_s", "owners", "runs", "share", "since_s")

    def __init__(self, owners: Sequence[FunctionOwner], share: float, since_s: float) -> None:
        self.owners = owners
        self.share = share
        self.since_s = since_s
        self.due_s = since_s
        self.charge_s = 0.0
        self.runs = False

    def used_s(self, now: float) -> float:
        """What each request has used until now."""
        return max(0.0, now - self.since_s) * self.share if self.runs else 0.0

    def distinct(self) -> Sequence[FunctionOwner]:
        """Its functions, each once."""
        return self.owners if len(self.owners) == 1 else list(dict.fromkeys(self.owners))

    def begin(self, since_s: float) -> None:
        """It has its slots from now on."""
        self.runs, self.since_s, self.due_s = True, since_s, since_s
        for function in self.owners:
            for owner in both(function):
                owner.due_sum_s += self.share * since_s
                owner.run(self.share, since_s)

    def end(self, now: float) -> None:
        """It has them no more."""
        if self.runs:
            for function in self.owners:
                for owner in both(function):
                    owner.due_sum_s -= self.share * self.due_s
                    owner.run(-self.share, now)

    def expect(self, due_s: float) -> None:
        """Its slots should be free then."""
        if self.runs:
            later_s, self.due_s = self.share * (due_s - self.due_s), due_s
            for function in self.owners:
                for owner in both(function):
                    owner.due_sum_s += later_s


class LeaseCharges:
    """All leases in force whose functions are known.

    One that functions share is charged to each in equal parts, and counts as a lease of each.
    """

    def __init__(self, owners: OwnerTable, order: TurnOrder) -> None:
        self._charges: dict[LeaseId, LeaseCharge] = {}
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
        charge = self._charges[lease.id] = LeaseCharge(owners, share, now)
        for owner in charge.distinct():
            self._owners.count(owner, 0, 1)
        if not lease.beside:
            charge.begin(now)
            charge.expect(now + expected_s)
        self._recharge(charge, expected_s * share)

    def used(self, lease: ActiveLease, owner: FunctionOwner, expected_s: float, now: float) -> None:
        """A call runs under a lease that its caller keeps: charge what was used, and this call."""
        charge = self._charges.get(lease.id)
        if charge is None:
            self.granted(lease, [owner], expected_s, now)
            return
        self._recharge(charge, charge.used_s(now) + expected_s * charge.share)
        charge.expect(now + expected_s)
        for each in charge.distinct():
            self._order.paused.may_have_room(each)

    def computes(self, lease: ActiveLease, now: float) -> None:
        """A lease has its slot from now on."""
        charge = self._charges.get(lease.id)
        if charge is not None:
            charge.begin(now)
            charge.expect(lease.due_s)

    def stands_aside(self, lease: ActiveLease, now: float) -> None:
        """A lease has its slot no more, until what it loads is there."""
        charge = self._charges.get(lease.id)
        if charge is not None:
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
