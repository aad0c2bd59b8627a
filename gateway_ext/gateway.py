"""One gateway: its parts, the paths that they answer, and an end that cuts no call short."""

import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Self

from common.addresses import address_text, host_and_port
from common.errors import BadAddress
from common.foreign_text import plain
from common.http.asgi import App, Message, Receive, Scope, Send, header_in, send_response, send_text
from common.http.client import HttpClient
from common.http.server import listen, serving
from common.telemetry import process_metrics
from common.telemetry.metrics import MetricFamily, gauge
from gateway_ext import metrics
from gateway_ext.calls.exchange import InvokeSettings
from gateway_ext.calls.function_table import Function, Functions
from gateway_ext.calls.invoke import Invoke
from gateway_ext.calls.lease_pool import LeasePool
from gateway_ext.calls.passed_headers import BrowserGuard
from gateway_ext.error_statuses import headers_of, status_of
from gateway_ext.errors import BadRequest, CrossSite, NotAllowed, WrongHost
from gateway_ext.jobs.callbacks import CallbackRule
from gateway_ext.jobs.parts import AsyncJobs, check_queue, jobs_of
from gateway_ext.metrics import ApiMeters, GatewayMeters
from gateway_ext.model import Deployment, FunctionId
from gateway_ext.openfaas import function_options
from gateway_ext.openfaas.basic_auth import Auth, BasicCredentials, credentials_in
from gateway_ext.openfaas.system_routes import Logs, make_system
from gateway_ext.ports import Capacity, Provider
from gateway_ext.scaling.kept_models import KeptModels
from gateway_ext.scaling.scaler import Scaler
from gateway_ext.settings import GatewaySettings
from gateway_ext.sites import FOR_NO_PAGE, AnsweredHosts, HostNames, refuse_other_sites
from gateway_ext.tracing.tracer import CallTracer
from gateway_ext.ui.cluster_source import PageSource
from gateway_ext.ui.feed import PagePace, WatcherFeed
from gateway_ext.ui.routes import make_page
from gateway_ext.ui.rows import DeadLetterRows, WorkflowRows
from gateway_ext.workflows.parts import WorkflowParts, workflow_parts
from scheduler.client.lease_client import LeaseClient
from scheduler.client.operator_client import OperatorClient

_log = logging.getLogger(__name__)

_ROLES = frozenset({"gateway", "provider"})
_SECRETS = "secrets"


_ABOUT = b"gpufaas: OpenFaaS functions on shared GPUs. Functions answer at /function/NAME.\n"
_METRICS = [(b"content-type", b"text/plain; version=0.0.4; charset=utf-8")]
_PROBES = frozenset({"/healthz", "/readyz"})
_HEALTH = _PROBES | {"/metrics", "/"}
# The server leaves the body of an answer to HEAD out.
_READ = frozenset({"GET", "HEAD"})
_ADMINISTRATORS = frozenset({"system", "ui"})


@dataclass(frozen=True, slots=True)
class GatewayApp:
    """The application of a gateway, made of those behind its paths.

    `jobs` has /async-function, /async-workflow and /system/jobs, `workflow` has /workflow,
    `workflow_routes` has /system/workflows and /system/workflow, `page` has /ui, `traces` has
    /system/traces, if they are given. Without `auth` every client may do everything.
    `function_hosts` serve functions and workflows alone. Only probes are answered in the names of
    other hosts than `hosts`. `ready` says whether calls are served.
    """

    invoke: App
    system: App
    logs: App
    auth: Auth | None
    ready: Callable[[], bool]
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

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Serve a request; a call of a function costs two comparisons on its way."""
        path = scope["path"]
        if self.hosts is not None and not self.hosts.every:
            try:
                self.hosts.check(header_in(scope, b"host"))
            except WrongHost as error:
                if path not in _PROBES:
                    return send_text(send, status_of(error), str(error))
        if path.startswith("/function/"):
            return self.invoke(scope, receive, send)
        return self._rest(scope)(scope, receive, send)

    def _rest(self, scope: Scope) -> App:
        """The application of any path but those of function calls."""
        path = scope["path"]
        if path in _HEALTH:
            return self._health
        first = path[1:].partition("/")[0]  # `OPTIONS *` has a path without a slash
        hosts = self.function_hosts
        if first in _ADMINISTRATORS and not hosts.every and header_in(scope, b"host") in hosts:
            return _nothing
        by_segment: Mapping[str, App | None] = {
            "function": self.invoke,
            "system": self._system,
            "async-function": self.jobs,
            "workflow": self.workflow,
            "async-workflow": self.jobs,
            "ui": self._page if self.page else None,
        }
        return by_segment.get(first) or _nothing

    async def _system(self, scope: Scope, receive: Receive, send: Send) -> None:
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
            self.system_meters.answered(scope["method"], scope["path"], status, took_s)

    async def _page(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the page, with the same credentials.

        /ui only leads to /ui/: if it asked for credentials, browsers would send them with every
        call of a function, since they take the folder of a path for what the credentials open.
        """
        assert self.page is not None, "without a page /ui leads nowhere"
        if scope["path"] == "/ui" or (await self._may(scope, send) and await _is_ours(scope, send)):
            await self.page(scope, receive, send)

    async def _may(self, scope: Scope, send: Send) -> bool:
        """Whether the credentials are right; if not, answers 401."""
        if self.auth is not None:
            try:
                self.auth.check(header_in(scope, b"authorization"))
            except NotAllowed as error:
                await send_text(send, status_of(error), str(error), headers_of(error))
                return False
        return True

    def _part_of_system(self, path: str) -> App:
        if path == "/system/logs":
            return self.logs
        if path == "/system/jobs" or path.startswith("/system/jobs/"):
            return self.jobs or _nothing
        if path == "/system/traces" or path.startswith("/system/traces/"):
            return self.traces or _nothing
        if path.startswith("/system/workflow"):
            return self.workflow_routes or _nothing
        return self.system

    async def _health(self, scope: Scope, receive: Receive, send: Send) -> None:
        del receive
        if scope["method"] not in _READ:
            await send_text(send, 405, "GET is expected", [(b"allow", b"GET, HEAD")])
            return
        path = scope["path"]
        if path == "/metrics":
            if self.metrics_auth and not await self._may(scope, send):
                return
            shown = self.metrics() + self.system_meters.text() + process_metrics.page()
            await send_response(send, 200, shown, _METRICS)
        elif path == "/readyz":
            if self.ready():
                await send_response(send, 200, b"ready\n")
            else:
                await send_response(send, 503, b"the gateway starts or stops\n")
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


