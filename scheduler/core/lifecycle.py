"""The lives of requests and leases: what happens to one is done here, and told to the layers."""

from collections.abc import Iterable

from cache_manager.model.ids import ModelId
from scheduler.cluster.request_queue import Bundle, Pending, Standing
from scheduler.cluster.slots import ActiveLease, Slot
from scheduler.cluster.state import ClusterState
from scheduler.core.handover import Handover
from scheduler.core.layer import HOOKS, Layer
from scheduler.model import events
from scheduler.model.actions import Dispatch, EndLease, Finish, Refuse, SetTimer
from scheduler.model.errors import BadEvent
from scheduler.model.values import (
    AfterLoss,
    CoreSettings,
    Estimate,
    Explanation,
    LeaseId,
    LeaseUse,
    Request,
    RequestId,
    RequestOutcome,
    StandingTerms,
)

# Requests that arrive in the same microsecond keep their order; no core sees more than this many.
_SEQ_STEP = 1 << 40
# The place of requests that return to the front: before all others, in the order of their return.
_FRONT = -(1 << 80)
_NO_LEASE = LeaseId(0)
# A timer may fire so much too early.
_EARLY_S = 0.001

_IN_A_QUEUE = (Standing.HELD, Standing.WAITING, Standing.LOCAL)


