"""One gateway: its parts, the paths that they answer, and an end that cuts no call short."""

import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
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
from gateway_ext.features import Feature, Hooks
from gateway_ext.jobs.callbacks import CallbackRule
from gateway_ext.jobs.queue import JobQueue
from gateway_ext.jobs.routes import make_job_routes
from gateway_ext.jobs.shared import Store, shared_store
from gateway_ext.jobs.worker import job_families, job_intake, jobs_of, opened_queue
from gateway_ext.metrics import ApiMeters, GatewayMeters
from gateway_ext.model import Deployment, FunctionId
from gateway_ext.openfaas import function_options
from gateway_ext.openfaas.basic_auth import Auth, BasicCredentials, credentials_in
from gateway_ext.openfaas.system_routes import LargestGpu, Logs, make_system
from gateway_ext.ports import Provider
from gateway_ext.scaling.kept_models import KeptModels
from gateway_ext.scaling.scaler import Scaler
from gateway_ext.settings import GatewaySettings
from gateway_ext.shared_jobs.store import shared_jobs
from gateway_ext.sites import FOR_NO_PAGE, AnsweredHosts, HostNames, refuse_other_sites
from gateway_ext.tracing.tracer import CallTracer
from gateway_ext.ui.routes import page
from gateway_ext.workflows.parts import workflows
from scheduler.client.lease_client import LeaseClient
from scheduler.client.operator_client import OperatorClient

_log = logging.getLogger(__name__)

# What a gateway can do without: each is a folder that may leave, with its import and its name here.
STORES: Sequence[Store] = (shared_jobs,)
FEATURES: Sequence[Feature] = (workflows, page)

_ROLES = frozenset({"gateway", "provider"})
_SECRETS = "secrets"


_ABOUT = b"gpufaas: OpenFaaS functions on shared GPUs. Functions answer at /function/NAME.\n"
_METRICS = [(b"content-type", b"text/plain; version=0.0.4; charset=utf-8")]
_PROBES = frozenset({"/healthz", "/readyz"})
_HEALTH = _PROBES | {"/metrics", "/"}
# The server leaves the body of an answer to HEAD out.
_READ = frozenset({"GET", "HEAD"})


