"""Carries out what a policy decides: placements, local queues, visits, prefetches."""

from cache_manager.model.ids import ModelId
from cache_manager.residency.cache_index import LoadPlan
from scheduler.core.billing.use_meter import UseMeter
from scheduler.core.loads import Loads
from scheduler.core.placement_reasons import Reasons, explain
from scheduler.core.state import occupation
from scheduler.core.state.cluster_state import ClusterState
from scheduler.core.state.idle_models import IdleModels
from scheduler.core.state.pending import Bundle, Pending, Standing
from scheduler.core.state.queue_pace import QueuePace
from scheduler.core.state.slots import ActiveLease, Slot
from scheduler.core.state.standing_leases import StandingLeases
from scheduler.core.state.visits import Visits
from scheduler.estimates import estimate as estimates
from scheduler.model.actions import Action, Dispatch, EnqueueLocally, SetTimer
from scheduler.model.events import LiveLease, TimerFired
from scheduler.model.values import (
    CoreSettings,
    Estimate,
    Explanation,
    LeaseId,
    RequestId,
)
from scheduler.policies.placement_policy import (
    Decision,
    LoadBeside,
    Place,
    Prefetch,
    Queue,
    Skip,
)

_NO_LEASE = LeaseId(0)
# A timer may fire so much too early.
_EARLY_S = 0.001


