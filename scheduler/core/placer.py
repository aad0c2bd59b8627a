"""Carries out what a policy decides: placements, loads, local queues, visits, prefetches."""

from collections.abc import Hashable, Mapping, Sequence
from operator import itemgetter

from cache_manager.model.ids import ModelId, Tier
from cache_manager.residency import LoadPlan
from scheduler.cluster import side_by_side
from scheduler.cluster.request_queue import (
    Bundle,
    Pending,
    QueuePace,
    Standing,
    of_one_function,
)
from scheduler.cluster.slots import ActiveLease, Slot
from scheduler.cluster.state import ClusterState
from scheduler.cluster.view import View
from scheduler.estimates import estimate as estimates
from scheduler.features.billing.use_meter import UseMeter
from scheduler.features.handover import Handover
from scheduler.features.staged_exit import StagedExit
from scheduler.features.standing_leases import StandingLeases
from scheduler.features.tenants.tenancy import Tenancy
from scheduler.model.actions import Action, Dispatch, EnqueueLocally, Prepare, SetTimer
from scheduler.model.events import TimerFired
from scheduler.model.values import (
    CoreSettings,
    Estimate,
    Explanation,
    LeaseId,
    LeaseUse,
    ModelLoad,
    SlotCandidate,
    SlotId,
    StandingTerms,
)
from scheduler.policies.placement_policy import (
    Decision,
    LoadBeside,
    Place,
    Policy,
    Prefetch,
    Queue,
    Skip,
    WeighedSlot,
)

# A timer may fire so much too early.
_EARLY_S = 0.001


