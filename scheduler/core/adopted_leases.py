"""Leases that an earlier leader gave, and the requests that hold them."""

from scheduler.cluster.request_queue import Pending, Standing
from scheduler.cluster.slots import ActiveLease, Slot
from scheduler.cluster.state import ClusterState
from scheduler.core.placer import Placer
from scheduler.model.actions import Action, Dispatch
from scheduler.model.events import LiveLease
from scheduler.model.values import Estimate, LeaseId


class AdoptedLeases:
    """Takes over leases that nodes report, and gives them to their requests again."""

    def __init__(self, cluster: ClusterState, placer: Placer) -> None:
        self._cluster = cluster
        self._placer = placer

    def adopt(self, found: LiveLease, slot: Slot, now: float) -> None:
        """Take over a lease that a manager reports and that this core did not grant."""
        placer, lease_id, models = self._placer, found.lease, found.models
        lease = ActiveLease(lease_id, slot, models)
        lease.is_shared, lease.own = len(found.requests) > 1, found.own
        placer.leases[lease_id] = lease
        more = tuple([self._cluster.slots[other] for other in found.more_slots])
        lease.configure(found.configuration, more)
        self._cluster.adopt(lease, now)
        placer.last_lease = max(placer.last_lease, lease_id)
        for model in models:
            self._cluster.index.use(slot.gpu.cache, model, +1)
        if placer.meter is not None:
            placer.meter.began(lease, now)
        placer.rest_if_own(lease, now)

    def promised(self, pending: Pending) -> ActiveLease | None:
        """The lease that an earlier leader gave this request, if it is still in force."""
        return self._in_force(self._placer.handover.take(pending.id), pending)

    def is_promised(self, pending: Pending) -> bool:
        return self._in_force(self._placer.handover.promised(pending.id), pending) is not None

    def _in_force(self, promised: LeaseId | None, pending: Pending) -> ActiveLease | None:
        lease = None if promised is None else self._placer.leases.get(promised)
        if lease is None or lease.released or lease.models != pending.bundle.models:
            return None
        return lease

    def rejoin(self, pending: Pending, lease: ActiveLease, now: float, out: list[Action]) -> None:
        """Give a request that is in no queue its lease again."""
        placer, slot = self._placer, lease.slot
        pending.standing = Standing.LEASED
        pending.at = slot.id
        pending.lease = lease.id
        lease.requests.append(pending)
        if placer.meter is not None:
            placer.meter.named(lease, now)
        if placer.tenancy.on:
            placer.tenancy.granted(lease, (pending,), max(0.0, lease.due_s - now))
        placer.rest_if_own(lease, now)
        lease.dispatch = Dispatch(
            lease=lease.id,
            slot=slot.id,
            gpu=slot.gpu.spec.id,
            node=slot.gpu.spec.node,
            requests=tuple(member.id for member in lease.requests),
            hit=True,
            held_elsewhere=False,
            estimate=Estimate(0.0, 0.0),
            rule="it was given this lease before",
            models=lease.models,
            function=pending.request.function if lease.is_shared else "",
            more_slots=lease.more_ids,
            configuration=lease.configuration,
            own=lease.own,
        )
        out.append(lease.dispatch)
