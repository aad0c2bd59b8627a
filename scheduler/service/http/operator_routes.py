"""The routes of people and their tools: policy, cluster, queue, explanations."""

import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Protocol

from fastapi import APIRouter, Query
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from common import numerals
from common.telemetry.traces import plain_span
from scheduler import policies
from scheduler.core.billing.use_buckets import DAY_S
from scheduler.model.errors import MalformedRequest, UnknownName
from scheduler.model.values import RequestId
from scheduler.service.billing.bill_view import GROUPS, BillShown, bill
from scheduler.service.leadership.term import Office
from scheduler.service.views import cluster_report
from scheduler.service.views.call_use import used_by
from scheduler.service.views.cluster_report import ClusterShown, QueueShown
from scheduler.service.views.explanation import LatestShown, RequestShown, explained
from scheduler.service.views.model_rests import model_rests

_SHOWN = 100
_MOST_SHOWN = 10_000
_LONGEST_GROUP = 100
# pydantic itself reads blanks and underscores in numbers.
Most = Annotated[int, BeforeValidator(numerals.whole), Query(ge=0, le=_MOST_SHOWN)]


class OperatorService(Protocol):
    """The part of the service that these routes use."""

    name: str

    def office(self) -> Office:
        """The leader's core, driver and history; NotLeading if this scheduler does not lead."""
        ...

    def store_state(self) -> str:
        """The datastore's state in one word."""
        ...

    async def set_policy(self, policy: str, parameters: Mapping[str, float]) -> None:
        """Decide by this policy from now on, here and after a restart."""
        ...


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


def router(service: OperatorService, view: Sequence[Any], change: Sequence[Any]) -> APIRouter:
    """The routes; `view` and `change` are dependencies: who may look, and who may act."""
    routes = APIRouter()
    get = routes.get

    _add_policy(routes, service, view, change)

    @get("/cluster", tags=["cluster"], dependencies=view, summary="GPUs, counts, latencies")
    async def cluster() -> ClusterShown:
        return cluster_report.cluster(service.office(), service.name, service.store_state())

    @get("/queue", tags=["cluster"], dependencies=view, summary="Waiting requests, in order")
    async def queue(most: Most = _SHOWN) -> QueueShown:
        return cluster_report.queue(service.office(), most)

    @get("/bill", tags=["cluster"], dependencies=view, summary="Who used what, and its cost")
    async def show_bill(
        by: Annotated[str, Query(max_length=_LONGEST_GROUP)] = "function",
        last_s: Annotated[float, BeforeValidator(numerals.number), Query(ge=0)] = DAY_S,
    ) -> BillShown:
        found = service.office().bill
        if by not in GROUPS:
            raise MalformedRequest(f"by: one of {', '.join(GROUPS)}")
        await found.refresh()
        now_unix_s = time.time()
        return bill(found.buckets, found.settings, by, now_unix_s - last_s, now_unix_s)

    _add_explanations(routes, service, view)
    return routes


def _add_explanations(routes: APIRouter, service: OperatorService, view: Sequence[Any]) -> None:
    """The latest requests, the reasons of their placements, and their spans."""
    get = routes.get

    @get("/explain", tags=["explain"], dependencies=view, summary="The latest requests")
    async def latest(
        most: Most = _SHOWN, *, named: bool = False
    ) -> Sequence[str] | Sequence[LatestShown]:
        office = service.office()
        now_s, records = office.clock.now_s(), office.history.latest(most)
        if named:
            return [LatestShown.of(record, now_s) for record in records]
        return [record.request.id for record in records]

    @get(
        "/explain/{request:path}",
        tags=["explain"],
        dependencies=view,
        summary="Why a request was placed where it was, and its outcome",
    )
    async def explain(request: str) -> RequestShown:
        office = service.office()
        record = office.history.get(RequestId(request))
        if record is None:
            raise UnknownName("request among the latest:", request)
        now_s = office.clock.now_s()
        used = used_by(record, office.core, office.bill.settings, now_s)
        rests = model_rests(office.core, record.request.models, now_s)
        return explained(record, used, rests, now_s)

    @get(
        "/traces/{request:path}",
        tags=["explain"],
        dependencies=view,
        summary="The spans of a request: its wait, decisions, leases and loads",
    )
    async def traces(request: str) -> dict[str, Any]:
        spans = service.office().traces.spans(RequestId(request))
        if not spans:
            raise UnknownName("request among the latest:", request)
        return {"request": request, "spans": [plain_span(span) for span in spans]}


def _add_policy(
    routes: APIRouter, service: OperatorService, view: Sequence[Any], change: Sequence[Any]
) -> None:
    """The policy in force, and the policies to choose from."""

    @routes.get("/policy", tags=["policy"], dependencies=view, summary="The policy in force")
    async def policy() -> PolicyBody:
        office = service.office()
        name = office.driver.status().policy
        parameters = policies.describe(name).parameters | office.parameters
        return PolicyBody(policy=name, parameters=parameters)

    # POST too: `OperatorClient` posts every order.
    @routes.post("/policy", dependencies=change, include_in_schema=False)
    @routes.put("/policy", tags=["policy"], dependencies=change, summary="Change the policy")
    async def set_policy(choice: PolicyBody) -> PolicyBody:
        service.office()
        policies.make(choice.policy, choice.parameters)
        await service.set_policy(choice.policy, choice.parameters)
        return choice

    @routes.get(
        "/policies", tags=["policy"], dependencies=view, summary="Every policy with its parameters"
    )
    async def every_policy() -> list[PolicyShown]:
        every = (policies.describe(name) for name in policies.available())
        return [PolicyShown(**described._asdict()) for described in every]
