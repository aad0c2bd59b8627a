"""Explains a placement: the candidate slots as they were at the decision."""

from collections.abc import Hashable, Mapping, Sequence
from operator import itemgetter

from cache_manager.model.ids import ModelId
from scheduler.cluster.request_queue import Pending, Standing
from scheduler.cluster.slots import Slot
from scheduler.cluster.state import ClusterState
from scheduler.model.values import Estimate, Explanation, SlotCandidate, SlotId
from scheduler.policies.placement_policy import WeighedSlot


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
            copy_wait_s = max(0.0, gpu.copied_s - now)
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
