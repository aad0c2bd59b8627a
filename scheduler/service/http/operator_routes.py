"""The routes of people and their tools: policy, cluster, models, explanations, the feed."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from cache_manager.model.ids import GpuId, ModelId
from common import numerals
from common.telemetry.traces import plain_span
from scheduler import policies
from scheduler.model.errors import MalformedRequest, NotLeading, UnknownModel, UnknownName
from scheduler.model.values import RequestId
from scheduler.service.driver import Driver
from scheduler.service.history.history import RequestRecord, spans_of
from scheduler.service.leadership.term import Office
from scheduler.service.scheduler_service import FEATURES, SchedulerService
from scheduler.service.survey import hosting_of
from scheduler.service.views import cluster_report
from scheduler.service.views.cluster_report import ClusterShown, ModelRest, QueueShown, model_rests
from scheduler.service.views.explanation import LatestShown, RequestShown, explained, uses_of
from scheduler.service.views.page_feed import PageFeed

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
        return cluster_report.cluster(service.office(), service.name, service.store_state())

    @reads.get("/queue", tags=["cluster"], summary="Waiting requests, in order")
    async def queue(most: Most = _SHOWN) -> QueueShown:
        return cluster_report.queue(service.office(), most)


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
    feed = _of_term(service)

    @reads.get(
        "/feed", tags=["watching"], summary="The whole state, or the changes since that mark"
    )
    async def look(since: Annotated[str, Query(max_length=_LONGEST_MARK)] = "") -> Response:
        about = {"name": service.name, "store": service.store_state()}
        return Response(feed().look(since, about), media_type=_JSON)

    @reads.get("/feed/point", tags=["watching"], summary="Figures of the last seconds, for charts")
    async def point() -> Response:
        return Response(feed().point(), media_type=_JSON)


def _of_term(service: SchedulerService) -> Callable[[], PageFeed]:
    """The feed of this term's office, made when it is first requested."""
    kept: dict[Office, PageFeed] = {}

    def feed() -> PageFeed:
        try:
            office = service.office()
        except NotLeading:
            kept.clear()
            raise
        if office not in kept:
            kept.clear()
            kept[office] = PageFeed(office, service.meters)
        return kept[office]

    return feed


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
