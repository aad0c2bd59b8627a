"""The HTTP application: the hot path in front, FastAPI for everything else."""

from collections.abc import Awaitable, Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol

from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.security import HTTPBasic, HTTPBearer
from starlette.exceptions import HTTPException
from starlette.websockets import WebSocket

from cache_manager.api import router as models_router
from scheduler import own_process
from scheduler.errors import BadRequest, NotAllowed, SchedulerError
from scheduler.exposition import CONTENT_TYPE
from scheduler.service import failures
from scheduler.service.access import Access, Role
from scheduler.service.feed_routes import feed_router
from scheduler.service.health import Health
from scheduler.service.hot import HotPath, Leading, Receive, Scope, Send
from scheduler.service.metrics import Meters
from scheduler.service.residency import LeaderResidency
from scheduler.service.routes import Service, router

Asgi = Callable[[Scope, Receive, Send], Awaitable[None]]

_ABOUT = """Places requests on GPUs. Programs call `POST /acquire` (JSON: `request`, `function`,
`models`, and if wanted `batch`, `deadline_in_s`, `waited_s`, `priority`, `application`, `stage`,
`slo_s`, `near`), which waits and answers with a lease, its GPU, its node's addresses and a signed
token; `?progress=1` streams JSON lines meanwhile. `POST /wanted` and `/cancel` take `request`,
`POST /release` takes `lease` and `may_return`. Going away cancels the request.

Credentials: `Authorization: Bearer TOKEN`, or basic with the user `admin` or `caller` and the
token as password; `gpufaas token` prints it. Errors say `error`, `message` and facts."""


class Whole(Service, Leading, Protocol):
    """The service as its application sees it."""

    def health(self) -> Health:
        """Whether it could answer a caller."""
        ...

    def metrics(self) -> bytes:
        """Everything that Prometheus is told."""
        ...

    async def node_stream(self, websocket: WebSocket) -> None:
        """Serve one GPU manager's stream."""
        ...


def make_app(service: Whole, access: Access, meters: Meters, *, metrics_auth: bool = False) -> Asgi:
    """The whole application; with `metrics_auth`, Prometheus has to show credentials too."""
    hot = HotPath(service, access, meters)
    management = _management(service, access, meters, metrics_auth=metrics_auth)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] in hot.routes:
            await hot(scope, receive, send)
        else:
            await management(scope, receive, send)

    return app


def _management(service: Whole, access: Access, meters: Meters, *, metrics_auth: bool) -> FastAPI:
    app = FastAPI(title="gpufaas scheduler", description=_ABOUT, version=_version())
    schemes = [Depends(scheme(auto_error=False)) for scheme in (HTTPBearer, HTTPBasic)]
    view = [*schemes, Depends(_lets_in(access, Role.CALLER))]
    change = [*schemes, Depends(_lets_in(access, Role.ADMIN))]
    app.include_router(router(service, view, change))
    app.include_router(feed_router(service, meters, view))
    app.include_router(models_router(LeaderResidency(service.office), view, change))
    _add_health(app, service, view if metrics_auth else [])
    app.add_api_websocket_route("/nodes/{node}/stream", service.node_stream)
    app.add_exception_handler(SchedulerError, _failed)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _no_route)
    return app


def _add_health(app: FastAPI, service: Whole, may_measure: list[Any]) -> None:
    @app.get("/healthz", tags=["health"], summary="Whether the process is alive")
    async def healthz() -> dict[str, bool]:
        return {"alive": True}

    @app.get("/readyz", tags=["health"], summary="Whether callers are served, here or elsewhere")
    async def readyz(response: Response) -> Health:
        health = service.health()
        response.status_code = 200 if health.ready else 503
        return health

    @app.get(
        "/metrics",
        tags=["health"],
        summary="For Prometheus",
        response_class=Response,
        dependencies=may_measure,
    )
    async def metrics() -> Response:
        return Response(service.metrics() + own_process.page(), media_type=CONTENT_TYPE)


def _lets_in(access: Access, least: Role) -> Callable[[Request], Awaitable[None]]:
    # No plain function: it would be called in another thread.
    async def check(request: Request) -> None:
        role = access.role(request.headers.get("authorization", "").encode("latin-1"))
        if role is None:
            raise NotAllowed("the Authorization header names nobody who may", known=False)
        if least is Role.ADMIN and role is not Role.ADMIN:
            raise NotAllowed("only administrators may", known=True)

    return check


async def _failed(request: Request, error: Exception) -> Response:
    del request
    assert isinstance(error, SchedulerError), "registered for no other"
    status = failures.failure(error).status
    return JSONResponse(failures.body(error), status, failures.headers(error))


async def _no_route(request: Request, error: Exception) -> Response:
    del request
    assert isinstance(error, HTTPException), "registered for no other"
    said = {"error": "no-route", "message": str(error.detail)}
    return JSONResponse(said, error.status_code, error.headers)


async def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError), "registered for no other"
    problems: list[Any] = list(error.errors())
    said = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in problems)
    return await _failed(request, BadRequest(said))


def _version() -> str:
    try:
        return version("gpufaas")
    except PackageNotFoundError:  # run from a folder that was not installed
        return "0"
