"""The routes of people and their tools: policy, cluster, queue, explanations, quotas, the feed."""

import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Query, Response
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from common import numerals
from common.telemetry.traces import plain_span
from scheduler import policies
from scheduler.features.billing.use_buckets import DAY_S
from scheduler.model.errors import BadValue, MalformedRequest, NotLeading, UnknownName
from scheduler.model.owner_terms import OwnerTerms, check_owner, check_terms
from scheduler.model.values import RequestId
from scheduler.service.bill import GROUPS, BillShown, bill
from scheduler.service.history.history import RequestRecord, spans_of
from scheduler.service.http.model_routes import add_models
from scheduler.service.leadership.term import Office
from scheduler.service.scheduler_service import SchedulerService
from scheduler.service.terms import OwnerRow, owner_row, owner_rows
from scheduler.service.views import cluster_report
from scheduler.service.views.cluster_report import ClusterShown, QueueShown, model_rests
from scheduler.service.views.explanation import LatestShown, RequestShown, explained, used_by
from scheduler.service.views.page_feed import PageFeed

_JSON = "application/json"
_SHOWN = 100
_MOST_SHOWN = 10_000
_LONGEST_GROUP = 100
_LONGEST_MARK = 200
_Value = TypeVar("_Value")
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


_USUAL = OwnerTerms()


class TermsBody(BaseModel):
    """The terms of one owner; what is left out has no limit, or is as usual."""

    model_config = ConfigDict(extra="forbid", strict=True)

    weight: Annotated[float, Field(allow_inf_nan=False, examples=[2.0])] = _USUAL.weight
    priority: int = _USUAL.priority
    gpu_s: Annotated[float | None, Field(allow_inf_nan=False, examples=[30.0])] = None
    window_s: Annotated[float, Field(allow_inf_nan=False)] = _USUAL.window_s
    resident_bytes: int | None = None
    leases: int | None = None
    waiting: int | None = None


class OwnersShown(BaseModel):
    """Every owner that has terms, by name."""

    owners: list[OwnerRow]


def routers(
    service: SchedulerService, view: Sequence[Any], change: Sequence[Any]
) -> Sequence[APIRouter]:
    """The routes; `view` and `change` are dependencies: who may look, and who may act."""
    reads, orders = APIRouter(dependencies=list(view)), APIRouter(dependencies=list(change))
    _add_policy(reads, orders, service)
    _add_cluster(reads, service)
    _add_explanations(reads, service)
    _add_quotas(reads, orders, service)
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

    @reads.get("/bill", tags=["cluster"], summary="Who used what, and its cost")
    async def show_bill(
        by: Annotated[str, Query(max_length=_LONGEST_GROUP)] = "function",
        last_s: Annotated[float, BeforeValidator(numerals.number), Query(ge=0)] = DAY_S,
    ) -> BillShown:
        collector = service.office().bill
        if by not in GROUPS:
            raise MalformedRequest(f"by: one of {', '.join(GROUPS)}")
        await collector.refresh()
        now_unix_s = time.time()
        return bill(collector.buckets, collector.settings, by, now_unix_s - last_s, now_unix_s)


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
        used = used_by(record, office.core, office.bill.settings, now_s)
        rests = model_rests(office.core, record.request.models, now_s)
        return explained(record, used, rests, now_s)

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


def _add_quotas(reads: APIRouter, orders: APIRouter, service: SchedulerService) -> None:
    def row(owner: str) -> OwnerRow:
        office = service.office()
        return owner_row(office.terms, office.core, office.clock.now_s(), owner)

    @reads.get("/quotas", tags=["quotas"], summary="Owners with terms, and what they use")
    async def every_owner() -> OwnersShown:
        office = service.office()
        return OwnersShown(owners=owner_rows(office.terms, office.core, office.clock.now_s()))

    @reads.get("/quotas/{owner:path}", tags=["quotas"], summary="One owner's terms and use")
    async def one_owner(owner: str) -> OwnerRow:
        service.office()
        return row(_checked(check_owner, owner))

    @orders.put("/quotas/{owner:path}", tags=["quotas"], summary="Set an owner's terms")
    async def set_terms(owner: str, body: TermsBody) -> OwnerRow:
        service.office()
        terms = _checked(check_terms, OwnerTerms(**body.model_dump()))
        await service.set_terms(_checked(check_owner, owner), terms)
        return row(owner)

    @orders.delete("/quotas/{owner:path}", tags=["quotas"], summary="Remove an owner's terms")
    async def remove_terms(owner: str) -> OwnerRow:
        if _checked(check_owner, owner) not in service.office().terms.of_operators:
            raise UnknownName("terms that an operator set of", owner)
        await service.set_terms(owner, None)
        return row(owner)


def _checked(check: Callable[[_Value], _Value], value: _Value) -> _Value:
    try:
        return check(value)
    except BadValue as error:
        raise MalformedRequest(str(error)) from error


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
