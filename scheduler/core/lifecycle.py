"""A request's life: accepted, placed, paused, placed again, and ended exactly once."""

from operator import attrgetter

from msgspec.structs import replace

from cache_manager import exits
from cache_manager.model.ids import ModelId
from scheduler.cluster.request_queue import Pending, Standing
from scheduler.cluster.slots import ActiveLease, Slot
from scheduler.cluster.state import ClusterState
from scheduler.core.placer import Placer
from scheduler.estimates import estimate
from scheduler.features.tenants.owners import QuotaRefusal
from scheduler.model.actions import (
    Action,
    Dispatch,
    EndLease,
    Finish,
    Recall,
    Refuse,
    SetTimer,
    Taken,
)
from scheduler.model.errors import BadEvent
from scheduler.model.events import (
    DeadlinePassed,
    LeaseComputed,
    LeaseReleased,
    LeaseUsed,
    LeaseWanted,
    LiveLease,
    RecallPassed,
    RequestArrived,
    RequestCancelled,
    RunFailed,
    SlotFreed,
)
from scheduler.model.values import (
    AfterLoss,
    Estimate,
    LeaseId,
    LeaseUse,
    Request,
    RequestId,
    RequestOutcome,
)

# Requests that arrive in the same microsecond keep their order; no core sees more than this many.
_SEQ_STEP = 1 << 40
# The place of requests that return to the front: before all others, in the order of their return.
_FRONT = -(1 << 80)
_NO_LEASE = LeaseId(0)
_BEGAN_S = attrgetter("began_s")

# A caller gives a recalled lease back after its call in flight; it is asked again after this time.
_RECALL_S = 0.25

_IN_A_QUEUE = (Standing.HELD, Standing.WAITING, Standing.LOCAL)


