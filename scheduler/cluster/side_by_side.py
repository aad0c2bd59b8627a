"""Runs at once on one slot: what ran beside a run, and what one more would do to the others."""

from cache_manager.model.ids import ModelId
from scheduler.cluster.slots import ActiveLease, Slot
from scheduler.cluster.state import ClusterState
from scheduler.estimates import estimate
from scheduler.estimates.resource_metrics import Metrics, scaled
from scheduler.model.events import RunFinished

# A run is reported with others, so long after its end at most.
_REPORTED_S = 0.1
# A run counts as one alone if others ran for no more than this part of its time, and as one
# beside them if they ran for at least that part; those between teach nothing.
_ALONE, _BESIDE = 0.05, 0.5
# Runs of the same models beside the same ones make one observation at first, and then one for each
# such time, which doubles up to a bound: none of the others should be forgotten for them.
_SPACING_S, _MOST_SPACING_S = 0.1, 30.0
_MOST_PAIRS = 4_096


class _PairRuns:
    """Runs since the last observation of a pair, and when the next one is due."""

    def __init__(self) -> None:
        self.next_s = 0.0
        self.spacing_s = _SPACING_S
        self.total = 0.0
        self.number = 0

    def mean_when_due(self, slowdown: float, now: float) -> float | None:
        """Count a run; the mean of those that were counted, if it is time for an observation."""
        self.total += slowdown
        self.number += 1
        if now < self.next_s:
            return None
        mean = self.total / self.number
        self.total, self.number = 0.0, 0
        self.next_s = now + self.spacing_s
        self.spacing_s = min(_MOST_SPACING_S, 2.0 * self.spacing_s)
        return mean


class SideBySide:
    """Learns from runs that had neighbours, on slots whose leases run at once."""

    def __init__(self, cluster: ClusterState) -> None:
        self._cluster = cluster
        self._pairs: dict[tuple[ModelId, ...], _PairRuns] = {}

    def is_alone(self, slot: Slot, event: RunFinished) -> bool:
        """Whether a run had the GPU to itself; if not, what that taught is learned."""
        if not slot.at_once:
            return True
        whole_s = event.run_s * event.together
        parts = ran_beside(slot, event.model, whole_s, self._cluster.now)
        if parts is None:
            return False
        share = sum(parts.values())
        if share <= _ALONE:
            return True
        if share >= _BESIDE:
            self._learn(slot, event, parts)
        return False

    def _learn(
        self, slot: Slot, event: RunFinished, parts: dict[tuple[ModelId, ...], float]
    ) -> None:
        profiles, gpu_type = self._cluster.profiles, slot.gpu.spec.gpu_type
        alone_s = profiles.alone_s(event.model, event.batch * event.together, gpu_type)
        own = profiles.metrics(event.model)
        if not alone_s or own is None:
            return
        neighbours: list[Metrics] = []
        for models, part in parts.items():
            metrics = profiles.mean_metrics(models)
            if metrics is None:
                return
            neighbours.append(scaled(metrics, part))
        slowed = event.run_s * event.together / alone_s
        mean = self._pair(event.model, parts).mean_when_due(slowed, self._cluster.now)
        if mean is not None:
            profiles.interference.observe(gpu_type, own, neighbours, mean)

    def _pair(self, model: ModelId, parts: dict[tuple[ModelId, ...], float]) -> _PairRuns:
        name = (model, *sorted([other for models in parts for other in models]))
        pair = self._pairs.get(name)
        if pair is None:
            if len(self._pairs) >= _MOST_PAIRS:
                self._pairs.clear()
            pair = self._pairs[name] = _PairRuns()
        return pair


def ran_beside(
    slot: Slot, model: ModelId, whole_s: float, now: float
) -> dict[tuple[ModelId, ...], float] | None:
    """What ran beside a run that has just been reported, and for which part of its time.

    None if its lease is not known. Leases of the same model are left out: its calls take turns.
    """
    own: ActiveLease | None = None
    for lease in slot.leases.values():
        if (
            model in lease.models
            and not lease.beside
            and (own is None or lease.there_s < own.there_s)
        ):
            own = lease
    if own is None:
        return None
    begun_s = max(own.there_s, now - whole_s - _REPORTED_S)
    span_s = now - begun_s
    if span_s <= 0.0:
        return None
    parts: dict[tuple[ModelId, ...], float] = {}
    for lease in slot.leases.values():
        runs = not (lease is own or lease.beside or lease.loading)
        if runs and model not in lease.models:
            _add(parts, lease.models, (now - max(begun_s, lease.there_s)) / span_s)
    for ended in slot.ended:
        if model not in ended.models:
            both_s = ended.ended_s - max(begun_s, ended.begun_s)
            _add(parts, ended.models, both_s / span_s)
    return parts


def _add(parts: dict[tuple[ModelId, ...], float], models: tuple[ModelId, ...], part: float) -> None:
    if part > 0.0:
        parts[models] = parts.get(models, 0.0) + part


# -- what to expect -----------------------------------------------------------------------------


def slowdown(cluster: ClusterState, models: tuple[ModelId, ...], slot: Slot) -> float:
    """How many times as long a run of these takes beside what runs on the slot; 1 alone."""
    gpu_type = slot.gpu.spec.gpu_type
    return estimate.slowdown(cluster.profiles, models, gpu_type, slot.neighbours())


def slows(
    cluster: ClusterState, models: tuple[ModelId, ...], slot: Slot
) -> list[tuple[ActiveLease, float]]:
    """The slot's runs, and how many times as long each takes from when these run too."""
    runs = slot.runs_beside()
    if not runs:
        return []
    profiles, gpu_type = cluster.profiles, slot.gpu.spec.gpu_type
    slowed = []
    for lease in runs:
        others = tuple([other.models for other in runs if other is not lease])
        before = estimate.slowdown(profiles, lease.models, gpu_type, others)
        after = estimate.slowdown(profiles, lease.models, gpu_type, (*others, models))
        slowed.append((lease, after / before))
    return slowed


def prolonged_s(
    cluster: ClusterState, models: tuple[ModelId, ...], slot: Slot, now: float
) -> float:
    """By how many seconds these would prolong the slot's runs, in all."""
    total_s = 0.0
    for lease, factor in slows(cluster, models, slot):
        total_s += max(0.0, factor - 1.0) * _left_s(lease, now)
    return total_s


def prolong(cluster: ClusterState, models: tuple[ModelId, ...], slot: Slot, now: float) -> None:
    """These are about to run there: what runs already ends later."""
    for lease, factor in slows(cluster, models, slot):
        lease.due_s += max(0.0, factor - 1.0) * _left_s(lease, now)


def _left_s(lease: ActiveLease, now: float) -> float:
    return max(0.0, lease.due_s - max(now, lease.there_s))
