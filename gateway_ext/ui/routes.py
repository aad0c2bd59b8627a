"""The routes below /ui: the page's files, its state and feed, and its orders."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route
from starlette.staticfiles import StaticFiles

from common.http.asgi import (
    App,
    Header,
    Receive,
    Scope,
    Send,
    header_in,
    send_text,
    until_disconnected,
)
from common.tasks import until_first
from gateway_ext.bounded_json import decoded
from gateway_ext.errors import BadRequest, CrossSite, GatewayError
from gateway_ext.features import Hooks
from gateway_ext.jobs.values import job_number
from gateway_ext.openfaas.json_answers import body_of, done, failed, no_route, shown
from gateway_ext.sites import refuse_other_sites
from gateway_ext.ui.cluster_source import PageSource
from gateway_ext.ui.feed import PagePace, WatcherFeed
from gateway_ext.ui.rows import DeadLetterRows

_EVENTS = "/ui/events"


STATIC = Path(__file__).parent / "static"
PAGE = "index.html"

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".woff2": "font/woff2",
    ".webmanifest": "application/manifest+json",
}

# No content from elsewhere, no inline code, no frame around the page, and no referrer.
SAFE: Mapping[str, str] = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "font-src 'self'; connect-src 'self'; manifest-src 'self'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
SAFE_HEADERS: tuple[Header, ...] = tuple(
    (name.encode(), value.encode()) for name, value in SAFE.items()
)


_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
    *SAFE_HEADERS,
]
_BUSY, _NOT_ALLOWED, _NOT_MODIFIED, _MOVED = 503, 405, 304, 308
_READS = frozenset({"GET", "HEAD"})
_VERBS = frozenset({"pin", "unpin", "prefetch", "evict"})
_SENT_BY = "gpufaas"

_Handler = Callable[[Request], Awaitable[Response]]


@asynccontextmanager
async def page(gateway: Hooks) -> AsyncIterator[None]:
    """Serve the page, if the gateway has somebody who knows the cluster."""
    if gateway.console is None:
        yield
        return
    source = PageSource(
        *(gateway.console, gateway.functions, gateway.meters, DeadLetterRows(gateway.queue)),
        *(gateway.sections, gateway.alerts),
    )
    async with WatcherFeed(source, PagePace(gateway.every_s)) as feed:
        gateway.pages["ui"] = make_page(feed, source)
        gateway.ends.append(feed.close)
        yield


def make_page(feed: WatcherFeed, source: PageSource, static: Path = STATIC) -> App:
    """The application for everything below /ui; it checks no credentials."""
    page = _Page(feed, source, StaticFiles(directory=static))
    routes = [
        _route("/ui", GET=page.root),
        _route("/ui/", GET=page.index),
        _route("/ui/static/{name:path}", GET=page.file),
        _route("/ui/state", GET=page.state),
        _route("/ui/decisions/{request:path}", GET=page.decision),
        _route("/ui/policy", POST=page.set_policy),
        _route("/ui/models/{model:path}/{verb}", POST=page.order),
        _route("/ui/models/{model:path}", GET=page.model),
        _route("/ui/dead-letters/{number}", DELETE=page.discard),
        _route("/ui/dead-letters/{number}/replay", POST=page.replay),
    ]
    rest = Starlette(
        routes=routes, exception_handlers={GatewayError: _failed, HTTPException: _failed}
    )
    rest.router.redirect_slashes = False

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == _EVENTS:
            await _events(feed, scope, receive, send)
        else:
            await rest(scope, receive, send)

    return app


def _route(path: str, **handlers: _Handler) -> Route:
    async def handle(request: Request) -> Response:
        method = "GET" if request.method == "HEAD" else request.method
        if method not in _READS:
            _refuse_others(request)
        answer = await handlers[method](request)
        answer.headers.update(SAFE)
        answer.headers.setdefault("cache-control", "no-store")
        return answer

    return Route(path, handle, methods=list(handlers))


def _refuse_others(request: Request) -> None:
    """Require a header that only our page sends: browsers send credentials for every site."""
    if request.headers.get("x-requested-with", "").lower() != _SENT_BY:
        raise CrossSite(f"the header X-Requested-With: {_SENT_BY} is expected")
    refuse_other_sites(request.headers.raw)


@dataclass(frozen=True, slots=True)
class _Page:
    """The page's requests."""

    feed: WatcherFeed
    source: PageSource
    files: StaticFiles

    async def root(self, request: Request) -> Response:
        """Redirect to the path with a slash, so that the page's relative links work."""
        del request
        return RedirectResponse("/ui/", _MOVED)

    async def index(self, request: Request) -> Response:
        return await self._file(request, PAGE)

    async def file(self, request: Request) -> Response:
        return await self._file(request, request.path_params["name"])

    async def state(self, request: Request) -> Response:
        del request
        return Response(await self.feed.state(), media_type="application/json")

    async def decision(self, request: Request) -> Response:
        return shown(await self.source.decision(request.path_params["request"]))

    async def model(self, request: Request) -> Response:
        return shown(await self.source.model(request.path_params["model"]))

    async def set_policy(self, request: Request) -> Response:
        sent = decoded(await body_of(request), Policy)
        await self.source.set_policy(sent.name, sent.parameters)
        return self._ordered()

    async def order(self, request: Request) -> Response:
        verb = request.path_params["verb"]
        if verb not in _VERBS:
            raise BadRequest(f"{verb!r}: one of {', '.join(sorted(_VERBS))} is expected")
        sent = decoded(await body_of(request) or b"{}", _Order)
        await self.source.order(request.path_params["model"], verb, sent.gpu)
        return self._ordered()

    async def replay(self, request: Request) -> Response:
        await self.source.replay(job_number(request.path_params["number"]))
        return self._ordered()

    async def discard(self, request: Request) -> Response:
        await self.source.discard(job_number(request.path_params["number"]))
        return self._ordered()

    def _ordered(self) -> Response:
        self.feed.soon()
        return done()

    async def _file(self, request: Request, name: str) -> Response:
        kind = _TYPES.get(Path(name).suffix)
        if kind is None or name.endswith("/"):
            raise HTTPException(404, "there is no such file")
        answer = await self.files.get_response(name, request.scope)
        answer.headers["cache-control"] = "private, no-cache"
        if answer.status_code != _NOT_MODIFIED:
            answer.headers["content-type"] = kind
        return answer


