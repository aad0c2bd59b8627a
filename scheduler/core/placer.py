"""Carries out what a policy decides: placements, loads, local queues, visits, prefetches."""

from collections.abc import Hashable, Mapping, Sequence
from operator import itemgetter

from cache_manager.model.ids import ModelId, Tier
from cache_manager.residency import LoadPlan
from scheduler.cluster.request_queue import Pending, Standing
from scheduler.cluster.slots import ActiveLease, Slot
from scheduler.cluster.view import View
from scheduler.core.lifecycle import Lifecycle
from scheduler.model.actions import EnqueueLocally, Prepare
from scheduler.model.values import (
    CoreSettings,
    Estimate,
    Explanation,
    ModelLoad,
    SlotCandidate,
    SlotId,
)
from scheduler.policies.placement_policy import (
    Place,
    Policy,
    Prefetch,
    Queue,
    Skip,
    WeighedSlot,
)


class Placer:
    """Applies one decision at a time to the cluster, and says what carries it out."""

    def __init__(
        self, lifecycle: Lifecycle, settings: CoreSettings, policy: Policy, policy_name: str
    ) -> None:
        self.policy = policy
        self.policy_name = policy_name
        self._cluster = lifecycle.cluster
        self._lifecycle = lifecycle
        self._view = View(lifecycle.cluster)
        self._watched = settings.explain
        self._counts_dispatches = settings.counts_dispatches

    def decide(self) -> None:
        """Let the policy in force decide; each decision is carried out before the next one."""
        for decision in self.policy.decide(self._view):
            if isinstance(decision, Place):
                self._place(_of_one_function(decision.requests), decision)
            elif isinstance(decision, Queue):
                self._enqueue(decision)
            elif isinstance(decision, Skip):
                before, cluster = decision.before, self._cluster
                boundary = cluster.latest_seq + 1 if before is None else before.seq
                cluster.visits.skip(boundary, decision.limit)
            elif isinstance(decision, Prefetch):
                self.prefetch(decision.model, decision.slot)
            else:
                self._lifecycle.wake(decision.at_s)

    # -- leases ---------------------------------------------------------------------------------

    def _place(self, chosen: tuple[Pending, ...], decision: Place) -> None:
        """Give requests of the same models one lease on a slot with room, or beside its runs."""
        cluster, lifecycle = self._cluster, self._lifecycle
        first, slot = chosen[0], decision.slot
        bundle, has_room = first.bundle, slot.loadable if decision.beside else slot.idle
        assert has_room, f"{slot.id} has no room for another lease"
        if len(chosen) > 1:
            assert all(pending.bundle is bundle for pending in chosen), "a batch of several models"
        from_local = first.standing is Standing.LOCAL
        hit = slot.holds(bundle.models)
        for layer in lifecycle.hooks["allows"]:
            if not layer.allows(chosen, bundle, slot):
                return
        plan, held_elsewhere, explanation = None, False, None
        if not hit:
            cache, spares = slot.gpu.cache, not from_local
            plan = cluster.index.plan(cache, bundle.needs, cluster.now, spare_waiting=spares)
            assert plan is not None, f"{bundle.models} cannot fit {cache.id} now"
            held_elsewhere = cluster.index.held(bundle.models)
        if first.id in self._watched:
            explanation = self._explain(first, slot, decision.rule, plan)
        for pending in chosen:
            lifecycle.take(pending)
        run_s = self._run_s(chosen, decision)
        lease = cluster.new_lease(slot, bundle.models, chosen, run_s)
        lease.beside = decision.beside
        if decision.more_slots or decision.configuration:
            _configure(lease, decision, len(chosen))
        load_s = self._load(lease, plan) if plan is not None else _joined_s(lease, cluster.now)
        if not from_local or self._counts_dispatches:
            slot.frequency += len(chosen)
        self._occupy(lease, load_s)
        lifecycle.placed(first.request.function, len(chosen))
        lifecycle.dispatch(
            lease,
            Estimate(load_s, run_s),
            decision.rule,
            hit=hit,
            held_elsewhere=held_elsewhere,
            explanation=explanation,
            stands=lifecycle.stands(lease),
            function=first.request.function if lease.is_shared or first.request.caller else "",
        )

    def prefetch(self, model: ModelId, slot: Slot) -> bool:
        """Load a model without a request; the slot is busy until its manager reports it freed."""
        cluster, bundle = self._cluster, self._cluster.bundle((model,))
        if slot.holds(bundle.models) or not slot.idle:
            return False
        if cluster.index.plan(slot.gpu.cache, bundle.needs, cluster.now) is None:
            return False
        for layer in self._lifecycle.hooks["allows"]:
            if not layer.allows((), bundle, slot):
                return False
        plan = cluster.index.plan(slot.gpu.cache, bundle.needs, cluster.now)
        assert plan is not None, f"{model} cannot fit {slot.gpu.spec.id} now"
        lease = cluster.new_lease(slot, bundle.models)
        self._occupy(lease, self._load(lease, plan, prefetch=True))
        return True

    def _occupy(self, lease: ActiveLease, load_s: float) -> None:
        """A new lease begins: it has its slots, and uses its models."""
        cluster, slot, now = self._cluster, lease.slot, self._cluster.now
        for model in lease.models:
            cluster.index.touch(slot.gpu.cache, model, now)
            cluster.index.use(slot.gpu.cache, model, +1)
        if slot.at_once and lease.run_s and not lease.beside:
            for other, prolonged_s in self._view.prolonged(lease.models, slot):
                other.due_s += prolonged_s
        cluster.occupy(lease, load_s)
        for layer in self._lifecycle.hooks["granted"]:
            layer.granted(lease)
        if lease.own:
            self._lifecycle.rest_if_own(lease)

    def _enqueue(self, decision: Queue) -> None:
        cluster, pending, slot, rule = self._cluster, decision.request, decision.slot, decision.rule
        explanation = None
        if pending.id in self._watched:
            explanation = self._explain(pending, slot, rule, None)
        self._lifecycle.take(pending)
        pending.standing = Standing.LOCAL
        pending.at = slot.id
        pending.wait_s = self._view.run_s(pending, slot)
        if slot.at_once:
            pending.wait_s /= slot.capacity
        slot.frequency += not self._counts_dispatches
        slot.local_s += pending.wait_s
        slot.given += 1
        slot.local.add(pending, slot.given, cluster.uncontended_s)
        cluster.contending += 1
        for model in pending.bundle.models:
            cluster.index.wait(slot.gpu.cache, model, +1)
        cluster.settle(slot)
        self._lifecycle.needs(slot, pending)
        cluster.out.append(EnqueueLocally(pending.request.id, slot.id, rule, explanation))

    # -- parts ----------------------------------------------------------------------------------

    def _run_s(self, chosen: tuple[Pending, ...], decision: Place) -> float:
        """The expected seconds of one run of all these requests."""
        models, slot, given = chosen[0].models, decision.slot, decision.configuration
        batch = chosen[0].request.batch
        if len(chosen) > 1:
            batch = sum([pending.request.batch for pending in chosen])
        profiles, gpu_type = self._cluster.profiles, slot.gpu.spec.gpu_type
        if given is None:
            return profiles.runs_s(models, batch, gpu_type, slot.neighbours())
        return profiles.configured_runs_s(models, given._replace(batch=batch), gpu_type)

    def _load(self, lease: ActiveLease, plan: LoadPlan, *, prefetch: bool = False) -> float:
        """Evict the victims and reserve memory; returns the expected seconds of the load."""
        cluster, gpu = self._cluster, lease.slot.gpu
        index, node = cluster.index, gpu.spec.node
        for victim in plan.victims:
            cluster.evict(gpu, victim)
        for ended in (*plan.ends, *plan.emptied.values()):
            index.drop_context(gpu.cache, ended)
        total_s = 0.0
        loads = []
        for model, size_bytes in plan.loads:
            source, left = index.tier(node, model), plan.emptied.get(model)
            if left is not None:
                if source is Tier.HOST:
                    source = Tier.CONTEXT
                if left != model:
                    for layer in self._lifecycle.hooks["stored"]:
                        layer.stored(node, left, index.tier(node, left))
            times = cluster.profiles.times_s(model, source)
            total_s += times[0]
            gpu.loads[model] = lease.loading[model] = cluster.now + total_s
            if lease.beside:
                gpu.arriving.add(model)
            cluster.admit(gpu, model, size_bytes, times)
            loads.append(ModelLoad(model, size_bytes, source, left))
        cluster.out.append(
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

    def _explain(
        self, pending: Pending, slot: Slot, rule: str, plan: LoadPlan | None
    ) -> Explanation:
        """All slots that could take the request, soonest finish first; reads every slot.

        It must be asked before the decision is carried out.
        """
        cluster, now = self._cluster, self._cluster.now
        weigh = getattr(self.policy, "weighed", None)
        weighed: Sequence[WeighedSlot] = ()
        if weigh is not None and pending.standing is Standing.WAITING:
            weighed = weigh(self._view, pending)
        queue = cluster.waiting if pending.standing is Standing.WAITING else slot.local
        return Explanation(
            request=pending.id,
            decided_s=now,
            waited_s=now - pending.arrived_s,
            policy=self.policy_name,
            rule=rule,
            chosen=slot.id,
            visits=cluster.visits.count(pending.seq),
            queue_length=len(queue),
            ahead=queue.ahead_of(pending),
            candidates=self._candidates(pending, {each.slot: each.terms for each in weighed}),
            victims=plan.victims if plan is not None else (),
            held_s=pending.held_s,
            held_for=pending.held_for if pending.held_s else "",
        )

    def _candidates(
        self, pending: Pending, terms: Mapping[SlotId, dict[str, float]]
    ) -> tuple[SlotCandidate, ...]:
        """Every slot whose GPU could hold the models, soonest finish first."""
        cluster, now = self._cluster, self._cluster.now
        models, size_class = pending.models, pending.bundle.size_class
        candidates: list[tuple[float, SlotId, SlotCandidate]] = []
        estimates: dict[Hashable, Estimate] = {}
        beside = cluster.loadable is not None
        for slot in cluster.slots.values():
            gpu = slot.gpu
            if not gpu.active or gpu.size_class < size_class:
                continue
            cached = slot.holds(models)
            load_s, run_s = self._estimate(pending, slot, estimates)
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

    def _estimate(self, pending: Pending, slot: Slot, known: dict[Hashable, Estimate]) -> Estimate:
        """The estimate of one slot, made once for all slots with the same facts."""
        view, spec = self._view, slot.gpu.spec
        key: Hashable = spec.node, spec.gpu_type, slot.holds(pending.models), slot.neighbours()
        if len(pending.models) > 1:  # a slot may hold some of them
            key = slot.id
        estimate = known.get(key)
        if estimate is None:
            load_s, run_s = view.load_s(pending, slot), view.run_s(pending, slot)
            estimate = known[key] = Estimate(load_s, run_s)
        return estimate


def _configure(lease: ActiveLease, decision: Place, requests: int) -> None:
    more = tuple(decision.more_slots)
    assert all(other.idle for other in more), "a further slot has no room"
    lease.configure(decision.configuration, more)
    for other in more:
        other.frequency += requests


def _of_one_function(chosen: Sequence[Pending]) -> tuple[Pending, ...]:
    """Those of the first one's function: sessions of one function alone can share a lease."""
    if len(chosen) == 1:
        return (chosen[0],)
    function = chosen[0].request.function
    return tuple([pending for pending in chosen if pending.request.function == function])


def _joined_s(lease: ActiveLease, now: float) -> float:
    """Seconds until what others load of a lease's models is there; an own process waits as well."""
    slot, gpu = lease.slot, lease.slot.gpu
    if lease.own:
        lease.loading = {m: gpu.loads[m] for m in lease.models if m in gpu.loads}
    if not slot.leases and len(gpu.slots) == 1:
        return 0.0
    loads = [other.loading.items() for other in gpu.leases]
    ends = [ends_s for load in loads for model, ends_s in load if model in lease.models]
    return max(0.0, max(ends) - now) if ends else 0.0


_SOONEST = itemgetter(0, 1)