class Lifecycle:
    """Keeps every accepted request until its one terminal state."""

    def __init__(self, cluster: ClusterState, placer: Placer, max_waiting: int | None) -> None:
        self.requests: dict[RequestId, Pending] = {}
        self._cluster = cluster
        self._placer = placer
        self._max_waiting = max_waiting
        self._early = EarlyReturns()
        self._arrivals = 0
        self._fronts = _FRONT

    # -- requests -------------------------------------------------------------------------------

    def request_arrived(self, event: RequestArrived, now: float, out: list[Action]) -> None:
        request = event.request
        if not request.models:
            raise BadEvent("model named by request", request.id)
        if request.exit_rule and not exits.is_rule(request.exit_rule):
            raise BadEvent("exit rule", request.exit_rule)
        accepted = self.requests.get(request.id)
        if accepted is not None:
            self._repeat(accepted, out)
            return
        stranger = self._stranger(request)
        if stranger is not None:
            reason = f"no node has registered the weights of {stranger}"
            out.append(Finish(request.id, RequestOutcome.FAILED, reason))
            return
        arrived_s = now if request.arrived_s is None else min(request.arrived_s, now)
        if not arrived_s >= 0.0:
            raise BadEvent("time of arrival", request.arrived_s)
        bundle = self._cluster.bundle(request.models)
        pending = Pending(request, bundle, self._seq(arrived_s), arrived_s)
        if self._cluster.too_large(bundle):
            self._refuse_too_large(pending, out)
        elif over := self._over_quota(pending):
            reason, again_s = over.reason, over.again_s
            out.append(Finish(request.id, RequestOutcome.OVER_QUOTA, reason, None, again_s))
        elif reason := self._full(pending, now):
            out.append(Finish(request.id, RequestOutcome.QUEUE_FULL, reason))
        elif request.deadline_s is not None and request.deadline_s <= now:
            out.append(Finish(request.id, RequestOutcome.EXPIRED, "its deadline had passed"))
        else:
            self._accept(pending, now, out)

    def _seq(self, arrived_s: float) -> int:
        self._arrivals += 1
        return int(arrived_s * 1e6) * _SEQ_STEP + self._arrivals

    def _accept(self, pending: Pending, now: float, out: list[Action]) -> None:
        request = pending.request
        if request.deadline_s is not None:
            out.append(SetTimer(request.deadline_s, DeadlinePassed(request.id, request.deadline_s)))
        if not self._placer.tenancy.takes_turns:  # else requests are ordered by their turns
            self._cluster.latest_seq = max(pending.seq, self._cluster.latest_seq)
        self.requests[request.id] = pending
        paused = self._placer.tenancy.order.paused.count  # they overtake nobody by being there
        pending.number = self._cluster.accept(pending.models, now) - paused
        self._placer.exits.asked_for(pending.models, request.exit_rule)
        lease = self._promised(pending)
        if lease is None:
            self._placer.wait(pending)
        else:
            self._rejoin(pending, lease, now, out)

    def _stranger(self, request: Request) -> ModelId | None:
        """The first model that no node has registered, if the request is for registered ones."""
        if not request.registered_only:
            return None
        profiles = self._cluster.profiles.known()
        return next((model for model in request.models if model not in profiles), None)

    def _repeat(self, pending: Pending, out: list[Action]) -> None:
        """Answer a request that arrived again after a lost answer: with the lease that it holds."""
        lease = self._placer.leases.get(pending.lease) if pending.lease is not None else None
        has_it = lease is not None and pending.standing is Standing.LEASED
        if lease is not None and has_it and lease.dispatch is not None:
            out.append(lease.dispatch)

    def _refuse_too_large(self, pending: Pending, out: list[Action]) -> None:
        needs, largest = pending.bundle.bytes, self._cluster.largest_bytes
        reason = f"its models need {needs} bytes; the largest GPU has {largest}"
        self._finish(pending, RequestOutcome.TOO_LARGE, reason, out)

    def _full(self, pending: Pending, now: float) -> str:
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
        if pauses or request.max_wait_s is None or self._is_promised(pending):
            return ""
        most_s, wait_s = request.max_wait_s, placer.expected_wait_s(request.function)
        if request.deadline_s is not None:
            most_s = min(most_s, max(0.0, request.deadline_s - now))
        if wait_s <= most_s:
            return ""
        return f"{placer.queued} requests wait, and its turn comes in {wait_s:.1f} s"

    def _over_quota(self, pending: Pending) -> QuotaRefusal | None:
        tenancy = self._placer.tenancy
        if not tenancy.on or self._is_promised(pending):
            return None
        return tenancy.refusal(pending.request, pending.bundle)

    def request_cancelled(self, event: RequestCancelled, now: float, out: list[Action]) -> None:
        self._withdraw(event.request, RequestOutcome.CANCELLED, "the caller went away", out)

    def deadline_passed(self, event: DeadlinePassed, now: float, out: list[Action]) -> None:
        pending = self.requests.get(event.request)
        stale = event.deadline_s is not None and (
            pending is None or pending.request.deadline_s != event.deadline_s
        )
        if not stale:  # a stale timer belongs to an earlier request of this id
            self._withdraw(event.request, RequestOutcome.EXPIRED, "its deadline passed", out)

    # -- calls under leases that their callers keep -----------------------------------------------

    def lease_used(self, event: LeaseUsed, now: float, out: list[Action]) -> None:
        """Take one report in: first the ends of earlier calls, then the new calls."""
        lease = self._placer.leases.get(event.lease)
        for end in event.ends:
            self._call_ended(end.request, event.lease, min(end.ended_s, now), out)
        if event.uses:
            self._count_uses(event, lease, now, out)
        if lease is None:
            return
        ended_s = [end.ended_s for end in event.ends]
        ended_s += [use.ended_s for use in event.uses if use.ended_s is not None]
        latest_s = min(max(ended_s, default=lease.called_until_s), now)
        lease.called_until_s = max(lease.called_until_s, latest_s)
        if not lease.requests:
            self._placer.kept(lease, latest_s if ended_s else now, now)

    def lease_computed(self, event: LeaseComputed, now: float, out: list[Action]) -> None:
        """Take a node's report of a function's own process in."""
        del out
        lease = self._placer.leases.get(event.lease)
        if lease is not None and lease.own:
            self._placer.computed(lease, event.computed_s, now)

    def _count_uses(
        self, event: LeaseUsed, lease: ActiveLease | None, now: float, out: list[Action]
    ) -> None:
        dispatch = self._dispatch_of(event, lease)
        self._placer.count_placed(event.function, len(event.uses), now)
        for use in sorted(event.uses, key=_BEGAN_S):
            if use.request in self.requests:
                continue  # another call has this id, and has not ended
            request = _request(event, use, dispatch, now)
            began_s = min(use.began_s, now)
            taken = replace(dispatch, requests=(use.request,))
            out.append(Taken(request, began_s, taken, use.parent))
            paused = self._placer.tenancy.order.paused.count
            number = self._cluster.accept(request.models, now) - paused
            if lease is not None:
                self._placer.called(lease, use, now)
            if lease is None or use.ended_s is not None:  # without a lease: its node has ended it
                ended_s = now if use.ended_s is None else min(use.ended_s, now)
                out.append(Finish(use.request, RequestOutcome.COMPLETED, "", ended_s))
            else:
                self._call_runs(request, number, lease)
                self._cluster.runs_until(lease, began_s + dispatch.estimate.run_s, now)
        tenancy = self._placer.tenancy
        if tenancy.on and lease is not None:
            tenancy.named(lease, event.function, dispatch.estimate.run_s)
            if tenancy.yields(lease.id):
                self._placer.standing.given_back(lease.id, tell=True)

    def _dispatch_of(self, event: LeaseUsed, lease: ActiveLease | None) -> Dispatch:
        """What each of these calls would have been dispatched by, had it asked."""
        dispatch = self._placer.standing.dispatch_of(event.lease, lease)
        if dispatch is None:
            raise BadEvent("lease", event.lease)
        if lease is None:
            return dispatch
        profiles, gpu_type = self._cluster.profiles, lease.slot.gpu.spec.gpu_type
        beside = lease.slot.neighbours(lease)
        run_s = estimate.run_s(profiles, lease.models, event.batch, gpu_type, beside)
        return replace(dispatch, estimate=Estimate(0.0, run_s))

    def _call_runs(self, request: Request, number: int, lease: ActiveLease) -> None:
        """A call runs under this lease, as its caller reports; `number` were accepted before it."""
        arrived_s = request.arrived_s or 0.0
        bundle = self._cluster.bundle(lease.models)
        pending = Pending(request, bundle, self._seq(arrived_s), arrived_s)
        pending.number = number
        pending.standing = Standing.LEASED
        pending.at, pending.lease = lease.slot.id, lease.id
        self.requests[request.id] = pending
        lease.requests.append(pending)

    def recall(self, now: float, out: list[Action]) -> None:
        """Recall what stands in the way of those that wait; its callers have a moment to obey."""
        standing = self._placer.standing
        slice_s = 0.0 if standing.terms is None else standing.terms.slice_s
        for lease in standing.recalls():
            out.append(Recall(lease))
            if lease in self._placer.leases:
                out.append(SetTimer(now + slice_s + _RECALL_S, RecallPassed(lease)))

    def recall_passed(self, event: RecallPassed, now: float, out: list[Action]) -> None:
        """A recalled lease was not given back: its node ends it after the call in flight."""
        lease = self._placer.leases.get(event.lease)
        if lease is not None and not lease.released:
            out.append(EndLease(lease.slot.id, lease.id, "it was recalled", recalled=True))

    def _call_ended(
        self, request: RequestId, lease: LeaseId, ended_s: float, out: list[Action]
    ) -> None:
        """A call has ended whose caller keeps the lease; one that is unknown has ended before."""
        pending = self.requests.get(request)
        if pending is None:
            return
        held = self._placer.leases.get(lease)
        if held is not None and pending in held.requests:
            held.requests.remove(pending)
            self._finish(pending, RequestOutcome.COMPLETED, "", out, ended_s)
        else:  # the lease was lost meanwhile, and the request was to be placed again
            self._withdraw(request, RequestOutcome.COMPLETED, "", out)

    def _withdraw(
        self, request: RequestId, outcome: RequestOutcome, reason: str, out: list[Action]
    ) -> None:
        """End a request wherever it is; a request that has ended already stays as it is."""
        pending = self.requests.get(request)
        if pending is None:
            self._break_promise(request, reason, out)
            return
        if pending.standing is Standing.LEASED:
            assert pending.lease is not None
            lease = self._placer.leases[pending.lease]
            lease.requests.remove(pending)
            self._end_unneeded(lease, reason, out)
        elif pending.standing is Standing.PAUSED:
            self._early.unpause(pending)
        else:
            self._placer.take(pending)
        self._finish(pending, outcome, reason, out)

    def _end_unneeded(self, lease: ActiveLease, reason: str, out: list[Action]) -> None:
        """One request fewer has this lease: it ends with the last one."""
        if not self._placer.is_needed(lease):
            self._placer.standing.given_back(lease.id, tell=True)
            lease.released = True
            out.append(EndLease(lease.slot.id, lease.id, reason or "released"))

    def _break_promise(self, request: RequestId, reason: str, out: list[Action]) -> None:
        """End a request's part in a lease that an earlier leader gave to several."""
        handover = self._placer.handover
        lease = self._placer.leases.get(handover.promised(request) or _NO_LEASE)
        if lease is not None and lease.is_shared:
            handover.take(request)
            self._end_unneeded(lease, reason, out)

    def _finish(
        self,
        pending: Pending,
        outcome: RequestOutcome,
        reason: str,
        out: list[Action],
        ended_s: float | None = None,
    ) -> None:
        self.requests.pop(pending.request.id, None)
        self._early.ended(pending)
        if self._placer.tenancy.on:
            self._placer.tenancy.finished(pending.request.id)
        out.append(Finish(pending.request.id, outcome, reason, ended_s))

    def cut_off(self, lease: ActiveLease, after: AfterLoss, reason: str, out: list[Action]) -> None:
        """The GPU work of a lease is lost: its unfinished requests fail or wait again."""
        self._placer.handover.cut_off(lease.id, released=lease.released)
        if lease.released:
            self._conclude(lease, out)
            lease.requests.clear()
            return
        for pending in lease.requests:
            if after is AfterLoss.REQUEUE:
                self._wait_again(pending, out)
            else:
                self._finish(pending, RequestOutcome.FAILED, reason, out)
        lease.requests.clear()

    # -- leases that an earlier leader gave -------------------------------------------------------

    def adopt(self, found: LiveLease, slot: Slot, now: float, out: list[Action]) -> None:
        """Take over a lease that a manager reports and that this core did not grant."""
        self._take_over(found, slot, now)
        placer = self._placer
        left = placer.handover.left(found)
        if left is None:
            placer.leases[found.lease].released = True
            out.append(EndLease(found.slot, found.lease, "released before its node reported it"))
            return
        placer.handover.promise(left, found.lease)
        requests = [self.requests[name] for name in left if name in self.requests]
        queued = 0
        for pending in requests:
            lease = self._promised(pending)  # of no use to one with another lease
            if pending.standing not in _IN_A_QUEUE:
                continue
            queued += 1
            if lease is not None:
                placer.take(pending)
                self._rejoin(pending, lease, now, out)
        if requests and not queued and len(requests) == len(left):
            out.append(EndLease(found.slot, found.lease, "its requests hold other leases"))

    def _take_over(self, found: LiveLease, slot: Slot, now: float) -> None:
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

    def _promised(self, pending: Pending) -> ActiveLease | None:
        """The lease that an earlier leader gave this request, if it is still in force."""
        return self._in_force(self._placer.handover.take(pending.id), pending)

    def _is_promised(self, pending: Pending) -> bool:
        return self._in_force(self._placer.handover.promised(pending.id), pending) is not None

    def _in_force(self, promised: LeaseId | None, pending: Pending) -> ActiveLease | None:
        lease = None if promised is None else self._placer.leases.get(promised)
        if lease is None or lease.released or lease.models != pending.bundle.models:
            return None
        return lease

    def _rejoin(self, pending: Pending, lease: ActiveLease, now: float, out: list[Action]) -> None:
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

    # -- leases ---------------------------------------------------------------------------------

    def lease_released(self, event: LeaseReleased, now: float, out: list[Action]) -> None:
        """The holder no longer needs the lease: order its manager to end it."""
        lease = self._placer.leases.get(event.lease)
        if not event.may_return:
            # It is over for those that gave it back early, too, even if they hold another lease:
            # its holder may not know that another one was granted.
            for pending in self._early.of(event.lease, event.request):
                self._withdraw(pending.id, RequestOutcome.COMPLETED, "", out)
        if lease is None:
            self._placer.handover.release(event.lease, event.request)
            return
        if lease.is_shared and event.request is not None and self._goes_on(lease, event, out):
            return
        self._placer.standing.given_back(lease.id, tell=event.may_return)
        lease.may_return = event.may_return and (lease.may_return or not lease.released)
        lease.released = True
        if not lease.may_return:
            lease.wanted.clear()
        out.append(EndLease(lease.slot.id, lease.id, "released"))

    def _goes_on(self, lease: ActiveLease, event: LeaseReleased, out: list[Action]) -> bool:
        """One request of several gives the lease back; False if none is left that has it."""
        placer, name = self._placer, event.request
        assert name is not None
        pending = self.requests.get(name)
        if pending is None or pending not in lease.requests:  # unknown, or it gave it back before
            if placer.handover.promised(name) == lease.id:
                placer.handover.take(name)
            return placer.is_needed(lease)
        if len(lease.requests) == 1 and not placer.handover.is_awaited(lease.id):
            return False
        lease.requests.remove(pending)
        if event.may_return and (lease.may_return or not lease.released):
            self._early.pause(pending)
        else:
            self._finish(pending, RequestOutcome.COMPLETED, "", out)
        return True

    def slot_freed(self, event: SlotFreed, now: float, out: list[Action]) -> None:
        """The manager has ended a lease: its requests are done, unless they may return."""
        lease = self._placer.leases.get(event.lease)
        if lease is None:
            return  # freed twice, or freed after its GPU was lost
        if lease.slot.id != event.slot:
            raise BadEvent(f"lease {event.lease} on slot", event.slot)
        self._placer.end(lease, now)
        self._conclude(lease, out)

    def lease_wanted(self, event: LeaseWanted, now: float, out: list[Action]) -> None:
        """A request that gave its lease back early goes to the front of the queue."""
        pending = self.requests.get(event.request)
        lease = self._placer.leases.get(pending.lease) if pending and pending.lease else None
        if pending is None:
            out.append(Refuse(event, "this request has ended"))
        elif pending.standing is Standing.PAUSED:
            self._early.unpause(pending)
            self._to_the_front(pending, out)
        elif lease is not None and lease.may_return:
            if pending not in lease.wanted:
                lease.wanted.append(pending)
        elif pending.gave_back:
            self._repeat(pending, out)
        else:
            out.append(Refuse(event, "this request did not give its lease back early"))

    def _conclude(self, lease: ActiveLease, out: list[Action]) -> None:
        for pending in lease.requests:
            if pending in lease.wanted:
                self._to_the_front(pending, out)
            elif lease.may_return:
                self._early.pause(pending)
            else:
                self._finish(pending, RequestOutcome.COMPLETED, "", out)

    def _to_the_front(self, pending: Pending, out: list[Action]) -> None:
        self._early.returns(pending)
        self._fronts += 1
        pending.seq = self._fronts
        self._wait_again(pending, out)

    def _wait_again(self, pending: Pending, out: list[Action]) -> None:
        if self._cluster.too_large(pending.bundle):  # its models were measured meanwhile
            self._refuse_too_large(pending, out)
        else:
            self._placer.wait(pending)

    def run_failed(self, event: RunFailed, now: float, out: list[Action]) -> None:
        lease = self._placer.leases.get(event.lease)
        if lease is not None:
            self.cut_off(lease, event.requests, event.reason, out)

    def refuse_held_back(self, out: list[Action]) -> None:
        """End requests that no longer fit, a GPU or a quota, when it is their turn."""
        refused = self._placer.tenancy.refused
        while refused:
            pending, outcome, reason = refused.pop()
            self._placer.take(pending)
            self._finish(pending, outcome, reason, out)

    def refuse_what_cannot_fit(self, out: list[Action]) -> None:
        """After sizes changed: end requests that fit no GPU, and recall those that wait in vain."""
        cluster = self._cluster
        for slot in cluster.slots.values():
            for lane in slot.local.lanes.values():
                if not cluster.index.could_fit(slot.gpu.cache, lane.bundle.needs):
                    self._placer.recall(slot)
                    break
        lanes = [lane for lane in cluster.waiting.lanes.values() if cluster.too_large(lane.bundle)]
        for lane in lanes:
            for pending in list(lane):
                self._placer.take(pending)
                self._refuse_too_large(pending, out)


