"""One gateway: its parts put together, started, and stopped so that no call is cut short."""

import contextlib
import logging
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from common.addresses import address_text, host_and_port
from common.errors import BadAddress
from common.http.asgi import App
from common.http.client import HttpClient
from common.http.server import listen, serving
from common.telemetry.metrics import MetricFamily, gauge
from gateway_ext.calls.browser_guard import BrowserGuard
from gateway_ext.calls.call_limits import InvokeSettings
from gateway_ext.calls.function_table import Function, Functions
from gateway_ext.calls.gpu_leasing import GpuLeasing, LeaseSource
from gateway_ext.calls.invoke import Invoke
from gateway_ext.errors import BadRequest
from gateway_ext.gateway_app import GatewayParts, Readiness, make_app
from gateway_ext.host_names import AnsweredHosts, HostNames
from gateway_ext.jobs.async_jobs import AsyncJobs, jobs_of
from gateway_ext.jobs.intake.callback_addresses import CallbackRule
from gateway_ext.jobs.queue_choice import check_queue
from gateway_ext.metrics import gateway_metrics
from gateway_ext.metrics.api_counts import ApiMeters
from gateway_ext.metrics.call_counts import GatewayMeters
from gateway_ext.model import Deployment, FunctionId
from gateway_ext.openfaas import function_options
from gateway_ext.openfaas.basic_auth import Auth, BasicCredentials, credentials_in
from gateway_ext.openfaas.logs_route import Logs
from gateway_ext.openfaas.system_routes import make_system
from gateway_ext.ports import Capacity, Provider
from gateway_ext.scaling.kept_models import KeptModels
from gateway_ext.scaling.scaler import Scaler
from gateway_ext.settings import GatewaySettings
from gateway_ext.tracing.call_tracer import CallTracer, TracerSettings
from gateway_ext.tracing.traces_route import TraceRoutes
from gateway_ext.ui.cluster_source import PageSource
from gateway_ext.ui.dead_letter_rows import DeadLetterRows
from gateway_ext.ui.page_routes import make_page
from gateway_ext.ui.watcher_feed import PagePace, WatcherFeed
from gateway_ext.ui.workflow_rows import WorkflowRows
from gateway_ext.workflows.workflow_parts import WorkflowParts, workflow_parts
from scheduler.client.operator_client import OperatorClient

_log = logging.getLogger(__name__)

_ROLES = frozenset({"gateway", "provider"})
_SECRETS = "secrets"


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
        leases: LeaseSource | None = None,
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
        self.tracer = tracer or CallTracer(TracerSettings())
        self._exits = contextlib.AsyncExitStack()
        self._serving = False
        self._scaler: Scaler | None = None
        self.functions = Functions(on_change=self._changed, options_of=self._options_of)
        self.meters = GatewayMeters(self.functions.loads, settings.metric_names)
        self.credentials = _credentials(settings)
        self.address = ("", 0)

    @property
    def url(self) -> str:
        """The gateway's URL, once it listens."""
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
        self._serving = True
        _log.info("the gateway answers at %s", self.url)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Accept no call; end calls in flight first, then jobs and scaling, then the provider."""
        self._serving = False
        await self._exits.aclose()

    def readiness(self) -> Readiness:
        """Whether calls are accepted."""
        text = "ready\n" if self._serving else "the gateway starts or stops\n"
        return Readiness(self._serving, text)

    async def _started(self, exits: contextlib.AsyncExitStack) -> App:
        """Build and start the parts of the application; `exits` ends them."""
        settings = self._settings
        invocation = InvokeSettings(
            max_body_bytes=settings.max_body_bytes,
            wake_s=settings.wake_s,
        )
        leasing = None if self._leases is None else GpuLeasing(self._leases, self.meters)
        client, meters = HttpClient(invocation.client), self.meters
        auth = None if self.credentials is None else Auth(self.credentials)
        hosts = HostNames(settings.function_hosts)
        meters.add(self.tracer.families)
        meters.add(self._template_families)
        invoke = Invoke(
            *(self.functions, client, leasing, invocation, meters),
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
        meters.add(partial(jobs.meters.families, meters.functions))
        if settings.scaling:
            self._scaler = await exits.enter_async_context(self._make_scaler(jobs))
            meters.add(partial(self._scaler.families, meters.functions))
        if self._pinning is not None:
            keeping = KeptModels(self.functions, self._pinning)
            await exits.enter_async_context(keeping)
        parts = GatewayParts(
            invoke=invoke,
            system=make_system(
                *(self._provider, self.meters, settings, self._capacity),
                ordering=contextlib.nullcontext if self._scaler is None else self._scaler.ordering,
                namespace_removed=workflows.namespace_removed,
            ),
            logs=self._logs,
            auth=auth,
            readiness=self.readiness,
            metrics=self.meters.text,
            metrics_auth=settings.metrics_auth,
            system_meters=ApiMeters(),
            jobs=jobs.app,
            workflow=workflows.app,
            workflow_routes=workflows.routes,
            traces=TraceRoutes(self.tracer),
            page=await self._page(jobs, workflows, exits),
            function_hosts=hosts,
            hosts=AnsweredHosts(address_text(*self.address), _allowed_hosts(settings), hosts),
        )
        return make_app(parts)

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
        name_of, found = self.meters.functions.of, self._provider.template_bytes()
        values = [((name_of(str(id_)),), size) for id_, size in found.items()]
        yield gauge(gateway_metrics.TEMPLATES, values)

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
