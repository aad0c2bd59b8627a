"""The whole application: which part answers which path, and which paths need credentials."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple

from common.foreign_text import plain
from common.http.asgi import App, Message, Receive, Scope, Send, header_in, send_response, send_text
from common.telemetry import process_metrics
from gateway_ext.error_statuses import headers_of, status_of
from gateway_ext.errors import CrossSite, NotAllowed, WrongHost
from gateway_ext.host_names import AnsweredHosts, HostNames
from gateway_ext.metrics.api_counts import ApiMeters
from gateway_ext.openfaas.basic_auth import Auth
from gateway_ext.openfaas.cross_site import FOR_NO_PAGE, refuse_other_sites

_ABOUT = b"gpufaas: OpenFaaS functions on shared GPUs. Functions answer at /function/NAME.\n"
_METRICS = [(b"content-type", b"text/plain; version=0.0.4; charset=utf-8")]
_PROBES = frozenset({"/healthz", "/readyz"})
_HEALTH = _PROBES | {"/metrics", "/"}
# The server leaves the body of an answer to HEAD out.
_READ = frozenset({"GET", "HEAD"})
_ADMINISTRATORS = frozenset({"system", "ui"})


class Readiness(NamedTuple):
    """Whether calls are served, and if not, why."""

    ready: bool
    text: str


@dataclass(frozen=True, slots=True)
class GatewayParts:
    """The applications behind the gateway's paths.

    `jobs` has /async-function, /async-workflow and /system/jobs, `workflow` has /workflow,
    `workflow_routes` has /system/workflows and /system/workflow, `page` has /ui, `traces` has
    /system/traces, if they are given. Without `auth` every client may do everything.
    `function_hosts` serve functions and workflows alone. Only probes are answered in the names of
    other hosts than `hosts`.
    """

    invoke: App
    system: App
    logs: App
    auth: Auth | None
    readiness: Callable[[], Readiness]
    metrics: Callable[[], bytes]
    system_meters: ApiMeters
    metrics_auth: bool = False
    jobs: App | None = None
    page: App | None = None
    traces: App | None = None
    workflow: App | None = None
    workflow_routes: App | None = None
    function_hosts: HostNames = field(default_factory=HostNames)
    hosts: AnsweredHosts | None = None


def make_app(parts: GatewayParts) -> App:
    """One application; a call of a function costs one comparison on its way."""
    invoke = parts.invoke
    rest = _Rest(parts)

    def app(scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["path"].startswith("/function/"):
            return invoke(scope, receive, send)
        return rest(scope, receive, send)

    return app if parts.hosts is None or parts.hosts.every else _for_hosts(parts.hosts, app)


def _for_hosts(hosts: AnsweredHosts, app: App) -> App:
    """The application for requests in the names of these hosts, and for probes."""

    def checked(scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        try:
            hosts.check(header_in(scope, b"host"))
        except WrongHost as error:
            if scope["path"] not in _PROBES:
                return send_text(send, status_of(error), str(error))
        return app(scope, receive, send)

    return checked


class _Rest:
    """All paths but those of function calls."""

    def __init__(self, parts: GatewayParts) -> None:
        self._parts = parts
        self._by_segment: Mapping[str, App] = {
            "function": parts.invoke,
            "system": self._system,
            "async-function": parts.jobs or _nothing,
            "workflow": parts.workflow or _nothing,
            "async-workflow": parts.jobs or _nothing,
            "ui": self._page if parts.page else _nothing,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path in _HEALTH:
            await self._health(scope, send)
            return
        first = path[1:].partition("/")[0]  # `OPTIONS *` has a path without a slash
        hosts = self._parts.function_hosts
        if first in _ADMINISTRATORS and not hosts.every and header_in(scope, b"host") in hosts:
            await _nothing(scope, receive, send)
            return
        await self._by_segment.get(first, _nothing)(scope, receive, send)

    async def _system(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Ask for credentials, and count the answer."""
        began_s = perf_counter()
        status = 500

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *FOR_NO_PAGE]
            await send(message)

        try:
            if await self._may(scope, counted) and await _is_ours(scope, counted):
                await self._part_of_system(scope["path"])(scope, receive, counted)
        finally:
            took_s = perf_counter() - began_s
            self._parts.system_meters.answered(scope["method"], scope["path"], status, took_s)

    async def _page(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the page, with the same credentials.

        /ui only leads to /ui/: if it asked for credentials, browsers would send them with every
        call of a function, since they take the folder of a path for what the credentials open.
        """
        assert self._parts.page is not None, "the page has a path"
        if scope["path"] == "/ui" or (await self._may(scope, send) and await _is_ours(scope, send)):
            await self._parts.page(scope, receive, send)

    async def _may(self, scope: Scope, send: Send) -> bool:
        """Whether the credentials are right; if not, answers 401."""
        if self._parts.auth is not None:
            try:
                self._parts.auth.check(header_in(scope, b"authorization"))
            except NotAllowed as error:
                await send_text(send, status_of(error), str(error), headers_of(error))
                return False
        return True

    def _part_of_system(self, path: str) -> App:
        if path == "/system/logs":
            return self._parts.logs
        if path == "/system/jobs" or path.startswith("/system/jobs/"):
            return self._parts.jobs or _nothing
        if path == "/system/traces" or path.startswith("/system/traces/"):
            return self._parts.traces or _nothing
        if path.startswith("/system/workflow"):
            return self._parts.workflow_routes or _nothing
        return self._parts.system

    async def _health(self, scope: Scope, send: Send) -> None:
        if scope["method"] not in _READ:
            await send_text(send, 405, "GET is expected", [(b"allow", b"GET, HEAD")])
            return
        path = scope["path"]
        if path == "/metrics":
            if self._parts.metrics_auth and not await self._may(scope, send):
                return
            shown = (
                self._parts.metrics() + self._parts.system_meters.text() + process_metrics.page()
            )
            await send_response(send, 200, shown, _METRICS)
        elif path == "/readyz":
            ready, text = self._parts.readiness()
            await send_response(send, 200 if ready else 503, text.encode())
        else:
            await send_response(send, 200, _ABOUT if path == "/" else b"")


async def _is_ours(scope: Scope, send: Send) -> bool:
    """Whether the request is not from another site's page; if it is, refuses it."""
    try:
        refuse_other_sites(scope["headers"], reading=scope["method"] in _READ)
    except CrossSite as error:
        await send_text(send, status_of(error), str(error), headers_of(error))
        return False
    return True


async def _nothing(scope: Scope, receive: Receive, send: Send) -> None:
    del receive
    await send_text(send, 404, f"nothing is at {plain(scope['path'])}")
