"""Explains a placement: the candidate slots as they were at the decision."""

from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from operator import itemgetter

from cache_manager.model.ids import ModelId
from scheduler.core.cluster_state import ClusterState
from scheduler.core.cluster_view import ClusterView
from scheduler.core.request_queue import Pending, Standing, Visits
from scheduler.core.slots import Slot
from scheduler.model.values import Estimate, Explanation, RequestId, SlotCandidate, SlotId
from scheduler.policies.placement_policy import Policy, RequestView, View, WeighedSlot

_Weighed = Callable[[View, RequestView], Sequence[WeighedSlot]]


class PlacementReasons:
    """Explains the placements of the requests that are `watched`, under the policy in force."""

    def __init__(self, view: ClusterView, visits: Visits, watched: Container[RequestId]) -> None:
        self._view = view
        self._visits = visits
        self._watched = watched
        self._policy = ""
        self._weighed: _Weighed | None = None

    def obey(self, policy: Policy, name: str) -> None:
        self._policy = name
        self._weighed = getattr(policy, "weighed", None)  # see `WeighingPolicy`

    def watches(self, pending: Pending) -> bool:
        return pending.request.id in self._watched

    def explain(
        self,
        cluster: ClusterState,
        pending: Pending,
        slot: Slot,
        now: float,
        rule: str,
        victims: tuple[ModelId, ...],
        held: tuple[float, str],
    ) -> Explanation:
        """All slots that could take the request, soonest finish first; reads every slot.

        It must be asked before the decision is carried out.
        """
        waits = pending.standing is Standing.WAITING
        queue = cluster.waiting if waits else slot.local
        terms: dict[SlotId, dict[str, float]] = {}
        if self._weighed is not None and waits:
            terms = {weighed.slot: weighed.terms for weighed in self._weighed(self._view, pending)}
        return Explanation(
            request=pending.request.id,
            decided_s=now,
            waited_s=now - pending.arrived_s,
            policy=self._policy,
            rule=rule,
            chosen=slot.id,
            visits=self._visits.count(pending.seq),
            queue_length=len(queue),
            ahead=queue.ahead_of(pending),
            candidates=_candidates(cluster, pending, now, terms),
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