def _request(event: LeaseUsed, use: LeaseUse, dispatch: Dispatch, now: float) -> Request:
    return Request(
        use.request,
        event.function,
        dispatch.models,
        event.batch,
        arrived_s=max(0.0, min(use.arrived_s, use.began_s, now)),
    )


class EarlyReturns:
    """By lease: the requests that have none now, and those that have or want another one."""

    def __init__(self) -> None:
        self._paused: dict[LeaseId, list[Pending]] = {}
        self._returned: dict[LeaseId, list[Pending]] = {}

    def pause(self, pending: Pending) -> None:
        """It has given its lease back, and may want another one."""
        assert pending.lease is not None
        pending.standing = Standing.PAUSED
        self._paused.setdefault(pending.lease, []).append(pending)

    def unpause(self, pending: Pending) -> None:
        """It wants another lease, or has ended."""
        assert pending.lease is not None
        _drop(self._paused, pending.lease, pending)

    def returns(self, pending: Pending) -> None:
        """It wants another lease than the one that it gave back."""
        assert pending.lease is not None
        pending.gave_back.append(pending.lease)
        self._returned.setdefault(pending.lease, []).append(pending)

    def ended(self, pending: Pending) -> None:
        for lease in pending.gave_back:
            _drop(self._returned, lease, pending)

    def of(self, lease: LeaseId, request: RequestId | None) -> list[Pending]:
        """Those that gave this lease back early: the named one, or all of them."""
        requests = [*self._paused.get(lease, ()), *self._returned.get(lease, ())]
        return [pending for pending in requests if request is None or pending.id == request]


def _drop(table: dict[LeaseId, list[Pending]], lease: LeaseId, pending: Pending) -> None:
    others = table.get(lease, [])
    if pending in others:
        others.remove(pending)
        if not others:
            del table[lease]