class Gateway:
    """Serves functions of one provider; use it as a context.

    `leases` grants GPU leases (`scheduler.client.lease_client.LeaseClient`, opened and closed by
    its owner); without it, functions ask for theirs by themselves. `pinning` pins models in GPU
    memory (an administrator's `OperatorClient`), `capacity` knows the memory of the GPUs. `tracer`
    remembers calls, and may send their traces on. `console` (another `OperatorClient`) supplies
    the page's state; without it there is no page. Every `every_s` the scaler looks at functions and
    the page's watchers get the changes.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        provider: Provider,
        leases: LeaseClient | None = None,
        *,
        pinning: OperatorClient | None = None,
        capacity: Capacity | None = None,
        tracer: CallTracer | None = None,
        console: OperatorClient | None = None,
        every_s: float = 1.0,
    ) -> None:
        _check(settings)
        self._settings = settings
        self._every_s = every_s
        self._provider = provider
        self._leases = leases
        self._pinning = pinning
        self._capacity = capacity
        self._console = console
        self._feed: WatcherFeed | None = None
        self._logs = Logs(provider)
        self.tracer = tracer or CallTracer()
        self._exits = contextlib.AsyncExitStack()
        self.is_ready = False
        self._scaler: Scaler | None = None
        self.functions = Functions(on_change=self._changed, options_of=self._options_of)
        self.meters = GatewayMeters(self.functions.loads, settings.metric_names)
        self.credentials = _credentials(settings)
        self.address = ("", 0)

    @property
    def url(self) -> str:
        return f"http://{address_text(*self.address)}"

    async def __aenter__(self) -> Self:
        """Start everything; the address is bound first, so that a taken one fails at once."""
        async with contextlib.AsyncExitStack() as exits:
            listener = listen(*host_and_port(self._settings.listen))
            exits.callback(listener.close)
            self.address = listener.getsockname()[:2]
            exits.push_async_callback(self._provider.close)
            await self._provider.start(self.functions)
            app = await self._started(exits)
            await exits.enter_async_context(serving(app, listener, self._settings.drain_s))
            exits.callback(self._end_followers)
            self._exits = exits.pop_all()
        self.is_ready = True
        _log.info("the gateway answers at %s", self.url)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Accept no call; end calls in flight first, then jobs and scaling, then the provider."""
        self.is_ready = False
        await self._exits.aclose()

    async def _started(self, exits: contextlib.AsyncExitStack) -> App:
        settings = self._settings
        invocation = InvokeSettings(
            max_body_bytes=settings.max_body_bytes,
            wake_s=settings.wake_s,
        )
        pool = None if self._leases is None else LeasePool(self._leases, self.meters)
        client, meters = HttpClient(invocation.client), self.meters
        auth = None if self.credentials is None else Auth(self.credentials)
        hosts = HostNames(settings.function_hosts)
        meters.add(self.tracer.families)
        meters.add(self._template_families)
        invoke = Invoke(
            *(self.functions, client, pool, invocation, meters),
            wake=self._wake,
            tracer=self.tracer,
            guard=BrowserGuard(hosts) if auth is None else BrowserGuard(hosts, auth.holds),
        )
        exits.push_async_callback(invoke.close)
        workflows = await exits.enter_async_context(
            workflow_parts(settings, self.functions, invoke, meters, _log)
        )
        jobs = await exits.enter_async_context(
            jobs_of(settings, self.functions, invoke, workflows.targets, _log, self.address)
        )
        meters.add(partial(jobs.families, meters.functions))
        if settings.scaling:
            self._scaler = await exits.enter_async_context(self._make_scaler(jobs))
            meters.add(partial(self._scaler.families, meters.functions))
        if self._pinning is not None:
            keeping = KeptModels(self.functions, self._pinning)
            await exits.enter_async_context(keeping)
        return GatewayApp(
            invoke=invoke,
            system=make_system(
                *(self._provider, self.meters, settings, self._capacity),
                ordering=contextlib.nullcontext if self._scaler is None else self._scaler.ordering,
                namespace_removed=workflows.namespace_removed,
            ),
            logs=self._logs,
            auth=auth,
            ready=lambda: self.is_ready,
            metrics=self.meters.text,
            metrics_auth=settings.metrics_auth,
            system_meters=ApiMeters(),
            jobs=jobs.app,
            workflow=workflows.app,
            workflow_routes=workflows.routes,
            traces=self.tracer.show,
            page=await self._page(jobs, workflows, exits),
            function_hosts=hosts,
            hosts=AnsweredHosts(address_text(*self.address), _allowed_hosts(settings), hosts),
        )

    async def _page(
        self, jobs: AsyncJobs, workflows: WorkflowParts, exits: contextlib.AsyncExitStack
    ) -> App | None:
        if self._console is None:
            return None
        letters = DeadLetterRows(jobs.queue)
        rows = WorkflowRows(workflows.workflows, workflows.history)
        cluster = PageSource(
            *(self._console, self.functions, self.meters, letters, rows.look),
            refused_workflows=workflows.workflows.refused,
        )
        self._feed = await exits.enter_async_context(WatcherFeed(cluster, PagePace(self._every_s)))
        return make_page(self._feed, cluster)

    def _end_followers(self) -> None:
        """End the responses that would never end by themselves."""
        self._logs.close()
        if self._feed is not None:
            self._feed.close()

    def _template_families(self) -> Iterator[MetricFamily]:
        name_of, sizes = self.meters.functions.of, self._provider.template_bytes()
        values = [((name_of(str(id_)),), size) for id_, size in sizes.items()]
        yield gauge(metrics.TEMPLATES, values)

    def _make_scaler(self, jobs: AsyncJobs) -> Scaler:
        def queued(function: FunctionId) -> int:
            return jobs.queue.tally.calls.get(function, 0)

        scale = self._provider.scale
        return Scaler(self.functions, scale, queued, time.monotonic, _log, self._every_s)

    def _wake(self, function: Function) -> None:
        """Start an instance for a waiting call; before the scaler runs, its first look does it."""
        if self._scaler is not None:
            self._scaler.wake(function)

    def _options_of(self, deployment: Deployment) -> function_options.FunctionOptions:
        settings, own_s = self._settings, function_options.own_timeout_s(deployment)
        if own_s > settings.longest_timeout_s:  # it was deployed before, or elsewhere
            text = "%s: its time-out of %g s is cut to %g s, longest_timeout_s in the settings"
            _log.warning(text, deployment.id, own_s, settings.longest_timeout_s)
        return function_options.of(
            deployment,
            settings.timeout_s,
            settings.max_wait_s,
            longest_timeout_s=settings.longest_timeout_s,
            default_shows_errors=settings.shows_errors,
        )

    def _changed(self, function: Function) -> None:
        if self._leases is not None:
            terms = function.options.terms if function.options.gpu and not function.gone else None
            self._leases.tell_terms(function.id.for_scheduler, terms)
        if function.gone:
            self.meters.gone(function.label)
        else:
            self.meters.serves(function.label, [one.instance for one in function.endpoints])
        if self._scaler is not None:
            self._scaler.changed(function)


