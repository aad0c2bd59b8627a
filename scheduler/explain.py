"""Why a request went where it went: the candidates as they stood at the decision."""

from dataclasses import dataclass
from operator import itemgetter

from cache_manager.model import ModelId, NodeId
from scheduler.cluster import Cluster
from scheduler.model import Candidate, Explanation, SlotId
from scheduler.requests import Pending, Standing
from scheduler.slots import Slot


@dataclass(frozen=True, slots=True)
class Reasons:
    """What only the one who carries out the decision knows of it."""

    policy: str
    rule: str
    visits: int
    victims: tuple[ModelId, ...]


def explain(
    cluster: Cluster, pending: Pending, slot: Slot, now: float, reasons: Reasons
) -> Explanation:
    """All slots that could have taken the request, soonest finish first; costs a look at each."""
    queue = cluster.waiting if pending.standing is Standing.WAITING else slot.local
    return Explanation(
        request=pending.request.id,
        decided_s=now,
        waited_s=now - pending.arrived_s,
        policy=reasons.policy,
        rule=reasons.rule,
        chosen=slot.id,
        visits=reasons.visits,
        queue_length=len(queue),
        ahead=sum(1 for other in queue if other.rank < pending.rank),
        candidates=_candidates(cluster, pending, now),
        victims=reasons.victims,
    )


def _candidates(cluster: Cluster, pending: Pending, now: float) -> tuple[Candidate, ...]:
    """Nodes and GPU types are few: their seconds are worked out once, not for every slot."""
    bundle, batch = pending.bundle, pending.request.batch
    models, size_class = bundle.models, bundle.size_class
    found: list[tuple[float, SlotId, Candidate]] = []
    runs_s: dict[str, float] = {}
    loads_s: dict[NodeId, float] = {}

    def load_s(slot: Slot) -> float:
        if len(models) > 1:  # some of them may be there already
            return cluster.missing_load_s(bundle, slot)
        node = slot.gpu.spec.node
        if node not in loads_s:
            loads_s[node] = cluster.missing_load_s(bundle, slot)
        return loads_s[node]

    for slot in cluster.slots.values():
        gpu = slot.gpu
        if not gpu.active or gpu.size_class < size_class:
            continue
        spec = gpu.spec
        run_s = runs_s.get(spec.gpu_type)
        if run_s is None:
            run_s = cluster.profiles.estimate_run_s(models, batch, spec.gpu_type)
            runs_s[spec.gpu_type] = run_s
        cached = slot.holds(models)
        wait_s = 0.0 if slot.idle else slot.wait_s(now)
        missing_s = 0.0 if cached else load_s(slot)
        candidate = Candidate(slot.id, slot.idle, cached, slot.frequency, wait_s, missing_s, run_s)
        found.append((wait_s + missing_s + run_s, slot.id, candidate))
    found.sort(key=_SOONEST)
    return tuple([candidate for _, _, candidate in found])


_SOONEST = itemgetter(0, 1)
