"""The routes of people and their tools: policy, cluster, models, explanations, the feed."""

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean, median, quantiles
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from cache_manager.model.ids import GpuId, ModelId, NodeId, Tier
from common import numerals
from common.telemetry.traces import plain_span
from scheduler import policies
from scheduler.cluster.request_queue import Standing
from scheduler.core.core import Core
from scheduler.features.hooks import UseShown
from scheduler.model.actions import Dispatch
from scheduler.model.errors import MalformedRequest, UnknownModel, UnknownName
from scheduler.model.values import (
    Explanation,
    LeaseId,
    RequestId,
    RequestOutcome,
    SlotId,
)
from scheduler.service.driver import Driver
from scheduler.service.history.history import Decided, Happened, RequestRecord, spans_of
from scheduler.service.leadership.term import Office
from scheduler.service.scheduler_service import FEATURES, SchedulerService
from scheduler.service.survey import hosting_of
from scheduler.wire.cluster_status import ConfigurationStatus, GpuStatus, configuration_status

_JSON = "application/json"
_SHOWN = 100
_MOST_SHOWN = 10_000
_LONGEST_MARK = 200
# pydantic itself reads blanks and underscores in numbers.
Most = Annotated[int, BeforeValidator(numerals.whole), Query(ge=0, le=_MOST_SHOWN)]


class PolicyBody(BaseModel):
    """A policy and its parameters; those left out have their defaults."""

    model_config = ConfigDict(extra="forbid", strict=True)

    policy: Annotated[str, Field(examples=["lalbo3"])]
    parameters: Annotated[dict[str, float], Field(examples=[{"o3_limit": 25}])] = {}


class PolicyShown(BaseModel):
    """A policy's own description; `parameters` are its defaults, `meanings` their purposes."""

    name: str
    summary: str
    rule: str
    parameters: dict[str, int | float]
    meanings: dict[str, str]


def routers(
    service: SchedulerService, view: Sequence[Any], change: Sequence[Any]
) -> Sequence[APIRouter]:
    """The routes; `view` and `change` are dependencies: who may look, and who may act."""
    reads, orders = APIRouter(dependencies=list(view)), APIRouter(dependencies=list(change))
    _add_policy(reads, orders, service)
    _add_cluster(reads, service)
    _add_explanations(reads, service)
    for kind in FEATURES:
        kind.add_routes(reads, orders, partial(service.feature, kind))
    _add_feed(reads, service)
    add_models(reads, orders, service.office)
    return reads, orders


def _add_policy(reads: APIRouter, orders: APIRouter, service: SchedulerService) -> None:
    @reads.get("/policy", tags=["policy"], summary="The policy in force")
    async def policy() -> PolicyBody:
        office = service.office()
        name = office.driver.status().policy
        parameters = policies.describe(name).parameters | office.parameters
        return PolicyBody(policy=name, parameters=parameters)

    # POST too: `OperatorClient` posts every order.
    @orders.post("/policy", include_in_schema=False)
    @orders.put("/policy", tags=["policy"], summary="Change the policy")
    async def set_policy(choice: PolicyBody) -> PolicyBody:
        service.office()
        policies.make(choice.policy, choice.parameters)
        await service.set_policy(choice.policy, choice.parameters)
        return choice

    @reads.get("/policies", tags=["policy"], summary="Every policy with its parameters")
    async def every_policy() -> list[PolicyShown]:
        every = (policies.describe(name) for name in policies.available())
        return [PolicyShown(**described._asdict()) for described in every]


def _add_cluster(reads: APIRouter, service: SchedulerService) -> None:
    @reads.get("/cluster", tags=["cluster"], summary="GPUs, counts, latencies")
    async def cluster() -> ClusterShown:
        return shown_cluster(service.office(), service.name, service.store_state())

    @reads.get("/queue", tags=["cluster"], summary="Waiting requests, in order")
    async def queue(most: Most = _SHOWN) -> QueueShown:
        return shown_queue(service.office(), most)


