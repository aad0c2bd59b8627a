"""The API's report of a leader: the cluster, its queue, latencies, estimates and measurements."""

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean, median, quantiles

from cache_manager.model.ids import ModelId, NodeId, Tier
from scheduler.cluster.request_queue import Standing
from scheduler.core.core import Core
from scheduler.model.actions import Dispatch
from scheduler.model.values import LeaseId, RequestId, RequestOutcome, SlotId
from scheduler.service.history.history import Happened, RequestRecord
from scheduler.service.leadership.term import Office
from scheduler.wire.cluster_status import GpuStatus

_LATEST = 1_000


@dataclass(frozen=True, slots=True)
class LatencyFigures:
    """Seconds of the latest requests that have completed."""

    median_s: float
    p99_s: float
    average_s: float


@dataclass(frozen=True, slots=True)
class Accuracy:
    """The estimated load and run of the latest leases, and the measured ones."""

    leases: int
    estimated_s: float
    measured_s: float
    error_s: float


@dataclass(frozen=True, slots=True)
class ClusterShown:
    """The scheduler at one moment."""

    name: str
    term: int
    store: str
    now_s: float
    policy: str
    parameters: dict[str, float]
    waiting: int
    waiting_locally: int
    hits: int
    misses: int
    hit_ratio: float | None
    evictions: int
    prefetches: int
    refusals: int
    ended: dict[RequestOutcome, int]
    waits: LatencyFigures | None
    totals: LatencyFigures | None
    accuracy: Accuracy | None
    nodes: tuple[NodeId, ...]
    gpus: tuple[GpuStatus, ...]
    functions: dict[ModelId, list[str]]  # of the models that GPUs hold


@dataclass(frozen=True, slots=True)
class QueuedShown:
    """One request that waits: for any GPU, or (`slot`) for one."""

    request: RequestId
    function: str
    models: tuple[ModelId, ...]
    waited_s: float
    visits: int
    priority: int
    slot: SlotId | None


@dataclass(frozen=True, slots=True)
class QueueShown:
    """How many requests wait, and the first of them in the order of their queues."""

    waiting: int
    waiting_locally: int
    requests: list[QueuedShown]


def cluster(office: Office, name: str, store: str) -> ClusterShown:
    status = office.driver.status()
    counts = status.counts
    placed = counts.hits + counts.misses
    latest = office.history.latest(_LATEST)
    completed = [record for record in latest if record.outcome is RequestOutcome.COMPLETED]
    held = {resident.model for gpu in status.gpus for resident in gpu.residents}
    return ClusterShown(
        name=name,
        term=office.term,
        store=store,
        now_s=status.now_s,
        policy=status.policy,
        parameters=office.parameters,
        waiting=status.waiting,
        waiting_locally=status.waiting_locally,
        hits=counts.hits,
        misses=counts.misses,
        hit_ratio=counts.hits / placed if placed else None,
        evictions=counts.evictions,
        prefetches=counts.prefetches,
        refusals=counts.refusals,
        ended=dict(counts.finished),
        waits=_times([r.granted_s - r.arrived_s for r in latest if r.granted_s is not None]),
        totals=_times([r.ended_s - r.arrived_s for r in completed if r.ended_s is not None]),
        accuracy=_accuracy(latest),
        nodes=status.nodes,
        gpus=status.gpus,
        functions={model: office.users(model) for model in sorted(held)},
    )


def queue(office: Office, most: int) -> QueueShown:
    """The first `most` waiting requests of the global queue, then local ones and held back ones."""
    core, now_s = office.core, office.clock.now_s()
    standing = {Standing.WAITING: 0, Standing.LOCAL: 1, Standing.HELD: 2}
    waiting = [p for p in core.requests.values() if p.standing in standing]
    waiting.sort(key=lambda pending: (standing[pending.standing], pending.at or "", pending.rank))
    local = sum(pending.standing is Standing.LOCAL for pending in waiting)
    shown = [
        QueuedShown(
            request=pending.id,
            function=pending.request.function,
            models=pending.models,
            waited_s=now_s - pending.arrived_s,
            visits=core.cluster.visits.count(pending.seq),
            priority=pending.request.priority,
            slot=pending.at if pending.standing is Standing.LOCAL else None,
        )
        for pending in waiting[:most]
    ]
    return QueueShown(len(waiting) - local, local, shown)


def _times(seconds: list[float]) -> LatencyFigures | None:
    if not seconds:
        return None
    p99_s = quantiles(seconds, n=100, method="inclusive")[98] if len(seconds) > 1 else seconds[0]
    return LatencyFigures(median(seconds), p99_s, fmean(seconds))


def _accuracy(latest: list[RequestRecord]) -> Accuracy | None:
    """Over leases that ran something; other leases have no measurements."""
    pairs = [
        (decided.action.estimate.total_s, happened.load_s + happened.run_s)
        for record in latest
        for decided in record.decided
        if isinstance(decided.action, Dispatch)
        and (happened := of_lease(record, decided.action.lease)) is not None
        and happened.runs
    ]
    if not pairs:
        return None
    return Accuracy(
        leases=len(pairs),
        estimated_s=fmean(estimated for estimated, _ in pairs),
        measured_s=fmean(measured for _, measured in pairs),
        error_s=fmean(abs(measured - estimated) for estimated, measured in pairs),
    )


def of_lease(record: RequestRecord, lease: LeaseId) -> Happened | None:
    return next((happened for happened in record.happened if happened.lease == lease), None)


@dataclass(frozen=True, slots=True)
class ModelRest:
    """A stage that a model is in: `gpu`, `context` (an empty process that it left), `host`, `disk`.

    If nobody uses it, it may leave the stage in `leaves_in_s`; None: in use there, or for ever.
    """

    model: ModelId
    stage: str
    place: str
    leaves_in_s: float | None


def model_rests(core: Core, models: tuple[ModelId, ...], now_s: float) -> list[ModelRest]:
    """The stages that these models are in now, of each model those nearest to a GPU first."""
    return [
        ModelRest(
            model, stage.name.lower(), place, None if due_s is None else max(0.0, due_s - now_s)
        )
        for model in models
        for stage, place, due_s in _stages(core, model)
    ]


def _stages(core: Core, model: ModelId) -> Iterator[tuple[Tier, str, float | None]]:
    """Where a model is, and what it left: stage, GPU or node, and when it may step down."""
    index = core.cluster.index
    for cache in index.holders(model).values():
        yield Tier.GPU, cache.id, core.leaves_s(cache.node, cache.id, model)
    for cache in index.left(model).values():
        yield Tier.CONTEXT, cache.id, core.leaves_s(cache.node, cache.id, model)
    for node, tier in index.tiers(model).items():
        yield tier, node, core.leaves_s(node, None, model)
