"""Takes in what is reported of the calls that ran under leases that are kept between them."""

from operator import attrgetter

from scheduler.core.lifecycle import Lifecycle
from scheduler.core.placer import Placer
from scheduler.core.state import occupation
from scheduler.core.state.cluster_state import ClusterState
from scheduler.core.state.slots import ActiveLease
from scheduler.estimates import estimate
from scheduler.model.actions import Action, Dispatch, Finish, Taken
from scheduler.model.errors import BadEvent
from scheduler.model.events import LeaseComputed, LeaseUsed
from scheduler.model.values import Estimate, LeaseUse, Request, RequestOutcome

_BEGAN_S = attrgetter("began_s")


class LeaseUses:
    """Counts reported calls as uses of models and slots, and follows those that still run."""

    def __init__(self, cluster: ClusterState, placer: Placer, lifecycle: Lifecycle) -> None:
        self._cluster = cluster
        self._placer = placer
        self._lifecycle = lifecycle

    def used(self, event: LeaseUsed, now: float, out: list[Action]) -> None:
        """Take one report in: first the ends of earlier calls, then the new calls."""
        lease = self._placer.leases.get(event.lease)
        for end in event.ends:
            self._lifecycle.call_ended(end.request, event.lease, min(end.ended_s, now), out)
        if event.uses:
            self._count(event, lease, now, out)
        if lease is None:
            return
        ended_s = [end.ended_s for end in event.ends]
        ended_s += [use.ended_s for use in event.uses if use.ended_s is not None]
        latest_s = min(max(ended_s, default=lease.called_until_s), now)
        lease.called_until_s = max(lease.called_until_s, latest_s)
        if not lease.requests:
            self._placer.kept(lease, latest_s if ended_s else now, now)

    def computed(self, event: LeaseComputed, now: float, out: list[Action]) -> None:
        """Take a node's report of a function's own process in."""
        del out
        lease = self._placer.leases.get(event.lease)
        if lease is not None and lease.own:
            self._placer.computed(lease, event.computed_s, now)

    def _count(
        self, event: LeaseUsed, lease: ActiveLease | None, now: float, out: list[Action]
    ) -> None:
        dispatch = self._dispatch(event, lease)
        self._placer.count_placed(event.function, len(event.uses), now)
        for use in sorted(event.uses, key=_BEGAN_S):
            if use.request in self._lifecycle.requests:
                continue  # another call has this id, and has not ended
            request = _request(event, use, dispatch, now)
            began_s = min(use.began_s, now)
            taken = dispatch._replace(requests=(use.request,))
            out.append(Taken(request, began_s, taken, use.parent))
            paused = self._placer.tenancy.order.paused.count
            number = self._cluster.accept(request.models, now) - paused
            if lease is not None:
                self._placer.called(lease, use, now)
            if lease is None or use.ended_s is not None:  # without a lease: its node has ended it
                ended_s = now if use.ended_s is None else min(use.ended_s, now)
                out.append(Finish(use.request, RequestOutcome.COMPLETED, "", ended_s))
            else:
                self._lifecycle.call_runs(request, number, lease)
                occupation.runs_until(self._cluster, lease, began_s + dispatch.estimate.run_s, now)
        tenancy = self._placer.tenancy
        if tenancy.on and lease is not None:
            tenancy.named(lease, event.function, dispatch.estimate.run_s)
            if tenancy.yields(lease.id):
                self._placer.standing.given_back(lease.id, tell=True)

    def _dispatch(self, event: LeaseUsed, lease: ActiveLease | None) -> Dispatch:
        """What each of these calls would have been dispatched by, had it asked."""
        dispatch = self._placer.standing.dispatch_of(event.lease, lease)
        if dispatch is None:
            raise BadEvent("lease", event.lease)
        if lease is None:
            return dispatch
        profiles, gpu_type = self._cluster.profiles, lease.slot.gpu.spec.gpu_type
        beside = lease.slot.neighbours(lease)
        run_s = estimate.run_s(profiles, lease.models, event.batch, gpu_type, beside)
        return dispatch._replace(estimate=Estimate(0.0, run_s))


def _request(event: LeaseUsed, use: LeaseUse, dispatch: Dispatch, now: float) -> Request:
    return Request(
        use.request,
        event.function,
        dispatch.models,
        event.batch,
        arrived_s=max(0.0, min(use.arrived_s, use.began_s, now)),
    )
