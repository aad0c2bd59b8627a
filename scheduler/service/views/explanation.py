"""The answer of /explain: why a request was placed where it was, and the measured times."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from cache_manager.model.ids import GpuId, ModelId, NodeId
from scheduler.features.hooks import UseShown
from scheduler.model.actions import Dispatch
from scheduler.model.values import (
    Explanation,
    LeaseId,
    RequestId,
    RequestOutcome,
    SlotId,
)
from scheduler.service.history.history import Decided, Happened, RequestRecord
from scheduler.service.views.cluster_report import ModelRest, of_lease
from scheduler.wire.cluster_status import ConfigurationStatus, configuration_status


@dataclass(frozen=True, slots=True)
class EstimateShown:
    """The expected seconds at the time when the lease was given."""

    load_s: float
    run_s: float


@dataclass(frozen=True, slots=True)
class LeaseShown:
    """The course of one lease: measured seconds, and how long the slot was held.

    `held_s` is None while the lease is in force, and if the lease was lost with its GPU.
    """

    lease: LeaseId
    load_s: float
    loaded_from: dict[ModelId, str]
    failed_loads: dict[ModelId, str]
    run_s: float
    runs: int
    held_s: float | None


@dataclass(frozen=True, slots=True)
class DecisionShown:
    """One decision, seconds after the arrival: a lease, or a place in a slot's local queue.

    `why` holds the candidates with their estimates if the cluster is small enough to keep them. A
    lease occupies `more_slots` beside its `slot`.
    """

    after_s: float
    what: str
    rule: str
    slot: SlotId
    gpu: GpuId | None = None
    node: NodeId | None = None
    hit: bool | None = None
    held_elsewhere: bool | None = None
    estimate: EstimateShown | None = None
    why: Explanation | None = None
    came: LeaseShown | None = None
    more_slots: tuple[SlotId, ...] = ()
    configuration: ConfigurationStatus | None = None


@dataclass(frozen=True, slots=True)
class LatestShown:
    """One of the latest requests: whose it is, and when it came."""

    request: RequestId
    function: str
    arrived_ago_s: float


def uses_of(record: RequestRecord, now_s: float) -> Sequence[tuple[Dispatch, float]]:
    """The leases of a request, with its own part, in seconds, of their use so far."""
    uses = []
    for decided in record.decided:
        action = decided.action
        happened = of_lease(record, action.lease) if isinstance(action, Dispatch) else None
        if happened is not None and isinstance(action, Dispatch):
            used_s = happened.used_s(now_s, own=action.own) / max(1, len(action.requests))
            uses.append((action, used_s))
    return uses


@dataclass(frozen=True, slots=True)
class RequestShown:
    """One request from its arrival to its end."""

    request: RequestId
    function: str
    models: tuple[ModelId, ...]
    batch: int
    priority: int
    arrived_ago_s: float
    waited_s: float | None
    outcome: RequestOutcome | None
    reason: str
    total_s: float | None
    used: UseShown | None
    decisions: list[DecisionShown]
    rests: list[ModelRest]


def explained(
    record: RequestRecord, used: UseShown | None, rests: list[ModelRest], now_s: float
) -> RequestShown:
    request, arrived_s = record.request, record.arrived_s
    granted_s, ended_s = record.granted_s, record.ended_s
    return RequestShown(
        request=request.id,
        function=request.function,
        models=request.models,
        batch=request.batch,
        priority=request.priority,
        arrived_ago_s=now_s - arrived_s,
        waited_s=None if granted_s is None else granted_s - arrived_s,
        outcome=record.outcome,
        reason=record.reason,
        total_s=None if ended_s is None else ended_s - arrived_s,
        used=used,
        decisions=[_decision(record, decided) for decided in record.decided],
        rests=rests,
    )


def _decision(record: RequestRecord, decided: Decided) -> DecisionShown:
    action, after_s = decided.action, decided.at_s - record.arrived_s
    shown = DecisionShown(after_s, "queued", action.rule, action.slot, why=action.explanation)
    if not isinstance(action, Dispatch):
        return shown
    happened = of_lease(record, action.lease)
    return replace(
        shown,
        what="placed",
        gpu=action.gpu,
        node=action.node,
        hit=action.hit,
        held_elsewhere=action.held_elsewhere,
        estimate=EstimateShown(*action.estimate),
        came=None if happened is None else _lease(happened),
        more_slots=action.more_slots,
        configuration=configuration_status(action.configuration),
    )


def _lease(happened: Happened) -> LeaseShown:
    freed_s = happened.freed_s
    return LeaseShown(
        lease=happened.lease,
        load_s=happened.load_s,
        loaded_from={model: load.source.name.lower() for model, load in happened.loads.items()},
        failed_loads=dict(happened.failed_loads),
        run_s=happened.run_s,
        runs=happened.runs,
        held_s=None if freed_s is None else freed_s - happened.dispatched_s,
    )