@dataclass(frozen=True, slots=True)
class GatewayApp:
    """The application of a gateway, made of those behind its paths.

    `routes` has what is behind the first part of a path, for everybody, `pages` for administrators.
    `below_system` has what is behind the part after /system, `system` the rest of it. Without
    `auth` every client may do everything. `function_hosts` serve functions and workflows alone.
    Only probes are answered in the names of other hosts than `hosts`. `ready` says whether calls
    are served.
    """

    invoke: App
    system: App
    auth: Auth | None
    ready: Callable[[], bool]
    metrics: Callable[[], bytes]
    system_meters: ApiMeters
    metrics_auth: bool = False
    routes: Mapping[str, App] = field(default_factory=dict)
    pages: Mapping[str, App] = field(default_factory=dict)
    below_system: Mapping[str, App] = field(default_factory=dict)
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
        if first != "system" and first not in self.pages:
            return self.routes.get(first, _nothing)
        hosts = self.function_hosts
        if not hosts.every and header_in(scope, b"host") in hosts:
            return _nothing
        return self._system if first == "system" else partial(self._page, self.pages[first])

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

    async def _page(self, app: App, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a page, with the same credentials.

        /ui only leads to /ui/: if it asked for credentials, browsers would send them with every
        call of a function, since they take the folder of a path for what the credentials open.
        """
        is_folder = "/" not in scope["path"][1:]
        if is_folder or (await self._may(scope, send) and await _is_ours(scope, send)):
            await app(scope, receive, send)

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
        part, slash, _ = path.removeprefix("/system/").partition("/")
        if part == "logs" and slash:
            return self.system
        return self.below_system.get(part, self.system)

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


@dataclass(eq=False)
class Gateway:
    """Serves functions of one provider; use it as a context.

    `leases` grants GPU leases (`scheduler.client.lease_client.LeaseClient`, opened and closed by
    its owner); without it, functions ask for theirs by themselves. `pinning` pins models in GPU
    memory (an administrator's `OperatorClient`), `largest_gpu_bytes` knows their memory. `tracer`
    remembers calls, and may send their traces on. `console` (another `OperatorClient`) supplies
    the page's state; without it there is no page. Every `every_s` the scaler looks at functions and
    the page's watchers get the changes.
    """

    settings: GatewaySettings
    provider: Provider
    leases: LeaseClient | None = None
    _: KW_ONLY
    pinning: OperatorClient | None = None
    largest_gpu_bytes: LargestGpu = lambda: None
    tracer: CallTracer = field(default_factory=CallTracer)
    console: OperatorClient | None = None
    every_s: float = 1.0

    def __post_init__(self) -> None:
        _check(self.settings)
        self._shared = shared_store(self.settings, STORES)
        self._ends: list[Callable[[], None]] = []
        self._logs = Logs(self.provider)
        self._exits = contextlib.AsyncExitStack()
        self.is_ready = False
        self._scaler: Scaler | None = None
        self.functions = Functions(on_change=self._changed, options_of=self._options_of)
        self.meters = GatewayMeters(self.functions.loads, self.settings.metric_names)
        self.credentials = _credentials(self.settings)
        self.address = ("", 0)

    @property
    def url(self) -> str:
        return f"http://{address_text(*self.address)}"

    async def __aenter__(self) -> Self:
        """Start everything; the address is bound first, so that a taken one fails at once."""
        async with contextlib.AsyncExitStack() as exits:
            listener = listen(*host_and_port(self.settings.listen))
            exits.callback(listener.close)
            self.address = listener.getsockname()[:2]
            exits.push_async_callback(self.provider.close)
            await self.provider.start(self.functions)
            app = await self._started(exits)
            await exits.enter_async_context(serving(app, listener, self.settings.drain_s))
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
        settings = self.settings
        invocation = InvokeSettings(max_body_bytes=settings.max_body_bytes, wake_s=settings.wake_s)
        pool = None if self.leases is None else LeasePool(self.leases, self.meters)
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
        if pool is not None:
            exits.callback(pool.report)
        exits.push_async_callback(invoke.close)
        hooks = await self._features(invoke, exits)
        if settings.scaling:
            self._scaler = await exits.enter_async_context(self._make_scaler(hooks.queue))
            meters.add(partial(self._scaler.families, meters.functions))
        if self.pinning is not None:
            keeping = KeptModels(self.functions, self.pinning)
            await exits.enter_async_context(keeping)
        return GatewayApp(
            invoke=invoke,
            system=make_system(
                *(self.provider, self.meters, settings, self.largest_gpu_bytes),
                ordering=contextlib.nullcontext if self._scaler is None else self._scaler.ordering,
                namespace_removed=hooks.remove_namespace,
            ),
            auth=auth,
            ready=lambda: self.is_ready,
            metrics=self.meters.text,
            metrics_auth=settings.metrics_auth,
            system_meters=ApiMeters(),
            routes={"function": invoke, **hooks.routes},
            pages=hooks.pages,
            below_system={"logs": self._logs, "traces": self.tracer.show, **hooks.below_system},
            function_hosts=hosts,
            hosts=AnsweredHosts(address_text(*self.address), _allowed_hosts(settings), hosts),
        )

    async def _features(self, invoke: Invoke, exits: contextlib.AsyncExitStack) -> Hooks:
        """Open the queue, start the features, and then the jobs, which may call a feature."""
        settings = self.settings
        queue = await exits.enter_async_context(opened_queue(settings, self._shared, _log))
        rule = CallbackRule(allowed=settings.callback_allowed, own=self.address)
        hooks = Hooks(
            *(settings, self.functions, invoke, self.meters, queue),
            *(job_intake(queue, invoke, rule), self._shared, self.console, self.every_s, _log),
        )
        for feature in FEATURES:
            await exits.enter_async_context(feature(hooks))
        self._ends = hooks.ends
        worker = await exits.enter_async_context(
            jobs_of(settings, self.functions, invoke, queue, rule, hooks.job_calls, _log)
        )
        self.meters.add(partial(job_families, queue, worker, self.meters.functions))
        most_bytes = settings.async_max_body_bytes
        intake = hooks.intake(self.functions.id_by_path, max_body_bytes=most_bytes)
        hooks.routes["async-function"] = intake
        hooks.below_system["jobs"] = make_job_routes(queue, lambda: worker.running)
        return hooks

    def _end_followers(self) -> None:
        """End the responses that would never end by themselves."""
        self._logs.close()
        for end in self._ends:
            end()

    def _template_families(self) -> Iterator[MetricFamily]:
        name_of, sizes = self.meters.functions.of, self.provider.template_bytes()
        values = [((name_of(str(id_)),), size) for id_, size in sizes.items()]
        yield gauge(metrics.TEMPLATES, values)

    def _make_scaler(self, queue: JobQueue) -> Scaler:
        def queued(function: FunctionId) -> int:
            return queue.tally.calls.get(function, 0)

        scale = self.provider.scale
        return Scaler(self.functions, scale, queued, time.monotonic, _log, self.every_s)

    def _wake(self, function: Function) -> None:
        """Start an instance for a waiting call; before the scaler runs, its first look does it."""
        if self._scaler is not None:
            self._scaler.wake(function)

    def _options_of(self, deployment: Deployment) -> function_options.FunctionOptions:
        settings, own_s = self.settings, function_options.own_timeout_s(deployment)
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
        if self.leases is not None:
            terms = function.options.terms if function.options.gpu and not function.gone else None
            self.leases.tell_terms(function.id.for_scheduler, terms)
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
    HostNames(settings.function_hosts)
    _allowed_hosts(settings)
    CallbackRule(allowed=settings.callback_allowed)


def _allowed_hosts(settings: GatewaySettings) -> HostNames:
    return HostNames(settings.allowed_hosts, "allowed_hosts")


def _credentials(settings: GatewaySettings) -> BasicCredentials | None:
    if not settings.auth:
        return None
    return credentials_in(Path(settings.secrets_dir or Path(settings.state_dir) / _SECRETS))