class Placer:
    """Applies one decision at a time to the cluster, and returns the actions that carry it out."""

    def __init__(
        self, cluster: ClusterState, settings: CoreSettings, policy: Policy, policy_name: str
    ) -> None:
        self.cluster = cluster
        self.policy = policy
        self.policy_name = policy_name
        self._view = View(cluster)
        self.standing = StandingLeases(settings.standing)
        self.tenancy = Tenancy(cluster, self.standing)
        self.exits = StagedExit(cluster, settings.exit_rule)
        self.leases: dict[LeaseId, ActiveLease] = {}
        self._watched = settings.explain
        self._counts_dispatches = settings.counts_dispatches
        self.queued = 0
        self.pace = QueuePace()
        self.meter: UseMeter | None = None
        self.disturbed = False
        self.last_lease = settings.first_lease - 1
        self.handover = Handover(settings.first_lease)
        self._wakes_s = 0.0

    def decide(self, now: float, out: list[Action]) -> None:
        """Let the policy in force decide; each decision is carried out before the next one."""
        for decision in self.policy.decide(self._view):
            self._apply(decision, now, out)

    def _apply(self, decision: Decision, now: float, out: list[Action]) -> None:
        if isinstance(decision, Place | LoadBeside):
            self._place(of_one_function(decision.requests), decision, now, out)
        elif isinstance(decision, Queue):
            self._enqueue(decision, now, out)
        elif isinstance(decision, Skip):
            before = decision.before
            boundary = self.cluster.latest_seq + 1 if before is None else before.seq
            self.cluster.visits.skip(boundary, decision.limit)
        elif isinstance(decision, Prefetch):
            self.prefetch(decision.model, decision.slot, now, out)
        else:
            self.wake(decision.at_s, now, out)

    # -- a lease for requests -------------------------------------------------------------------

    def _place(
        self,
        chosen: tuple[Pending, ...],
        decision: Place | LoadBeside,
        now: float,
        out: list[Action],
    ) -> None:
        """Give requests of the same models one lease on a slot with room, or beside its runs."""
        first, slot, beside = chosen[0], decision.slot, isinstance(decision, LoadBeside)
        bundle = first.bundle
        assert slot.loadable if beside else slot.idle, f"{slot.id} has no room for another lease"
        if len(chosen) > 1:
            assert all(pending.bundle is bundle for pending in chosen), "a batch of several models"
        from_local = first.standing is Standing.LOCAL
        hit = slot.holds(bundle.models)
        if self.tenancy.on and not self._has_quota(chosen, slot, now, out):
            return
        plan = None if hit else self._plan(bundle, slot, now, spare_waiting=not from_local)
        held_elsewhere = not hit and self.cluster.index.held(bundle.models)
        explanation = self._explain(first, slot, decision.rule, plan)
        for pending in chosen:
            self.take(pending)
        batch = first.request.batch if len(chosen) == 1 else sum(p.request.batch for p in chosen)
        estimate = self._estimate(bundle, batch, slot, decision)
        lease = self._lease(slot, bundle.models, beside=beside)
        if isinstance(decision, Place) and (decision.more_slots or decision.configuration):
            self._configure(lease, decision, len(chosen))
        if plan is not None:
            self._load(lease, plan, now, out)
        elif slot.leases or len(slot.gpu.slots) > 1:
            under_way_s = _under_way_s(slot, bundle.models, now)
            estimate = Estimate(under_way_s, estimate.run_s)
        lease.give_to(chosen)
        if not from_local or self._counts_dispatches:
            slot.frequency += len(chosen)
        self._occupy(lease, now, estimate.load_s, estimate.run_s)
        self.count_placed(first.request.function, len(chosen), now)
        lease.dispatch = Dispatch(
            lease.id,
            slot.id,
            slot.gpu.spec.id,
            slot.gpu.spec.node,
            (first.request.id,) if len(chosen) == 1 else tuple(p.request.id for p in chosen),
            hit,
            held_elsewhere,
            estimate,
            decision.rule,
            explanation,
            bundle.models,
            self._stands(lease, chosen),
            first.request.function if lease.is_shared or first.request.caller else "",
            lease.more_ids,
            lease.configuration,
            lease.own,
        )
        out.append(lease.dispatch)
        if lease.dispatch.stands is not None:
            self.standing.given(lease, first)

    def count_placed(self, function: str, count: int, now: float) -> None:
        """Requests of one function have what they asked for: how fast do the others move?"""
        if self.contending:
            self.pace.placed(count, now)
        if self.tenancy.takes_turns:
            self.tenancy.owners.count_placed(function, count, now)

    def kept(self, lease: ActiveLease, since_s: float, now: float) -> None:
        """No call has run since then under a lease that is kept."""
        if self.meter is not None:
            self.meter.kept(lease, since_s, now)
        if self.tenancy.on:
            self.tenancy.rests(lease, since_s)

    def called(self, lease: ActiveLease, use: LeaseUse, now: float) -> None:
        """A call began, and perhaps ended, under a lease that its caller keeps.

        Several may run at once: it counts from when those that are known have ended.
        """
        slot = lease.slot
        for model in lease.models:
            if model in slot.residents:  # else its worker has died
                self.cluster.index.touch(slot.gpu.cache, model, now)
        slot.frequency += 1
        self.standing.used(lease)
        ended_s = now if use.ended_s is None else min(use.ended_s, now)
        began_s = min(max(use.began_s, lease.called_until_s), ended_s)
        lease.called_until_s = max(lease.called_until_s, ended_s)
        if self.meter is not None:
            self.meter.called(lease, use, began_s, ended_s, now)
        if self.tenancy.on:
            self.tenancy.called(lease, began_s, ended_s)

    def computed(self, lease: ActiveLease, computed_s: float, now: float) -> None:
        """Calls ran for so long, since it was last said, under a lease of an own process."""
        most_s = max(0.0, now - lease.there_s - lease.computed_s)
        computed_s = min(max(0.0, computed_s), most_s)
        lease.computed_s += computed_s
        if self.meter is not None:
            self.meter.computed(lease, computed_s, now)
        if self.tenancy.on:
            self.tenancy.computed(lease, computed_s)

    def rest_if_own(self, lease: ActiveLease, now: float) -> None:
        """An own process has a lease whose models are there: it is kept while no call runs."""
        if lease.own and not lease.loading:
            self.kept(lease, now, now)

    def prefetch(self, model: ModelId, slot: Slot, now: float, out: list[Action]) -> bool:
        """Load a model without a request; the slot is busy until its manager reports it freed."""
        bundle = self.cluster.bundle((model,))
        if slot.holds(bundle.models) or not slot.idle:
            return False
        plan = self.cluster.index.plan(slot.gpu.cache, bundle.needs, now)
        if plan is None:
            return False
        if self.tenancy.on:
            if not self.tenancy.make_room_ahead(model, plan.loads, slot, out):
                return False
            plan = self._plan(bundle, slot, now, spare_waiting=True)
        lease = self._lease(slot, bundle.models)
        load_s = self._load(lease, plan, now, out, prefetch=True)
        self._occupy(lease, now, load_s, 0.0)
        return True

    def is_needed(self, lease: ActiveLease) -> bool:
        """Whether some request has not given this lease back."""
        return bool(lease.requests) or (lease.is_shared and self.handover.is_awaited(lease.id))

    def end(self, lease: ActiveLease, now: float) -> None:
        """A lease is over: take it off its slots, and out of all books."""
        slot = lease.slot
        self.standing.ended(lease, now)
        if self.meter is not None:
            self.meter.ended(lease, now)
        if self.tenancy.on:
            self.tenancy.ended(lease)
        self.handover.ended(lease.id)
        del self.leases[lease.id]
        cache = slot.gpu.cache
        for model in lease.models:
            self.cluster.index.use(cache, model, -1)
        if self.exits.active:
            self.exits.ended(slot.gpu, lease.models, now)
        self.cluster.release(lease, now)

    def loaded(self, lease: ActiveLease, model: ModelId, now: float) -> None:
        """A model that a lease waited for is loaded: correct when its slot will be free."""
        if lease.loading.pop(model, None) is None or lease.loading:
            return
        if self.meter is not None:
            self.meter.loaded(lease, now)
        lease.there_s = now
        if lease.beside:
            self._computes(lease, now)
        else:
            due_s = max(now, lease.begins_s) + lease.run_s
            if due_s != lease.due_s:
                self.cluster.postpone(lease, due_s, now)
        self.rest_if_own(lease, now)

    def stand_aside(self, lease: ActiveLease, now: float) -> None:
        """What it loads makes no progress: its part in the compute is others' until it is there."""
        if lease.beside:
            return
        self.cluster.stands_aside(lease, now)
        if self.meter is not None:
            self.meter.stands_aside(lease, now)
        if self.tenancy.on:
            self.tenancy.stands_aside(lease)
        self.disturbed = True

    # -- queues ---------------------------------------------------------------------------------

    def _enqueue(self, decision: Queue, now: float, out: list[Action]) -> None:
        cluster, pending, slot, rule = self.cluster, decision.request, decision.slot, decision.rule
        explanation = self._explain(pending, slot, rule, None)
        self.take(pending)
        pending.standing = Standing.LOCAL
        pending.at = slot.id
        pending.wait_s = cluster.run_s(pending.bundle, pending.request.batch, slot)
        if slot.at_once:
            pending.wait_s /= slot.capacity
        slot.frequency += not self._counts_dispatches
        slot.local_s += pending.wait_s
        slot.given += 1
        slot.local.add(pending, slot.given)
        cluster.note_local(slot, now)
        self.queued += 1
        for model in pending.bundle.models:
            cluster.index.wait(slot.gpu.cache, model, +1)
        cluster.settle(slot)
        self.standing.recall(slot, pending)
        out.append(EnqueueLocally(pending.request.id, slot.id, rule, explanation))

    def take(self, pending: Pending) -> None:
        """Take a request out of its queue, global or local."""
        self.queued -= 1
        if pending.standing is Standing.HELD:
            self.tenancy.let_go(pending)
        elif pending.standing is Standing.WAITING:
            self.standing.waits_no_more(pending)
            self.cluster.waits_no_more(pending)
        else:
            self._take_from_slot(pending)
        if not self.contending:
            self.pace.pause()

    def _take_from_slot(self, pending: Pending) -> None:
        assert pending.standing is Standing.LOCAL, f"{pending.id} waits in no queue"
        assert pending.at is not None
        slot = self.cluster.slots[pending.at]
        slot.local.remove(pending)
        self.cluster.note_local(slot, self.cluster.now)
        slot.local_s = slot.local_s - pending.wait_s if slot.local.count else 0.0
        for model in pending.bundle.models:
            self.cluster.index.wait(slot.gpu.cache, model, -1)
        if not slot.idle:
            self.cluster.settle(slot)  # it is free sooner than its ranking entry says

    def wait(self, pending: Pending) -> None:
        """Put a request into the global queue, at its place, or hold it back until its turn."""
        self.queued += 1
        if self.tenancy.on and not self.tenancy.order.is_exposed(pending):
            self.tenancy.hold(pending)
            return
        pending.standing = Standing.WAITING
        pending.at = pending.lease = None
        self.standing.waits(pending)
        self.cluster.wait(pending)

    @property
    def contending(self) -> int:
        """How many requests wait for a GPU; others wait until a quota of GPU time has room."""
        return self.queued - self.tenancy.order.paused.count

    def expected_wait_s(self, function: str) -> float:
        """The seconds that a request of this function that arrives now should wait for a lease."""
        # A slot may be idle, and its GPU's copy engine not.
        copies_wait = self.contending and self.cluster.loadable.running
        if self.cluster.idle_slots and not copies_wait:
            return 0.0
        if self.tenancy.takes_turns:
            return self.tenancy.owners.wait_s(function, self.pace)
        return self.pace.wait_s(self.contending)

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
        self.last_lease += 1
        lease = ActiveLease(LeaseId(self.last_lease), slot, models)
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

    def wake(self, at_s: float, now: float, out: list[Action]) -> None:
        """Have the policy run then, unless it runs sooner anyway, and can ask again."""
        if now < self._wakes_s - _EARLY_S and self._wakes_s <= at_s:
            return
        self._wakes_s = at_s
        out.append(SetTimer(at_s, TimerFired()))

    def _configure(self, lease: ActiveLease, decision: Place, requests: int) -> None:
        more = tuple(decision.more_slots)
        assert all(other.idle for other in more), "a further slot has no room"
        lease.configure(decision.configuration, more)
        for other in more:
            other.frequency += requests

    def _computes(self, lease: ActiveLease, now: float) -> None:
        """What a lease was beside the runs for is loaded: from now on it has a part in them.

        If others run there now, the GPU's workers take turns, unless the slot's leases run at once;
        no further lease is given meanwhile.
        """
        slot = lease.slot
        lease.computes(now)
        if self.meter is not None:
            self.meter.computes(lease, now)
        if self.tenancy.on:
            self.tenancy.computes(lease)
        if slot.computing > slot.capacity:
            self.standing.recall(slot)
        self.cluster.settle(slot)

    def _plan(self, bundle: Bundle, slot: Slot, now: float, *, spare_waiting: bool) -> LoadPlan:
        plan = self.cluster.index.plan(
            slot.gpu.cache, bundle.needs, now, spare_waiting=spare_waiting
        )
        assert plan is not None, f"{bundle.models} cannot fit {slot.gpu.spec.id} now"
        return plan

    def _has_quota(
        self, chosen: tuple[Pending, ...], slot: Slot, now: float, out: list[Action]
    ) -> bool:
        """Have owners' idle models leave that their quotas leave no room for beside a load.

        Where that is not enough, or other quotas are used up, the requests are held back.
        """
        order = self.tenancy.order
        over = tuple([pending for pending in chosen if order.lost_its_turn(pending, now)])
        if not over:
            residents = slot.residents
            loads = [need for need in chosen[0].bundle.needs if need[0] not in residents]
            if not loads or self.tenancy.make_room(chosen, loads, slot, out):
                return True
        for pending in over or chosen:
            self.take(pending)
            self.queued += 1
            self.tenancy.divert(pending, stuck=not over)
        return False

    def _load(
        self,
        lease: ActiveLease,
        plan: LoadPlan,
        now: float,
        out: list[Action],
        *,
        prefetch: bool = False,
    ) -> float:
        """Evict the victims and reserve memory; returns the expected seconds of the load."""
        cluster, gpu = self.cluster, lease.slot.gpu
        node = gpu.spec.node
        for victim in plan.victims:
            cluster.evict(gpu, victim)
        for ended in (*plan.ends, *plan.emptied.values()):
            cluster.index.drop_context(gpu.cache, ended)
        total_s = 0.0
        loads = []
        for model, size_bytes in plan.loads:
            source, left = cluster.index.tier(node, model), plan.emptied.get(model)
            if left is not None:
                if source is Tier.HOST:
                    source = Tier.CONTEXT
                if left != model:
                    self.exits.stored(node, left, cluster.index.tier(node, left), now)
            load_s = cluster.profiles.load_s(model, source)
            total_s += load_s
            gpu.loads[model] = lease.loading[model] = now + total_s
            if lease.beside:
                gpu.arriving.add(model)
            cluster.admit(gpu, model, size_bytes, now, load_s)
            loads.append(ModelLoad(model, size_bytes, source, left))
        out.append(
            Prepare(
                lease.slot.id,
                gpu.spec.id,
                lease.id,
                plan.victims,
                tuple(loads),
                prefetch,
                plan.ends,
                lease.beside,
                lease.more_ids,
                lease.configuration,
            )
        )
        return total_s

    def _stands(self, lease: ActiveLease, chosen: tuple[Pending, ...]) -> StandingTerms | None:
        if len(chosen) > 1 or lease.beside or lease.more or lease.configuration is not None:
            return None
        if self.tenancy.on and self.tenancy.yields(lease.id):
            return None
        return self.standing.terms_for(chosen[0], lease.slot)

    def _occupy(self, lease: ActiveLease, now: float, load_s: float, run_s: float) -> None:
        slot, index = lease.slot, self.cluster.index
        if self.exits.active:
            self.exits.begun(lease.models, now)
        for model in lease.models:
            index.touch(slot.gpu.cache, model, now)
            index.use(slot.gpu.cache, model, +1)
        lease.run_s = run_s
        if slot.at_once and run_s and not lease.beside:
            side_by_side.prolong(self.cluster, lease.models, slot, now)
        self.cluster.occupy(lease, now, load_s)
        if self.tenancy.on and lease.requests:
            self.tenancy.granted(lease, lease.requests, max(0.0, lease.due_s - now))
        if self.meter is not None:
            self.meter.began(lease, now)
        self.rest_if_own(lease, now)

    def _explain(
        self, pending: Pending, slot: Slot, rule: str, plan: LoadPlan | None
    ) -> Explanation | None:
        if pending.request.id not in self._watched:
            return None
        weigh = getattr(self.policy, "weighed", None)
        weighed: Sequence[WeighedSlot] = ()
        if weigh is not None and pending.standing is Standing.WAITING:
            weighed = weigh(self._view, pending)
        victims = plan.victims if plan is not None else ()
        held = self.tenancy.order.held_back(pending)
        return explain(self.cluster, self.policy_name, pending, slot, rule, weighed, victims, held)


