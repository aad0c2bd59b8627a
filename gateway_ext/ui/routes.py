"""The routes below /ui: the page's files, its state and feed, and its orders."""

import asyncio
import contextlib
import logging
import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

import msgspec
from pydantic_core import to_json
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
from common.numerals import natural
from common.tasks import BackgroundTasks, until_first
from common.time_limits import time_limit
from gateway_ext.bounded_json import decoded
from gateway_ext.errors import BadRequest, CrossSite, GatewayError
from gateway_ext.features import Hooks
from gateway_ext.jobs.values import job_number
from gateway_ext.openfaas.json_answers import body_of, done, failed, no_route, shown
from gateway_ext.sites import refuse_other_sites
from gateway_ext.ui.cluster_source import PageSource
from gateway_ext.ui.rows import DeadLetterRows
from gateway_ext.ui.state import PageState, Point, Series, by_kind, changes

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


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PagePace:
    """How often the feed looks while it is watched, and its share of a core at most."""

    every_s: float = 1.0
    most_share: float = 0.012
    most_watchers: int = 100


class _Message(NamedTuple):
    number: int
    text: bytes


class WatcherFeed:
    """One collector for all watchers; use it as a context.

    Without watchers it only adds points to the charts. The cost of a look determines the pause
    before the next one.
    """

    def __init__(
        self, source: PageSource, pace: PagePace | None = None, *, series: Series | None = None
    ) -> None:
        self._source = source
        self._pace = pace or PagePace()
        self._series = series or Series()
        self._name = secrets.token_hex(4)
        self._number = 0
        self._sent: deque[_Message] = deque(maxlen=30)
        self._look = PageState({}, {})
        self._looked_s = -float("inf")
        self._pause_s = self._pace.every_s
        self._state: _Message | None = None
        self._looking = asyncio.Lock()
        self._published = asyncio.Event()
        self._wanted = asyncio.Event()
        self.closed = False
        self.watchers = 0
        self._tasks = BackgroundTasks(log, "the page's collector")

    async def __aenter__(self) -> Self:
        # Watchers must not wait for a collector that has ended.
        self._tasks.start(self._keep_looking()).add_done_callback(lambda _: self.close())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()
        await self._tasks.close()

    @property
    def full(self) -> bool:
        return self.watchers >= self._pace.most_watchers

    def close(self) -> None:
        self.closed = True
        self._publish()

    def soon(self) -> None:
        """Look again at once: an order was given."""
        self._pause_s = 0.0
        self._wanted.set()

    async def state(self) -> bytes:
        """The whole state as JSON, no older than a pause between two looks."""
        await self._fresh()
        return self._shown().text

    async def watch(self, last_id: str = "") -> AsyncGenerator[bytes, None]:
        """Events until the watcher leaves: the state, or the changes since `last_id`."""
        self.watchers += 1
        try:
            if self.watchers == 1:
                self._wanted.set()
            at = self._known(last_id)
            yield b"retry: 2000\n\n"
            while not self.closed:
                if at is None or not self._has_all_since(at):
                    await self._fresh()
                    shown = self._shown()
                    at = shown.number
                    yield self._event("state", at, shown.text)
                    continue  # a slow watcher may have missed further changes
                published = self._published
                for message in self._after(at):
                    at = message.number
                    yield message.text
                if published is self._published and not self.closed:
                    await published.wait()
        finally:
            self.watchers -= 1

    # -- looking ----------------------------------------------------------------------------------

    async def _keep_looking(self) -> None:
        while True:
            if self.watchers:
                await self._fresh()
            elif self._series.due(time.monotonic()):
                point = await self._source.point()
                self._series.add(point, time.monotonic())
                self._state = None
                self._number += 1
                self._sent.clear()  # returning watchers get all points again
            await self._rest()

    async def _rest(self) -> None:
        pause_s = self._pause_s if self.watchers else self._series.step_s
        with contextlib.suppress(TimeoutError):
            async with time_limit(pause_s):
                await self._wanted.wait()
        self._wanted.clear()

    async def _fresh(self) -> None:
        async with self._looking:
            if time.monotonic() < self._looked_s + self._pause_s * 0.9:
                return
            look = await self._source.look()
            points = await self._new_points()
            began_s = time.thread_time()
            self._publish_changes(changes(self._look, look), points, first=self._looked_s < 0)
            self._look = look
            self._looked_s = time.monotonic()
            spent_s = look.spent_s + time.thread_time() - began_s
            self._pause_s = max(self._pace.every_s, spent_s / self._pace.most_share)

    async def _new_points(self) -> list[Point]:
        if not self._series.due(time.monotonic()):
            return []
        return self._series.add(await self._source.point(), time.monotonic())

    def _publish_changes(
        self, changed: dict[str, Any], points: list[Point], *, first: bool
    ) -> None:
        """Publish the changes to every watcher; the first look is no change."""
        self._number += 1
        self._state = None
        if first:
            return
        kind = "change" if changed or points else "ping"
        history = {"history": {"added": by_kind(points)}} if points else {}
        text = _json({"now": time.time(), **changed, **history})
        self._sent.append(_Message(self._number, self._event(kind, self._number, text)))
        self._publish()

    def _publish(self) -> None:
        published, self._published = self._published, asyncio.Event()
        published.set()

    # -- messages ---------------------------------------------------------------------------------

    def _shown(self) -> _Message:
        """The whole state, rendered once for all watchers."""
        if self._state is None:
            look = self._look
            state: dict[str, Any] = {"now": time.time(), **look.whole}
            state.update((section, list(items.values())) for section, items in look.items.items())
            state["history"] = self._series.shown()
            self._state = _Message(self._number, _json(state))
        return self._state

    def _known(self, last_id: str) -> int | None:
        """The last message that a returning watcher has; None where another process sent it."""
        name, _, text = last_id.partition("-")
        number = natural(text)
        return None if name != self._name or number is None else min(number, self._number)

    def _has_all_since(self, number: int) -> bool:
        return number == self._number or bool(self._sent and self._sent[0].number <= number + 1)

    def _after(self, number: int) -> list[_Message]:
        return [message for message in self._sent if message.number > number]

    def _event(self, kind: str, number: int, text: bytes) -> bytes:
        head = f"id: {self._name}-{number}\nevent: {kind}\ndata: ".encode()
        return b"".join((head, text, b"\n\n"))


def _json(value: object) -> bytes:
    return to_json(value, inf_nan_mode="null")


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