def _add_explanations(reads: APIRouter, service: SchedulerService) -> None:
    @reads.get("/explain", tags=["explain"], summary="The latest requests")
    async def latest(
        most: Most = _SHOWN, *, named: bool = False
    ) -> Sequence[str] | Sequence[LatestShown]:
        office = service.office()
        now_s, records = office.clock.now_s(), office.history.latest(most)
        if not named:
            return [record.request.id for record in records]
        return [
            LatestShown(record.request.id, record.request.function, now_s - record.arrived_s)
            for record in records
        ]

    why = "Why a request was placed where it was, and its outcome"

    @reads.get("/explain/{request:path}", tags=["explain"], summary=why)
    async def explain(request: str) -> RequestShown:
        office = service.office()
        record = _record(office, request)
        now_s = office.clock.now_s()
        rests = model_rests(office.core, record.request.models, now_s)
        return explained(record, office.used(uses_of(record, now_s)), rests, now_s)

    what = "The spans of a request: its wait, decisions, leases and loads"

    @reads.get("/traces/{request:path}", tags=["explain"], summary=what)
    async def traces(request: str) -> dict[str, Any]:
        office = service.office()
        spans = spans_of(_record(office, request), office.clock.now_s())
        return {"request": request, "spans": [plain_span(span) for span in spans]}


def _record(office: Office, request: str) -> RequestRecord:
    record = office.history.get(RequestId(request))
    if record is None:
        raise UnknownName("request among the latest:", request)
    return record


def _add_feed(reads: APIRouter, service: SchedulerService) -> None:
    @reads.get(
        "/feed", tags=["watching"], summary="The whole state, or the changes since that mark"
    )
    async def look(since: Annotated[str, Query(max_length=_LONGEST_MARK)] = "") -> Response:
        about = {"name": service.name, "store": service.store_state()}
        return Response(service.reigning().feed.look(since, about), media_type=_JSON)

    @reads.get("/feed/point", tags=["watching"], summary="Figures of the last seconds, for charts")
    async def point() -> Response:
        return Response(service.reigning().feed.point(), media_type=_JSON)


# -- the cluster and its queue -------------------------------------------------------------------

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


def shown_cluster(office: Office, name: str, store: str) -> ClusterShown:
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


def shown_queue(office: Office, most: int) -> QueueShown:
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
    for cache in index.left.get(model, {}).values():
        yield Tier.CONTEXT, cache.id, core.leaves_s(cache.node, cache.id, model)
    for node, tier in index.tiers(model).items():
        yield tier, node, core.leaves_s(node, None, model)


# -- models --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Holder:
    """A GPU that holds a model; a request last used the model there `used_ago_s` ago.

    `runtime` is `process` or `stream`, with as many models in the process (null and 0 before a
    model that loads has one); calls have this share of the GPU's multiprocessors.
    """

    gpu: GpuId
    memory_bytes: int
    used_ago_s: float
    leases: int
    waiting: int
    pinned: bool
    runtime: str | None
    process_models: int
    gpu_share: float


@dataclass(frozen=True, slots=True)
class ConfiguredRun:
    """Seconds of a run of so many requests, measured on so many virtual CPUs and parts of a GPU."""

    batch: int
    vcpus: int
    vgpus: int
    gpu_type: str
    run_s: float


@dataclass(frozen=True, slots=True)
class ModelShown:
    """One model: the memory it takes, its times, and where it is.

    `load_s` is by the tier it is loaded from, `run_s` by batch size and GPU type, `configured` by
    the configuration of the lease, where the policy gives leases one. `features` are declared or
    measured facts about it, by name. `functions` pay for what the cluster holds of it.
    """

    model: ModelId
    memory_bytes: int
    load_s: dict[str, float]
    run_s: dict[str, float]
    rate: float
    waiting: int
    configured: list[ConfiguredRun]
    holders: list[Holder]
    rests: list[ModelRest]
    features: dict[str, float]
    functions: list[str]


@dataclass(frozen=True, slots=True)
class OrderDone:
    """The order was carried out for the model of this full name."""

    model: ModelId
    done: str