def _under_way_s(slot: Slot, models: tuple[ModelId, ...], now: float) -> float:
    """Seconds until models that another lease on this GPU is loading will be resident."""
    ends = [
        ends_s
        for other in slot.gpu.slots
        for lease in other.leases.values()
        for model, ends_s in lease.loading.items()
        if model in models
    ]
    return max(0.0, max(ends) - now) if ends else 0.0


def explain(
    cluster: ClusterState,
    policy: str,
    pending: Pending,
    slot: Slot,
    rule: str,
    weighed: Sequence[WeighedSlot],
    victims: tuple[ModelId, ...],
    held: tuple[float, str],
) -> Explanation:
    """All slots that could take the request, soonest finish first; reads every slot.

    It must be asked before the decision is carried out.
    """
    now = cluster.now
    queue = cluster.waiting if pending.standing is Standing.WAITING else slot.local
    return Explanation(
        request=pending.request.id,
        decided_s=now,
        waited_s=now - pending.arrived_s,
        policy=policy,
        rule=rule,
        chosen=slot.id,
        visits=cluster.visits.count(pending.seq),
        queue_length=len(queue),
        ahead=queue.ahead_of(pending),
        candidates=_candidates(cluster, pending, now, {each.slot: each.terms for each in weighed}),
        victims=victims,
        held_s=held[0],
        held_for=held[1],
    )