def _check(settings: GatewaySettings) -> None:
    if settings.role not in _ROLES:
        raise BadRequest(f"role: {settings.role!r}: one of {', '.join(sorted(_ROLES))} is expected")
    for name in ("timeout_s", "longest_timeout_s"):
        if not 0 < (time_s := getattr(settings, name)) <= function_options.LONGEST_S:
            raise BadRequest(f"{name}: {time_s}: a time above 0, of a day at most, is expected")
    if (time_s := settings.timeout_s) > (longest_s := settings.longest_timeout_s):
        raise BadRequest(f"timeout_s: {time_s:g}: at most longest_timeout_s, {longest_s:g}")
    if not settings.max_wait_s >= 0:  # nor is NaN
        raise BadRequest(f"max_wait_s: {settings.max_wait_s}: a time from 0 is expected")
    try:
        host_and_port(settings.listen)
    except BadAddress as error:
        raise BadRequest(f"listen: {error}") from error
    check_queue(settings)
    HostNames(settings.function_hosts)
    _allowed_hosts(settings)
    CallbackRule(allowed=settings.callback_allowed)


def _allowed_hosts(settings: GatewaySettings) -> HostNames:
    return HostNames(settings.allowed_hosts, "allowed_hosts")


def _credentials(settings: GatewaySettings) -> BasicCredentials | None:
    if not settings.auth:
        return None
    return credentials_in(Path(settings.secrets_dir or Path(settings.state_dir) / _SECRETS))