Order = Callable[[Driver, ModelId, GpuId | None], Awaitable[None]]
_ORDERS: Mapping[str, tuple[Order, str]] = {
    "pin": (Driver.pin, "Keep a model in GPU memory"),
    "unpin": (Driver.unpin, "Let a pinned model be evicted again"),
    "prefetch": (Driver.prefetch, "Load a model ahead of its requests"),
    "evict": (Driver.evict, "Take a model out of GPU memory, where it is not in use"),
}
GpuAsked = Annotated[str | None, Query(description="on this GPU alone")]


def add_models(reads: APIRouter, orders: APIRouter, office: Callable[[], Office]) -> None:
    @reads.get("/models", tags=["models"], summary="Every model, and the GPUs that hold it")
    async def models() -> list[ModelShown]:
        leader = office()
        return [_shown(leader, model) for model in sorted(leader.core.cluster.profiles.known)]

    @reads.get("/models/{model:path}", tags=["models"], summary="One model, with its times")
    async def one_model(model: str) -> ModelShown:
        leader = office()
        return _shown(leader, _named(leader, model))

    for verb, (order, summary) in _ORDERS.items():
        path = f"/models/{{model:path}}/{verb}"
        orders.post(path, tags=["models"], summary=summary)(_obey(office, verb, order))


def _obey(
    office: Callable[[], Office], verb: str, order: Order
) -> Callable[..., Awaitable[OrderDone]]:
    async def obey(model: str, gpu: GpuAsked = None) -> OrderDone:
        leader = office()
        model_id = _named(leader, model)
        if gpu is not None and gpu not in leader.core.cluster.gpus:
            raise UnknownName("GPU", gpu)
        await order(leader.driver, model_id, None if gpu is None else GpuId(gpu))
        return OrderDone(model_id, verb)

    return obey


def _named(office: Office, name: str) -> ModelId:
    """Find a model by its id, the beginning of the id or of its last part, or a function."""
    profiles = office.core.cluster.profiles.known
    if name in profiles:
        return ModelId(name)
    matches = [
        model
        for model in (profiles if name else ())
        if model.startswith(name)
        or model.rpartition("/")[2].startswith(name)
        or any(name in (user, user.rpartition("/")[2]) for user in office.users(model))
    ]
    if not matches:
        raise UnknownModel(name)
    if len(matches) > 1:
        raise MalformedRequest(f"{name!r} may be any of {', '.join(sorted(matches))}")
    return matches[0]


def _shown(office: Office, model: ModelId) -> ModelShown:
    cluster, now_s = office.core.cluster, office.clock.now_s()
    profile = cluster.profiles.known[model]
    caches = cluster.index.holders(model).values()
    residents = ((cache, cache.residents[model]) for cache in caches)
    lanes = (cluster.waiting.lanes.get(bundle) for bundle in cluster.bundles_of(model))
    return ModelShown(
        model=model,
        memory_bytes=profile.memory_bytes,
        load_s={tier.name.lower(): seconds for tier, seconds in sorted(profile.load_s.items())},
        run_s={f"{batch} on {kind}": s for (batch, kind), s in sorted(profile.run_s.items())},
        configured=[
            ConfiguredRun(*configuration, gpu_type, run_s)
            for (configuration, gpu_type), run_s in sorted(profile.configured_s.items())
        ],
        rate=cluster.index.rate(model, now_s),
        waiting=sum(lane.waiting for lane in lanes if lane is not None),
        holders=[
            Holder(
                gpu=cache.id,
                memory_bytes=resident.bytes,
                used_ago_s=now_s - resident.used_s,
                leases=resident.users,
                waiting=resident.waiters,
                pinned=resident.pinned,
                **hosting_of(cluster.gpus[cache.id], model)._asdict(),
            )
            for cache, resident in residents
        ],
        rests=model_rests(office.core, (model,), now_s),
        features=profile.features,
        functions=office.users(model),
    )


# -- why a request was placed where it was, and the measured times ---------------------------------


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
