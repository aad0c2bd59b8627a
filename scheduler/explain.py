"""Why a request went where it went: the candidates as they stood at the decision."""

from collections.abc import Iterator
from dataclasses import dataclass

from cache_manager.model import ModelId
from scheduler.cluster import Cluster
from scheduler.model import Candidate, Explanation
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
    candidates = sorted(
        _candidates(cluster, pending, now), key=lambda found: (found.finish_s, found.slot)
    )
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
        candidates=tuple(candidates),
        victims=reasons.victims,
    )


def _candidates(cluster: Cluster, pending: Pending, now: float) -> Iterator[Candidate]:
    for slot in cluster.slots.values():
        if not slot.gpu.active or slot.gpu.size_class < pending.bundle.size_class:
            continue
        cached = slot.holds(pending.bundle.models)
        yield Candidate(
            slot=slot.id,
            idle=slot.idle,
            cached=cached,
            frequency=slot.frequency,
            wait_s=0.0 if slot.idle else slot.wait_s(now),
            load_s=0.0 if cached else cluster.missing_load_s(pending.bundle, slot),
            run_s=cluster.profiles.estimate_run_s(
                pending.bundle.models, pending.request.batch, slot.gpu.spec.gpu_type
            ),
        )