class Placer:
    """Applies one decision at a time to the cluster, and returns the actions that carry it out."""

    def __init__(self, cluster: ClusterState, visits: Visits, settings: CoreSettings) -> None:
        self.cluster = cluster
        self.visits = visits
        self.standing = StandingLeases(settings.standing)
        self.idle = IdleModels(settings.exit_rule)
        self._loads = Loads(cluster, self.idle)
        self.leases: dict[LeaseId, ActiveLease] = {}
        self.policy_name = ""
        self.latest_seq = 0
        self._watched = settings.explain
        self._shares = settings.shares_leases
        self.queued = 0
        self.pace = QueuePace()
        self.meter: UseMeter | None = None
        self.disturbed = False
        self._last_lease = settings.first_lease - 1
        self._promised: dict[RequestId, LeaseId] = {}
        self._wakes_s = 0.0

    def apply(
        self, decision: Decision, requests: dict[RequestId, Pending], now: float, out: list[Action]
    ) -> None:
        """Carry out one decision."""
        slots = self.cluster.slots
        if isinstance(decision, Place | LoadBeside):
            asked = decision.requests if self._shares else decision.requests[:1]
            chosen = tuple([requests[request.id] for request in asked])
            slot = slots[decision.slot.id]
            self.place(chosen, slot, decision, now, out)
        elif isinstance(decision, Queue):
            pending = requests[decision.request.id]
            self.enqueue(pending, slots[decision.slot.id], decision.rule, now, out)
        elif isinstance(decision, Skip):
            before = decision.before
            boundary = self.latest_seq + 1 if before is None else requests[before.id].seq
            self.visits.skip(boundary, decision.limit)
        elif isinstance(decision, Prefetch):
            self.prefetch(decision.model, slots[decision.slot.id], now, out)
        else:
            self._wake(decision.at_s, now, out)

    # -- a lease for requests -------------------------------------------------------------------

    def place(
        self,
        chosen: tuple[Pending, ...],
        slot: Slot,
        decision: Place | LoadBeside,
        now: float,
        out: list[Action],
    ) -> None:
        """Give requests of the same models one lease on a slot with room, or beside its runs."""
        first, beside = chosen[0], isinstance(decision, LoadBeside)
        bundle = first.bundle
        assert slot.loadable if beside else slot.idle, f"{slot.id} has no room for another lease"
        if len(chosen) > 1:
            assert all(pending.bundle is bundle for pending in chosen), "a batch of several models"
        from_local = first.standing is Standing.LOCAL
        hit = slot.holds(bundle.models)
        plan = None if hit else self._plan(bundle, slot, now, spare_waiting=not from_local)
        held_elsewhere = not hit and self.cluster.index.held(bundle.models)
        explanation = self._explain(first, slot, decision.rule, now, plan)
        for pending in chosen:
            self.take(pending)
        if self.queued:
            self.pace.placed(len(chosen), now)
        batch = first.request.batch if len(chosen) == 1 else sum(p.request.batch for p in chosen)
        estimate = self._estimate(bundle, batch, slot, decision)
        lease = self._lease(slot, bundle.models, beside=beside)
        if isinstance(decision, Place) and (decision.more_slots or decision.configuration):
            self._configure(lease, decision, len(chosen))
        if plan is not None:
            self._loads.order(lease, plan, now, out)
        elif slot.leases or len(slot.gpu.slots) > 1:
            under_way_s = self._loads.under_way_s(slot, bundle.models, now)
            estimate = Estimate(under_way_s, estimate.run_s)
        occupation.join(lease, chosen)
        if not from_local:
            slot.frequency += len(chosen)
        self._occupy(lease, now, estimate.load_s, estimate.run_s)
        alone = len(chosen) == 1
        may_stand = alone and not beside and not lease.more and lease.configuration is None
        lease.dispatch = Dispatch(
            lease.id,
            slot.id,
            slot.gpu.spec.id,
            slot.gpu.spec.node,
            (first.request.id,) if alone else tuple(p.request.id for p in chosen),
            hit,
            held_elsewhere,
            estimate,
            decision.rule,
            explanation,
            bundle.models,
            self.standing.terms_for(first, slot) if may_stand else None,
            first.request.function if alone and first.request.caller else "",
            lease.more_ids,
            lease.configuration,
        )
        out.append(lease.dispatch)
        if lease.dispatch.stands is not None:
            self.standing.given(lease, first)

    def use(self, lease: ActiveLease, now: float) -> None:
        """A call ran, or runs, under a lease that its caller keeps."""
        slot = lease.slot
        for model in lease.models:
            if model in slot.residents:  # else its worker has died
                self.cluster.index.touch(slot.gpu.cache, model, now)
        slot.frequency += 1
        self.standing.used(lease)

    def runs_on(self, lease: ActiveLease, due_s: float, now: float) -> None:
        """A call still runs under a lease that its caller keeps: it should end at `due_s`."""
        slot = lease.slot
        later_s = max(now, due_s) - max(now, lease.due_s)
        lease.due_s = max(now, due_s)
        if not lease.beside:
            slot.free_s = max(now, max(now, slot.free_s) + later_s)
            self.cluster.settle(slot)

    def prefetch(self, model: ModelId, slot: Slot, now: float, out: list[Action]) -> bool:
        """Load a model without a request; the slot is busy until its manager reports it freed."""
        bundle = self.cluster.bundle((model,))
        if slot.holds(bundle.models) or not slot.idle:
            return False
        plan = self.cluster.index.plan(slot.gpu.cache, bundle.needs, now)
        if plan is None:
            return False
        lease = self._lease(slot, bundle.models)
        load_s = self._loads.order(lease, plan, now, out, prefetch=True)
        self._occupy(lease, now, load_s, 0.0)
        return True

    def promised(self, pending: Pending) -> ActiveLease | None:
        """The lease that an earlier leader gave this request, if it is still in force."""
        lease = self.leases.get(self._promised.pop(pending.id, _NO_LEASE))
        if lease is None or lease.released or lease.models != pending.bundle.models:
            return None
        return lease

    def is_promised(self, request: RequestId) -> bool:
        """Whether an earlier leader gave this request a lease that may be in force."""
        return request in self._promised

    def rejoin(self, pending: Pending, lease: ActiveLease, now: float, out: list[Action]) -> None:
        """Give a request that is in no queue its lease again."""
        slot = lease.slot
        pending.standing = Standing.LEASED
        pending.at = slot.id
        pending.lease = lease.id
        lease.requests.append(pending)
        if self.meter is not None:
            self.meter.named(lease, now)
        lease.dispatch = Dispatch(
            lease=lease.id,
            slot=slot.id,
            gpu=slot.gpu.spec.id,
            node=slot.gpu.spec.node,
            requests=tuple(each.id for each in lease.requests),
            hit=True,
            held_elsewhere=False,
            estimate=Estimate(0.0, 0.0),
            rule="it was given this lease before",
            models=lease.models,
            more_slots=lease.more_ids,
            configuration=lease.configuration,
        )
        out.append(lease.dispatch)

    def end(self, lease: ActiveLease, now: float) -> None:
        """A lease is over: take it off its slots, and out of all books."""
        slot = lease.slot
        self.standing.ended(lease)
        if self.meter is not None:
            self.meter.ended(lease, now)
        if self._promised:
            promised = self._promised.items()
            self._promised = {request: held for request, held in promised if held != lease.id}
        del self.leases[lease.id]
        cache = slot.gpu.cache
        for model in lease.models:
            self.cluster.index.use(cache, model, -1)
        if self.idle.active:
            self.idle.ended(slot.gpu, lease.models, now)
        occupation.release(self.cluster, lease, now)

    def loaded(self, lease: ActiveLease, model: ModelId, now: float) -> None:
        """A model that a lease waited for is loaded: correct when its slot will be free."""
        if lease.loading.pop(model, None) is None or lease.loading:
            return
        if lease.beside:
            self._computes(lease, now)
            return
        due_s = max(now, lease.begins_s) + lease.run_s
        if due_s != lease.due_s:
            occupation.postpone(self.cluster, lease, due_s, now)

    def adopt(self, found: LiveLease, slot: Slot, now: float) -> None:
        """Take over a lease that a manager reports and that this core did not grant."""
        lease_id, models = found.lease, found.models
        self._promised.update(dict.fromkeys(found.requests, lease_id))
        lease = ActiveLease(lease_id, slot, models)
        self.leases[lease_id] = lease
        more = tuple([self.cluster.slots[other] for other in found.more_slots])
        occupation.configure(lease, found.configuration, more)
        occupation.adopt(self.cluster, lease, now)
        self._last_lease = max(self._last_lease, lease_id)
        for model in models:
            self.cluster.index.use(slot.gpu.cache, model, +1)
        if self.meter is not None:
            self.meter.began(lease, now)

    # -- queues ---------------------------------------------------------------------------------

    def enqueue(
        self, pending: Pending, slot: Slot, rule: str, now: float, out: list[Action]
    ) -> None:
        """Move a waiting request to one slot's local queue."""
        explanation = self._explain(pending, slot, rule, now, None)
        self.take(pending)
        cluster = self.cluster
        pending.standing = Standing.LOCAL
        pending.at = slot.id
        pending.wait_s = cluster.run_s(pending.bundle, pending.request.batch, slot)
        slot.frequency += 1
        slot.local_s += pending.wait_s
        slot.given += 1
        slot.local.add(pending, slot.given)
        self.queued += 1
        for model in pending.bundle.models:
            cluster.index.wait(slot.gpu.cache, model, +1)
        cluster.settle(slot)
        self.standing.recall(slot, pending)
        out.append(EnqueueLocally(pending.request.id, slot.id, rule, explanation))

    def take(self, pending: Pending) -> None:
        """Take a request out of its queue, global or local."""
        self.queued -= 1
        if not self.queued:
            self.pace.emptied()
        if pending.standing is Standing.WAITING:
            self.standing.waits_no_more(pending)
            self.cluster.waiting.remove(pending)
            return
        assert pending.standing is Standing.LOCAL, f"{pending.id} waits in no queue"
        assert pending.at is not None
        slot = self.cluster.slots[pending.at]
        slot.local.remove(pending)
        slot.local_s = slot.local_s - pending.wait_s if slot.local.count else 0.0
        for model in pending.bundle.models:
            self.cluster.index.wait(slot.gpu.cache, model, -1)
        if not slot.idle:
            self.cluster.settle(slot)  # it is free sooner than its ranking entry says

    def wait(self, pending: Pending) -> None:
        """Put a request into the global queue, at its place by arrival."""
        pending.standing = Standing.WAITING
        pending.at = None
        pending.lease = None
        self.queued += 1
        self.standing.waits(pending)
        self.cluster.wait(pending)

    def expected_wait_s(self) -> float:
        """The seconds that a request that arrives now should wait for a lease."""
        held_back = self.queued and self.cluster.loadable.running  # slots idle, copy engines do not
        if self.cluster.idle_slots and not held_back:
            return 0.0
        return self.pace.wait_s(self.queued)

    def recall(self, slot: Slot) -> None:
        """Move a whole local queue back to the global queue, each request to its old place."""
        self.disturbed |= slot.local.count > 0
        for pending in sorted(slot.local, key=lambda pending: pending.seq):
            self.take(pending)
            self.wait(pending)

    # -- parts ----------------------------------------------------------------------------------

    def _lease(
        self, slot: Slot, models: tuple[ModelId, ...], *, beside: bool = False
    ) -> ActiveLease:
        self._last_lease += 1
        lease = ActiveLease(LeaseId(self._last_lease), slot, models)
        lease.beside = beside
        self.leases[lease.id] = lease
        return lease

    def _estimate(
        self, bundle: Bundle, batch: int, slot: Slot, decision: Place | LoadBeside
    ) -> Estimate:
        if isinstance(decision, LoadBeside) or decision.configuration is None:
            return self.cluster.estimate(bundle, batch, slot)
        ran = decision.configuration._replace(batch=batch)
        profiles, gpu_type = self.cluster.profiles, slot.gpu.spec.gpu_type
        run_s = estimates.configured_s(profiles, bundle.models, ran, gpu_type)
        return Estimate(self.cluster.load_s(bundle, slot), run_s)

    def _wake(self, at_s: float, now: float, out: list[Action]) -> None:
        """Have the policy run then, unless it runs sooner anyway, and can ask again."""
        if now < self._wakes_s - _EARLY_S and self._wakes_s <= at_s:
            return
        self._wakes_s = at_s
        out.append(SetTimer(at_s, TimerFired()))

    def _configure(self, lease: ActiveLease, decision: Place, requests: int) -> None:
        more = tuple([self.cluster.slots[other.id] for other in decision.more_slots])
        assert all(other.idle for other in more), "a further slot has no room"
        occupation.configure(lease, decision.configuration, more)
        for other in more:
            other.frequency += requests

    def _computes(self, lease: ActiveLease, now: float) -> None:
        """What a lease was beside the runs for is loaded: from now on it has a part in them.

        If others run there now, the GPU's workers take turns; no further lease is given meanwhile.
        """
        slot = lease.slot
        lease.beside = False
        slot.copying -= 1
        lease.begins_s = max(now, slot.free_s)
        lease.due_s = slot.free_s = lease.begins_s + lease.run_s
        if self.meter is not None:
            self.meter.computes(lease, now)
        if slot.computing > slot.capacity:
            self.standing.recall(slot)
        self.cluster.settle(slot)

    def _plan(self, bundle: Bundle, slot: Slot, now: float, *, spare_waiting: bool) -> LoadPlan:
        plan = self.cluster.index.plan(
            slot.gpu.cache, bundle.needs, now, spare_waiting=spare_waiting
        )
        assert plan is not None, f"{bundle.models} cannot fit {slot.gpu.spec.id} now"
        return plan

    def _occupy(self, lease: ActiveLease, now: float, load_s: float, run_s: float) -> None:
        """The lease loads at once, and runs once it is loaded and earlier leases have ended."""
        slot, index = lease.slot, self.cluster.index
        if self.idle.active:
            self.idle.begun(lease.models, now)
        for model in lease.models:
            index.touch(slot.gpu.cache, model, now)
            index.use(slot.gpu.cache, model, +1)
        lease.run_s = run_s
        occupation.occupy(self.cluster, lease, now, load_s)
        if self.meter is not None:
            self.meter.began(lease, now)

    def _explain(
        self, pending: Pending, slot: Slot, rule: str, now: float, plan: LoadPlan | None
    ) -> Explanation | None:
        if pending.request.id not in self._watched:
            return None
        victims = plan.victims if plan is not None else ()
        reasons = Reasons(self.policy_name, rule, self.visits.count(pending.seq), victims)
        return explain(self.cluster, pending, slot, now, reasons)