def _candidates(
    cluster: ClusterState, pending: Pending, now: float, terms: Mapping[SlotId, dict[str, float]]
) -> tuple[SlotCandidate, ...]:
    """Every slot whose GPU could hold the models, in the order in which the request would end."""
    models, size_class = pending.bundle.models, pending.bundle.size_class
    candidates: list[tuple[float, SlotId, SlotCandidate]] = []
    estimates: dict[Hashable, Estimate] = {}
    beside = cluster.loadable.running
    for slot in cluster.slots.values():
        gpu = slot.gpu
        if not gpu.active or gpu.size_class < size_class:
            continue
        cached = slot.holds(models)
        load_s, run_s = _estimate(cluster, pending, slot, estimates)
        wait_s = 0.0 if slot.idle else slot.wait_s(now)
        copy_wait_s = 0.0
        if gpu.loads:
            copy_wait_s = max(0.0, max(gpu.loads.values()) - now)
            if slot.awaits(models):
                wait_s = max(wait_s, slot.serves_at_s(models) - now)
        candidate = SlotCandidate(
            slot.id,
            slot.idle,
            cached,
            slot.frequency,
            wait_s,
            load_s,
            run_s,
            copy_wait_s,
            beside,
            terms.get(slot.id),
        )
        candidates.append((candidate.finish_s, slot.id, candidate))
    candidates.sort(key=_SOONEST)
    return tuple([candidate for _, _, candidate in candidates])


def _estimate(
    cluster: ClusterState,
    pending: Pending,
    slot: Slot,
    known: dict[Hashable, Estimate],
) -> Estimate:
    """The estimate of one slot, made once for all slots with the same facts."""
    bundle, batch = pending.bundle, pending.request.batch
    if len(bundle.models) > 1:  # a slot may hold some of them
        return cluster.estimate(bundle, batch, slot)
    spec = slot.gpu.spec
    key = spec.node, spec.gpu_type, slot.holds(bundle.models), slot.neighbours()
    estimate = known.get(key)
    if estimate is None:
        estimate = known[key] = cluster.estimate(bundle, batch, slot)
    return estimate


_SOONEST = itemgetter(0, 1)