async def _failed(request: Request, error: Exception) -> Response:
    answer = await (no_route if isinstance(error, HTTPException) else failed)(request, error)
    answer.headers.update(SAFE)
    return answer


class Policy(msgspec.Struct):
    """The order of a policy."""

    name: str
    parameters: dict[str, int | float] = {}


class _Order(msgspec.Struct):
    gpu: Annotated[str, msgspec.Meta(min_length=1)] | None = None


# -- server-sent events --------------------------------------------------------------------------


async def _events(feed: WatcherFeed, scope: Scope, receive: Receive, send: Send) -> None:
    if scope["method"] != "GET":
        await send_text(send, _NOT_ALLOWED, "GET is expected", [(b"allow", b"GET"), *SAFE_HEADERS])
        return
    if feed.full or feed.closed:
        headers = [(b"retry-after", b"10"), *SAFE_HEADERS]
        why = "the feed is closed" if feed.closed else "too many browsers watch already"
        await send_text(send, _BUSY, why, headers)
        return
    await send({"type": "http.response.start", "status": 200, "headers": _STREAM})
    await until_first(
        _send_events(feed, header_in(scope, b"last-event-id").decode("latin-1"), send),
        until_disconnected(receive),
    )
    await send({"type": "http.response.body", "body": b""})


async def _send_events(feed: WatcherFeed, last_id: str, send: Send) -> None:
    async with aclosing(feed.watch(last_id)) as events:
        async for event in events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