class Lifecycle:
    """Keeps every accepted request until its one terminal state, and every lease until its end."""

    def __init__(self, cluster: ClusterState, settings: CoreSettings) -> None:
        self.cluster = cluster
        # The layers that are on, by each hook that they override.
        self.hooks: dict[str, list[Layer]] = {name: [] for name in HOOKS}
        self._on: list[Layer] = []  # in the order in which each hook has them
        self.handover = Handover(settings.first_lease)
        self._max_waiting = settings.max_waiting
        self._early = EarlyReturns()
        self._arrivals = 0
        self._fronts = _FRONT
        self._wakes_s = 0.0

    def switch_on(self, layer: Layer, names: Iterable[str] = HOOKS) -> None:
        """From now on this layer is asked and told, at first perhaps by some of its hooks alone.

        One that is off costs nothing.
        """
        if layer not in self._on:
            self._on.append(layer)
        for name in names:
            layers = self.hooks[name]
            overrides = getattr(type(layer), name) is not getattr(Layer, name)
            if overrides and layer not in layers:
                self.hooks[name] = sorted([*layers, layer], key=self._on.index)

    def switch_off(self, layer: Layer) -> None:
        self._on = [other for other in self._on if other is not layer]
        for name, layers in self.hooks.items():
            self.hooks[name] = [other for other in layers if other is not layer]

    # -- requests -------------------------------------------------------------------------------

    def request_arrived(self, event: events.RequestArrived) -> None:
        cluster, request = self.cluster, event.request
        if not request.models:
            raise BadEvent("model named by request", request.id)
        accepted = cluster.requests.get(request.id)
        if accepted is not None:
            self._repeat(accepted)
            return
        stranger = self._stranger(request)
        if stranger is not None:
            reason = f"no node has registered the weights of {stranger}"
            cluster.out.append(Finish(request.id, RequestOutcome.FAILED, reason))
            return
        now = cluster.now
        pending = self.pending(request, now if request.arrived_s is None else request.arrived_s)
        if self.too_large(pending.bundle):
            self._refuse_too_large(pending)
            return
        promised = self._promised(pending)
        refusal = self._refusal(pending, promised=promised is not None)
        if refusal is not None:
            cluster.out.append(refusal)
        elif request.deadline_s is not None and request.deadline_s <= now:
            self.finish(pending, RequestOutcome.EXPIRED, "its deadline had passed")
        else:
            self._accept(pending, promised)

    def pending(self, request: Request, arrived_s: float) -> Pending:
        """BadEvent if there is no such time of arrival."""
        arrived_s = min(arrived_s, self.cluster.now)
        if not arrived_s >= 0.0:
            raise BadEvent("time of arrival", request.arrived_s)
        self._arrivals += 1
        seq = int(arrived_s * 1e6) * _SEQ_STEP + self._arrivals
        return Pending(request, self.cluster.bundle(request.models), seq, arrived_s)

    def _accept(self, pending: Pending, lease: ActiveLease | None) -> None:
        """Let a request in, which has this lease by an earlier leader's word."""
        cluster, request = self.cluster, pending.request
        if request.deadline_s is not None:
            passed = events.DeadlinePassed(request.id, request.deadline_s)
            cluster.out.append(SetTimer(request.deadline_s, passed))
        if cluster.by_arrival:
            cluster.latest_seq = max(pending.seq, cluster.latest_seq)
        cluster.requests[request.id] = pending
        pending.number = self.count(pending.models)
        for layer in self.hooks["accepted"]:
            layer.accepted(pending)
        if self.handover.promised:
            self.handover.take(pending.id)
        if lease is None:
            self.wait(pending)
        else:
            self._rejoin(pending, lease)

    def count(self, models: tuple[ModelId, ...]) -> int:
        """Count one request more, and the use of its models; how many before it are not paused."""
        cluster = self.cluster
        number = cluster.accepted - cluster.paused  # who is paused overtakes nobody
        cluster.accepted += 1
        for model in models:
            cluster.index.rates.count_request(model, cluster.now)
            cluster.profiles.used(model)
        return number

    def _stranger(self, request: Request) -> ModelId | None:
        """The first model that no node has registered, if the request is for registered ones."""
        if not request.registered_only:
            return None
        profiles = self.cluster.profiles.known
        return next((model for model in request.models if model not in profiles), None)

    def _repeat(self, pending: Pending) -> None:
        """Answer a request that arrived again after a lost answer: with the lease that it holds."""
        lease = self.cluster.leases.get(pending.lease) if pending.lease is not None else None
        has_it = lease is not None and pending.standing is Standing.LEASED
        if lease is not None and has_it and lease.dispatch is not None:
            self.cluster.out.append(lease.dispatch)

    def too_large(self, bundle: Bundle) -> bool:
        """Whether no GPU seen so far could hold the models; False before the first one."""
        return 0 < self.cluster.largest_bytes < bundle.bytes

    def _refuse_too_large(self, pending: Pending) -> None:
        needs, largest = pending.bundle.bytes, self.cluster.largest_bytes
        reason = f"its models need {needs} bytes; the largest GPU has {largest}"
        self.finish(pending, RequestOutcome.TOO_LARGE, reason)

    def _refusal(self, pending: Pending, *, promised: bool) -> Finish | None:
        for layer in self.hooks["refusal"]:
            refusal = layer.refusal(pending, promised=promised)
            if refusal is not None:
                return refusal
        reason = self._full(pending, promised=promised)
        return Finish(pending.id, RequestOutcome.QUEUE_FULL, reason) if reason else None

    def _full(self, pending: Pending, *, promised: bool) -> str:
        """Why the queue takes no such request now; empty if it does.

        The wait of a request that names no longest wait is not bounded.
        """
        cluster, limit, request = self.cluster, self._max_waiting, pending.request
        rivals = cluster.paused if pending.pauses else cluster.contending
        if limit is not None and rivals >= limit:
            return f"{limit} requests wait already"
        if pending.pauses or request.max_wait_s is None or promised:
            return ""
        most_s, wait_s = request.max_wait_s, self.expected_wait_s(request.function)
        if request.deadline_s is not None:
            most_s = min(most_s, max(0.0, request.deadline_s - cluster.now))
        if wait_s <= most_s:
            return ""
        return f"{cluster.queued} requests wait, and its turn comes in {wait_s:.1f} s"

    def expected_wait_s(self, function: str) -> float:
        """The seconds that a request of this function that arrives now should wait for a lease."""
        cluster = self.cluster
        # A slot may be idle, and its GPU's copy engine not.
        if cluster.idle_slots and not (cluster.contending and cluster.loadable is not None):
            return 0.0
        for layer in self.hooks["wait_s"]:
            wait_s = layer.wait_s(function)
            if wait_s is not None:
                return wait_s
        return cluster.pace.wait_s(cluster.contending)

    def request_cancelled(self, event: events.RequestCancelled) -> None:
        self.withdraw(event.request, RequestOutcome.CANCELLED, "the caller went away")

    def deadline_passed(self, event: events.DeadlinePassed) -> None:
        pending = self.cluster.requests.get(event.request)
        stale = event.deadline_s is not None and (
            pending is None or pending.request.deadline_s != event.deadline_s
        )
        if not stale:  # a stale timer belongs to an earlier request of this id
            self.withdraw(event.request, RequestOutcome.EXPIRED, "its deadline passed")

    def withdraw(self, request: RequestId, outcome: RequestOutcome, reason: str) -> None:
        """End a request wherever it is; a request that has ended already stays as it is."""
        pending = self.cluster.requests.get(request)
        if pending is None:
            self._break_promise(request, reason)
            return
        if pending.standing is Standing.LEASED:
            assert pending.lease is not None
            lease = self.cluster.leases[pending.lease]
            lease.requests.remove(pending)
            self._end_unneeded(lease, reason)
        elif pending.standing is not Standing.PAUSED:
            self.take(pending)
        self.finish(pending, outcome, reason)

    def finish(
        self,
        pending: Pending,
        outcome: RequestOutcome,
        reason: str,
        ended_s: float | None = None,
    ) -> None:
        """End a request that is in no queue, and has no lease."""
        self.cluster.requests.pop(pending.id, None)
        self._early.ended(pending)
        for layer in self.hooks["finished"]:
            layer.finished(pending)
        self.cluster.out.append(Finish(pending.id, outcome, reason, ended_s))

    # -- queues ---------------------------------------------------------------------------------

    def wait(self, pending: Pending) -> None:
        """Put a request into the global queue, at its place, unless a layer holds it back."""
        self.cluster.contending += 1
        for layer in self.hooks["holds_back"]:
            if layer.holds_back(pending):
                return
        self.enter_queue(pending)

    def enter_queue(self, pending: Pending) -> None:
        cluster = self.cluster
        pending.standing = Standing.WAITING
        pending.at = pending.lease = None
        for layer in self.hooks["waits"]:
            layer.waits(pending)
        cluster.waiting.add(pending, pending.seq, cluster.now)
        if cluster.demand is not None:
            cluster.demand.changed(pending.bundle)

    def leave_queue(self, pending: Pending) -> None:
        for layer in self.hooks["waits_no_more"]:
            layer.waits_no_more(pending)
        self.cluster.waiting.remove(pending, self.cluster.now)

    def take(self, pending: Pending) -> None:
        """Take a request out of its queue, global or local."""
        cluster = self.cluster
        cluster.contending -= 1
        if pending.standing is Standing.WAITING:
            self.leave_queue(pending)
        elif pending.standing is Standing.LOCAL:
            self._take_from_slot(pending)
        else:
            assert pending.standing is Standing.HELD, f"{pending.id} waits in no queue"
            for layer in self.hooks["let_go"]:
                layer.let_go(pending)
        if not cluster.contending:
            cluster.pace.pause()

    def _take_from_slot(self, pending: Pending) -> None:
        assert pending.at is not None
        cluster, slot = self.cluster, self.cluster.slots[pending.at]
        slot.local.remove(pending, cluster.uncontended_s)
        slot.local_s = slot.local_s - pending.wait_s if slot.local.count else 0.0
        for model in pending.bundle.models:
            cluster.index.wait(slot.gpu.cache, model, -1)
        if not slot.idle or slot.gpu.arriving:
            cluster.settle(slot)  # it is free sooner than its ranking entry says

    def recall(self, slot: Slot) -> None:
        """Move a whole local queue back to the global queue, each request to its old place."""
        self.cluster.disturbed |= slot.local.count > 0
        for pending in sorted(slot.local, key=lambda pending: pending.seq):
            self.take(pending)
            self.wait(pending)

    def needs(self, slot: Slot, pending: Pending | None = None) -> None:
        """A slot takes no further request, or this one waits for it."""
        for layer in self.hooks["needed"]:
            layer.needed(slot, pending)

    def placed(self, function: str, count: int) -> None:
        """Requests of one function have what they asked for: how fast do the others move?"""
        cluster = self.cluster
        if cluster.contending:
            cluster.pace.placed(count, cluster.now)
        for layer in self.hooks["placed"]:
            layer.placed(function, count)

    def wake(self, at_s: float) -> None:
        """Have the policy run then, unless it runs sooner anyway, and can ask again."""
        if self.cluster.now < self._wakes_s - _EARLY_S and self._wakes_s <= at_s:
            return
        self._wakes_s = at_s
        self.cluster.out.append(SetTimer(at_s, events.TimerFired()))

    # -- leases ---------------------------------------------------------------------------------

    def stands(self, lease: ActiveLease) -> StandingTerms | None:
        """The terms on which the caller of a new lease may keep it."""
        for layer in self.hooks["stands"]:
            terms = layer.stands(lease)
            if terms is not None:
                return terms
        return None

    def dispatch(
        self,
        lease: ActiveLease,
        estimate: Estimate,
        rule: str,
        *,
        hit: bool = True,
        held_elsewhere: bool = False,
        explanation: Explanation | None = None,
        stands: StandingTerms | None = None,
        function: str = "",
    ) -> None:
        """Tell the holders of a lease of it."""
        slot, spec = lease.slot, lease.slot.gpu.spec
        lease.dispatch = Dispatch(
            lease.id,
            slot.id,
            spec.id,
            spec.node,
            tuple([pending.id for pending in lease.requests]),
            hit,
            held_elsewhere,
            estimate,
            rule,
            explanation,
            lease.models,
            stands,
            function,
            lease.more_ids,
            lease.configuration,
            lease.own,
        )
        self.cluster.out.append(lease.dispatch)

    def loaded(self, lease: ActiveLease, model: ModelId) -> None:
        """A model that a lease waited for is loaded: correct when its slot will be free."""
        if lease.loading.pop(model, None) is None or lease.loading:
            return
        cluster, slot, joins = self.cluster, lease.slot, lease.beside
        now = lease.there_s = cluster.now
        if joins:
            lease.computes(now)
        for layer in self.hooks["loaded"]:
            layer.loaded(lease, joins=joins)
        if joins:
            # If others run there now, the GPU's workers take turns, unless the slot's leases run at
            # once; no further lease is given meanwhile.
            if slot.computing > slot.capacity:
                self.needs(slot)
            cluster.settle(slot)
        else:
            due_s = max(now, lease.begins_s) + lease.run_s
            if due_s != lease.due_s:
                cluster.postpone(lease, due_s)
        self.rest_if_own(lease)

    def stand_aside(self, lease: ActiveLease) -> None:
        """What it loads makes no progress: its part in the compute is others' until it is there."""
        if lease.beside:
            return
        self.cluster.stands_aside(lease)
        for layer in self.hooks["stands_aside"]:
            layer.stands_aside(lease)
        self.cluster.disturbed = True

    def called(self, lease: ActiveLease, use: LeaseUse) -> None:
        """A call began, and perhaps ended, under a lease that its caller keeps.

        Several may run at once: it counts from when those that are known have ended.
        """
        cluster, slot, now = self.cluster, lease.slot, self.cluster.now
        for model in lease.models:
            if model in slot.gpu.cache.residents:  # else its worker has died
                cluster.index.touch(slot.gpu.cache, model, now)
        slot.frequency += 1
        if slot.idle:
            cluster.settle(slot)  # its entry of before counts no longer
        ended_s = now if use.ended_s is None else min(use.ended_s, now)
        began_s = min(max(use.began_s, lease.called_until_s), ended_s)
        lease.called_until_s = max(lease.called_until_s, ended_s)
        for layer in self.hooks["called"]:
            layer.called(lease, use, began_s, ended_s)

    def lease_computed(self, event: events.LeaseComputed) -> None:
        """Take a node's report of a function's own process in."""
        lease = self.cluster.leases.get(event.lease)
        if lease is None or not lease.own:
            return
        most_s = max(0.0, self.cluster.now - lease.there_s - lease.computed_s)
        computed_s = min(max(0.0, event.computed_s), most_s)
        lease.computed_s += computed_s
        for layer in self.hooks["computed"]:
            layer.computed(lease, computed_s)

    def rest_if_own(self, lease: ActiveLease) -> None:
        """An own process has a lease whose models are there: it is kept while no call runs."""
        if lease.own and not lease.loading:
            self.kept(lease, self.cluster.now)

    def kept(self, lease: ActiveLease, since_s: float) -> None:
        """No call has run since then under a lease that is kept."""
        for layer in self.hooks["kept"]:
            layer.kept(lease, since_s)

    def may_be_kept(self, lease: ActiveLease) -> bool:
        return all(layer.may_be_kept(lease) for layer in self.hooks["may_be_kept"])

    def is_needed(self, lease: ActiveLease) -> bool:
        """Whether some request has not given this lease back."""
        return bool(lease.requests) or (lease.is_shared and self.handover.is_awaited(lease.id))

    def _end_unneeded(self, lease: ActiveLease, reason: str) -> None:
        """One request fewer has this lease: it ends with the last one."""
        if not self.is_needed(lease):
            self._give_back(lease, reason or "released", tell=True)

    def _give_back(self, lease: ActiveLease, reason: str, *, tell: bool) -> None:
        for layer in self.hooks["given_back"]:
            layer.given_back(lease, tell=tell)
        lease.released = True
        self.cluster.out.append(EndLease(lease.slot.id, lease.id, reason))

    def lease_released(self, event: events.LeaseReleased) -> None:
        """The holder no longer needs the lease: order its manager to end it."""
        lease = self.cluster.leases.get(event.lease)
        if not event.may_return:
            # It is over for those that gave it back early, too, even if they hold another lease:
            # its holder may not know that another one was granted.
            for pending in self._early.of(event.lease, event.request):
                self.withdraw(pending.id, RequestOutcome.COMPLETED, "")
        if lease is None:
            self.handover.release(event.lease, event.request)
            return
        if lease.is_shared and event.request is not None and self._goes_on(lease, event):
            return
        lease.may_return = event.may_return and (lease.may_return or not lease.released)
        if not lease.may_return:
            lease.wanted.clear()
        self._give_back(lease, "released", tell=event.may_return)

    def _goes_on(self, lease: ActiveLease, event: events.LeaseReleased) -> bool:
        """One request of several gives the lease back; False if none is left that has it."""
        handover, name = self.handover, event.request
        assert name is not None
        pending = self.cluster.requests.get(name)
        if pending is None or pending not in lease.requests:  # unknown, or it gave it back before
            if handover.promised.get(name) == lease.id:
                handover.take(name)
            return self.is_needed(lease)
        if len(lease.requests) == 1 and not handover.is_awaited(lease.id):
            return False
        lease.requests.remove(pending)
        if event.may_return and (lease.may_return or not lease.released):
            self._early.pause(pending)
        else:
            self.finish(pending, RequestOutcome.COMPLETED, "")
        return True

    def slot_freed(self, event: events.SlotFreed) -> None:
        """The manager has ended a lease: its requests are done, unless they may return."""
        lease = self.cluster.leases.get(event.lease)
        if lease is None:
            return  # freed twice, or freed after its GPU was lost
        if lease.slot.id != event.slot:
            raise BadEvent(f"lease {event.lease} on slot", event.slot)
        self.end(lease)
        self._conclude(lease)

    def end(self, lease: ActiveLease) -> None:
        """A lease is over: take it off its slots, and out of all books."""
        cluster = self.cluster
        self.handover.ended(lease.id)
        del cluster.leases[lease.id]
        for model in lease.models:
            cluster.index.use(lease.slot.gpu.cache, model, -1)
        for layer in self.hooks["ended"]:
            layer.ended(lease)
        cluster.release(lease)

    def lease_wanted(self, event: events.LeaseWanted) -> None:
        """A request that gave its lease back early goes to the front of the queue."""
        out, pending = self.cluster.out, self.cluster.requests.get(event.request)
        lease = self.cluster.leases.get(pending.lease) if pending and pending.lease else None
        if pending is None:
            out.append(Refuse(event, "this request has ended"))
        elif pending.standing is Standing.PAUSED:
            self._to_the_front(pending)
        elif lease is not None and lease.may_return:
            if pending not in lease.wanted:
                lease.wanted.append(pending)
        elif pending.gave_back:
            self._repeat(pending)
        else:
            out.append(Refuse(event, "this request did not give its lease back early"))

    def _conclude(self, lease: ActiveLease) -> None:
        for pending in lease.requests:
            if pending in lease.wanted:
                self._to_the_front(pending)
            elif lease.may_return:
                self._early.pause(pending)
            else:
                self.finish(pending, RequestOutcome.COMPLETED, "")

    def _to_the_front(self, pending: Pending) -> None:
        self._early.returns(pending)
        self._fronts += 1
        pending.seq = self._fronts
        self._wait_again(pending)

    def _wait_again(self, pending: Pending) -> None:
        if self.too_large(pending.bundle):  # its models were measured meanwhile
            self._refuse_too_large(pending)
        else:
            self.wait(pending)

    # -- what is lost -----------------------------------------------------------------------------

    def run_failed(self, event: events.RunFailed) -> None:
        lease = self.cluster.leases.get(event.lease)
        if lease is not None:
            self.cut_off(lease, event.requests, event.reason)

    def cut_off(self, lease: ActiveLease, after: AfterLoss, reason: str) -> None:
        """The GPU work of a lease is lost: its unfinished requests fail or wait again."""
        self.handover.cut_off(lease.id, released=lease.released)
        if lease.released:
            self._conclude(lease)
        else:
            for pending in lease.requests:
                if after is AfterLoss.REQUEUE:
                    self._wait_again(pending)
                else:
                    self.finish(pending, RequestOutcome.FAILED, reason)
        lease.requests.clear()

    def refuse_what_cannot_fit(self) -> None:
        """After sizes changed: end requests that fit no GPU, and recall those that wait in vain."""
        cluster = self.cluster
        for slot in cluster.slots.values():
            self.recall_what_cannot_fit(slot)
        lanes = [lane for lane in cluster.waiting.lanes.values() if self.too_large(lane.bundle)]
        for lane in lanes:
            for pending in list(lane):
                self.take(pending)
                self._refuse_too_large(pending)

    def recall_what_cannot_fit(self, slot: Slot) -> None:
        """If something waits at this slot in vain, it waits for any GPU again, with the others."""
        cache = slot.gpu.cache
        if not all(cache.could_fit(lane.bundle.needs) for lane in slot.local.lanes.values()):
            self.recall(slot)

    # -- leases that an earlier leader gave -------------------------------------------------------

    def adopt(self, live: events.LiveLease, slot: Slot) -> None:
        """Take over a lease that a manager reports and that this core did not grant."""
        cluster, handover = self.cluster, self.handover
        lease = self._take_over(live, slot)
        left = handover.left(live)
        if left is None:
            lease.released = True
            reason = "released before its node reported it"
            cluster.out.append(EndLease(live.slot, live.lease, reason))
            return
        handover.promise(left, live.lease)
        requests = [cluster.requests[name] for name in left if name in cluster.requests]
        queued = 0
        for pending in requests:
            promised = self._promised(pending)
            handover.take(pending.id)  # of no use to one with another lease
            if pending.standing not in _IN_A_QUEUE:
                continue
            queued += 1
            if promised is not None:
                self.take(pending)
                self._rejoin(pending, promised)
        if requests and not queued and len(requests) == len(left):
            reason = "its requests hold other leases"
            cluster.out.append(EndLease(live.slot, live.lease, reason))

    def _take_over(self, live: events.LiveLease, slot: Slot) -> ActiveLease:
        cluster = self.cluster
        lease = cluster.leases[live.lease] = ActiveLease(live.lease, slot, live.models)
        lease.is_shared, lease.own = len(live.requests) > 1, live.own
        lease.configure(live.configuration, tuple([cluster.slots[id_] for id_ in live.more_slots]))
        cluster.adopt(lease)
        cluster.last_lease = max(cluster.last_lease, live.lease)
        for model in live.models:
            cluster.index.use(slot.gpu.cache, model, +1)
        for layer in self.hooks["adopted"]:
            layer.adopted(lease)
        self.rest_if_own(lease)
        return lease

    def _promised(self, pending: Pending) -> ActiveLease | None:
        """The lease that an earlier leader gave this request, if it is still in force."""
        promised = self.handover.promised.get(pending.id)
        lease = None if promised is None else self.cluster.leases.get(promised)
        if lease is None or lease.released or lease.models != pending.bundle.models:
            return None
        return lease

    def _break_promise(self, request: RequestId, reason: str) -> None:
        """End a request's part in a lease that an earlier leader gave to several."""
        lease = self.cluster.leases.get(self.handover.promised.get(request, _NO_LEASE))
        if lease is not None and lease.is_shared:
            self.handover.take(request)
            self._end_unneeded(lease, reason)

    def _rejoin(self, pending: Pending, lease: ActiveLease) -> None:
        """Give a request that is in no queue its lease again."""
        lease.give_to(pending)
        for layer in self.hooks["rejoined"]:
            layer.rejoined(lease, pending)
        self.rest_if_own(lease)
        function = pending.request.function if lease.is_shared else ""
        rule = "it was given this lease before"
        self.dispatch(lease, Estimate(0.0, 0.0), rule, function=function)


class EarlyReturns:
    """By lease: the requests that gave it back early, until they end."""

    def __init__(self) -> None:
        self._by_lease: dict[LeaseId, list[Pending]] = {}

    def pause(self, pending: Pending) -> None:
        """It has given its lease back, and may want another one."""
        pending.standing = Standing.PAUSED
        self._note(pending)

    def returns(self, pending: Pending) -> None:
        """It wants another lease than the one that it gave back."""
        pending.gave_back.append(self._note(pending))

    def ended(self, pending: Pending) -> None:
        for lease in (*pending.gave_back, pending.lease or _NO_LEASE):
            others = self._by_lease.get(lease, [])
            if pending in others:
                others.remove(pending)
                if not others:
                    del self._by_lease[lease]

    def of(self, lease: LeaseId, request: RequestId | None) -> list[Pending]:
        """Those that gave this lease back early: the named one, or all of them."""
        requests = self._by_lease.get(lease, ())
        return [pending for pending in requests if request is None or pending.id == request]

    def _note(self, pending: Pending) -> LeaseId:
        assert pending.lease is not None
        requests = self._by_lease.setdefault(pending.lease, [])
        if pending not in requests:
            requests.append(pending)
        return pending.lease
