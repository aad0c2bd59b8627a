"""The HTTP application: the hot path in front, FastAPI for everything else."""

import logging
import socket
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from http import HTTPStatus

from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.security import HTTPBasic, HTTPBearer
from starlette.exceptions import HTTPException

from common import build_identity
from common.http import server
from common.http.asgi import App, Receive, Scope, Send, bounded, header_in, send_text
from common.http.server_protocol import Limits, StreamHandler
from common.stream_upgrade import PROTOCOL
from common.telemetry import process_metrics
from common.telemetry.metrics import CONTENT_TYPE
from common.telemetry.stranger_log import StrangerLog
from scheduler.model.errors import CallerNotAllowed, MalformedRequest, SchedulerError
from scheduler.service import error_table
from scheduler.service.access import ApiAccess, ApiRole
from scheduler.service.http.lease_routes import MOST_BODY_BYTES, HotPath, send_error, unknown_caller
from scheduler.service.http.operator_routes import routers
from scheduler.service.scheduler_service import Health, SchedulerService
from scheduler.wire.node_stream import node_of_path

log = logging.getLogger(__name__)

_METRICS = "/metrics"
_NO_FRAMES = "a node's stream is one of frames: send `Upgrade: gpufaas-frames`\n"
_UPGRADE = ((b"connection", b"upgrade"), (b"upgrade", PROTOCOL))
# The paths that need no credentials.
_PUBLIC = frozenset({"/healthz", "/readyz"})
_ABOUT = """Places requests on GPUs. Programs call `POST /acquire` (JSON: `request`, `function`,
`models`, and optionally `batch`, `deadline_in_s`, `waited_s`, `priority`, `application`, `stage`,
`slo_s`, `near`), which waits and answers with a lease, its GPU, its node's addresses and a signed
token; `?progress=1` streams JSON lines meanwhile. `POST /wanted` and `/cancel` take `request`,
`POST /release` takes `lease`, `may_return` and `request`. Going away cancels the request. The
leases of a caller who keeps `POST /presence` open end with that connection.

Credentials: `Authorization: Bearer TOKEN`, or basic with the user `admin` or `caller` and the
token as password; `gpufaas token` prints it. Errors have `error`, `message` and facts."""


def make_app(service: SchedulerService) -> App:
    """The whole application; with `metrics_auth` in the settings, Prometheus needs credentials too.

    Credentials are checked before a request is routed, since FastAPI reads a body before it asks
    who sent it.
    """
    hot, access = HotPath(service), service.access
    management = bounded(_management(service), MOST_BODY_BYTES)
    strangers = StrangerLog(log)
    public = _PUBLIC if service.settings.scheduler.metrics_auth else _PUBLIC | {_METRICS}

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path in hot.routes:
            await hot(scope, receive, send)
        elif node_of_path(path) is not None:  # streams of frames do not come here
            strangers.warn("%s was asked for without `Upgrade: gpufaas-frames`", path)
            await send_text(send, HTTPStatus.UPGRADE_REQUIRED, _NO_FRAMES, _UPGRADE)
        elif path in public or _is_known(access, scope):
            await management(scope, receive, send)
        else:
            await send_error(send, unknown_caller())

    return app


def _is_known(access: ApiAccess, scope: Scope) -> bool:
    return access.role(header_in(scope, b"authorization")) is not None


def _management(service: SchedulerService) -> FastAPI:
    app = FastAPI(title="gpufaas scheduler", description=_ABOUT, version=build_identity.release())
    schemes = [Depends(scheme(auto_error=False)) for scheme in (HTTPBearer, HTTPBasic)]
    view = [*schemes, Depends(_lets_in(service.access, ApiRole.CALLER))]
    change = [*schemes, Depends(_lets_in(service.access, ApiRole.ADMIN))]
    for router in routers(service, view, change):
        app.include_router(router)
    _add_health(app, service)
    _add_errors(app)
    return app


def _add_health(app: FastAPI, service: SchedulerService) -> None:
    @app.get("/healthz", tags=["health"], summary="Whether the process is alive")
    async def healthz() -> dict[str, bool]:
        return {"alive": True}

    @app.get("/readyz", tags=["health"], summary="Whether callers are served, here or elsewhere")
    async def readyz(request: Request, response: Response) -> Health:
        health = service.health()
        response.status_code = 200 if health.ready else 503
        return health if _is_known(service.access, request.scope) else health.without_names()

    @app.get(_METRICS, tags=["health"], summary="For Prometheus", response_class=Response)
    async def metrics() -> Response:
        return Response(service.metrics() + process_metrics.page(), media_type=CONTENT_TYPE)


def _lets_in(access: ApiAccess, least: ApiRole) -> Callable[[Request], Awaitable[None]]:
    # `check` is async: FastAPI would call a plain function in another thread.
    async def check(request: Request) -> None:
        role = access.role(request.headers.get("authorization", "").encode("latin-1"))
        if role is None:
            raise unknown_caller()
        if least is ApiRole.ADMIN and role is not ApiRole.ADMIN:
            raise CallerNotAllowed("only administrators may", known=True)

    return check


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(SchedulerError)
    async def failed(_: Request, error: SchedulerError) -> Response:
        status = error_table.failure(error).status
        return JSONResponse(error_table.body(error), status, error_table.headers(error))

    @app.exception_handler(HTTPException)
    async def no_route(_: Request, error: HTTPException) -> Response:
        fields = {"error": "no-route", "message": str(error.detail)}
        return JSONResponse(fields, error.status_code, error.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        explained = "; ".join(
            f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors()
        )
        return await failed(request, MalformedRequest(explained))


_DRAIN_S = 3.0


def serving(
    app: App,
    listener: socket.socket,
    limits: Limits | None = None,
    streams: StreamHandler | None = None,
) -> AbstractAsyncContextManager[None]:
    """Serve HTTP and the streams of nodes and callers while the context lasts."""
    return server.serving(app, listener, _DRAIN_S, streams=streams, limits=limits)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket that notices callers whose host vanished; port 0 is any free one."""
    return server.listen(host, port, probe_clients=True)
