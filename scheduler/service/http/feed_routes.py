"""The routes for observers: the page and `gpufaas top`."""

from collections.abc import Callable, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response

from scheduler.model.errors import NotLeading
from scheduler.service.http.operator_routes import OperatorService
from scheduler.service.leadership.term import Office
from scheduler.service.metrics.counters import SchedulerCounters
from scheduler.service.views.page_feed import PageFeed

_JSON = "application/json"
_MOST_CHARACTERS = 200


def feed_router(
    service: OperatorService, meters: SchedulerCounters, view: Sequence[Any]
) -> APIRouter:
    """The routes; `view` are dependencies that check who may look."""
    routes = APIRouter(tags=["watching"], dependencies=list(view))
    feed = _of_term(service, meters)

    @routes.get("/feed", summary="The whole state, or the changes since that mark")
    async def look(
        since: Annotated[str, Query(max_length=_MOST_CHARACTERS)] = "",
    ) -> Response:
        about = {"name": service.name, "store": service.store_state()}
        return Response(feed().look(since, about), media_type=_JSON)

    @routes.get("/feed/point", summary="Figures of the last seconds, for charts")
    async def point() -> Response:
        return Response(feed().point(), media_type=_JSON)

    return routes


def _of_term(service: OperatorService, meters: SchedulerCounters) -> Callable[[], PageFeed]:
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
            kept[office] = PageFeed(office, meters)
        return kept[office]

    return feed
