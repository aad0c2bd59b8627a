"""One gateway: its parts put together, started, and stopped so that no call is cut short."""

import contextlib
import logging
import time
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Self

from gateway_ext import wishes
from gateway_ext.app import Parts, Readiness, make_app
from gateway_ext.asgi import App
from gateway_ext.auth import Auth, Credentials, credentials_in
from gateway_ext.errors import BadRequest
from gateway_ext.invoke import Invoke
from gateway_ext.jobs.app import Jobs, jobs_of
from gateway_ext.jobs.choosing import check_queue
from gateway_ext.keeping import Keeping, KeepingPace, Pinning
from gateway_ext.leasing import Leases, Leasing
from gateway_ext.limits import InvokeSettings
from gateway_ext.logs_route import Logs
from gateway_ext.meters import Meters
from gateway_ext.model import FunctionId
from gateway_ext.ports import Capacity, Provider
from gateway_ext.scaler import Scaler, ScalerSettings
from gateway_ext.serving import listen, serving
from gateway_ext.settings import GatewaySettings
from gateway_ext.system import make_system
from gateway_ext.system_meters import SystemMeters
from gateway_ext.table import Function, Functions
from gateway_ext.tracing.routes import TraceRoutes
from gateway_ext.tracing.tracer import Tracer, TracerSettings
from gateway_ext.ui.cluster import Cluster, Console
from gateway_ext.ui.feed import Feed, FeedPace
from gateway_ext.ui.letters import Letters
from gateway_ext.ui.routes import make_page
from gateway_ext.upstream_http import Client

_log = logging.getLogger(__name__)

_ROLES = frozenset({"gateway", "provider"})
_SECRETS = "secrets"


class Gateway:
    """Serves functions of one provider; use it as a context.

    `leases` is who lends GPUs (`scheduler.client.SchedulerClient`, opened and closed by its
    owner); with none, functions ask for theirs by themselves. `pinning` is who keeps models in GPU
    memory (another such client, an administrator's), `capacity` says what the GPUs have. `tracer`
    remembers calls, and may send their traces on. `console` (`scheduler.console.Console`) is asked
    for what the page shows; with none there is no page.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        provider: Provider,
        leases: Leases | None = None,
        *,
        pinning: Pinning | None = None,
        capacity: Capacity | None = None,
        tracer: Tracer | None = None,
        console: Console | None = None,
    ) -> None:
        _check(settings)
        self._settings = replace(settings, release=settings.release or _version())
        self._provider = provider
        self._leases = leases
        self._pinning = pinning
        self._capacity = capacity
        self._console = console
        self._feed: Feed | None = None
        self._logs = Logs(provider)
        self.tracer = tracer or Tracer(TracerSettings())
        self._exits = contextlib.AsyncExitStack()
        self._serving = False
        self.meters = Meters(most_names=settings.metric_names)
        self._scaler: Scaler | None = None
        wishes_of = partial(wishes.of, default_timeout_s=settings.timeout_s)
        self.functions = Functions(on_change=self._changed, wishes_of=wishes_of)
        self.credentials = _credentials(settings)
        self.address = ("", 0)

    @property
    def url(self) -> str:
        """Where it answers, once it does."""
        host, port = self.address
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def __aenter__(self) -> Self:
        """Start everything. The address is taken first: one that is not free is told at once."""
        async with contextlib.AsyncExitStack() as exits:
            listener = listen(*host_and_port(self._settings.listen))
            exits.callback(listener.close)
            self.address = listener.getsockname()[:2]
            exits.push_async_callback(self._provider.close)
            await self._provider.start(self.functions)
            app = await self._started(exits)
            await exits.enter_async_context(serving(app, listener, self._settings.drain_s))
            exits.callback(self._nobody_follows)
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
        """No new call; those in flight end first, then jobs and scaling, then the provider."""
        self._serving = False
        await self._exits.aclose()

    def readiness(self) -> Readiness:
        """Whether calls are served."""
        text = "ready\n" if self._serving else "the gateway starts or stops\n"
        return Readiness(self._serving, text)

    async def _started(self, exits: contextlib.AsyncExitStack) -> App:
        """The parts of the application; what of them runs is ended by `exits`."""
        settings = self._settings
        invocation = InvokeSettings(
            max_body_bytes=settings.max_body_bytes,
            wake_s=settings.wake_s,
            connect_s=settings.connect_s,
        )
        leasing = None if self._leases is None else Leasing(self._leases, self.meters)
        client, meters = Client(invocation), self.meters
        meters.add(self.tracer.families)
        invoke = Invoke(
            *(self.functions, client, leasing, invocation, meters),
            wake=self._wake,
            tracer=self.tracer,
        )
        exits.push_async_callback(invoke.close)
        jobs = await exits.enter_async_context(jobs_of(settings, self.functions, invoke, _log))
        meters.add(partial(jobs.meters.families, meters.functions))
        if settings.scaling:
            self._scaler = await exits.enter_async_context(self._make_scaler(jobs))
            meters.add(partial(self._scaler.families, meters.functions))
        if self._pinning is not None:
            keeping = Keeping(self.functions, self._pinning, KeepingPace())
            await exits.enter_async_context(keeping)
        parts = Parts(
            invoke=invoke,
            system=make_system(self._provider, self.meters, settings, self._capacity),
            logs=self._logs,
            auth=None if self.credentials is None else Auth(self.credentials),
            readiness=self.readiness,
            metrics=self.meters.text,
            metrics_auth=settings.metrics_auth,
            system_meters=SystemMeters(),
            jobs=jobs.app,
            traces=TraceRoutes(self.tracer),
            page=await self._page(jobs, exits),
        )
        return make_app(parts)

    async def _page(self, jobs: Jobs, exits: contextlib.AsyncExitStack) -> App | None:
        if self._console is None:
            return None
        cluster = Cluster(self._console, self.functions, self.meters, Letters(jobs.queue))
        self._feed = await exits.enter_async_context(
            Feed(cluster, FeedPace(self._settings.page_every_s))
        )
        return make_page(self._feed, cluster)

    def _nobody_follows(self) -> None:
        """Answers that would go on for ever end now."""
        self._logs.close()
        if self._feed is not None:
            self._feed.close()

    def _make_scaler(self, jobs: Jobs) -> Scaler:
        def queued(function: FunctionId) -> int:
            return jobs.queue.tally.calls.get(function, 0)

        pace = ScalerSettings(every_s=self._settings.scale_every_s)
        scale = self._provider.scale
        return Scaler(self.functions, scale, queued, time.monotonic, pace, _log)

    def _wake(self, function: Function) -> None:
        """Somebody waits for it; before there is a scaler, its first look finds them."""
        if self._scaler is not None:
            self._scaler.wake(function)

    def _changed(self, function: Function) -> None:
        if function.gone:
            self.meters.gone(function.label)
        else:
            self.meters.serves(function.label, [one.instance for one in function.endpoints])
        if self._scaler is not None:
            self._scaler.changed(function)


def host_and_port(address: str) -> tuple[str, int]:
    """An address as people write it: `127.0.0.1:8080`, `[::1]:8080`, `:8080` for everywhere."""
    host, colon, port = address.rpartition(":")
    if not (colon and port.isascii() and port.isdecimal() and int(port) < 1 << 16):
        raise BadRequest(f"listen: {address!r} is no HOST:PORT")
    return host.strip("[]") or "0.0.0.0", int(port)


def _check(settings: GatewaySettings) -> None:
    if settings.role not in _ROLES:
        raise BadRequest(f"role: {settings.role!r}: one of {', '.join(sorted(_ROLES))} is wanted")
    host_and_port(settings.listen)
    check_queue(settings)


def _credentials(settings: GatewaySettings) -> Credentials | None:
    if not settings.auth:
        return None
    return credentials_in(Path(settings.secrets_dir or Path(settings.state_dir) / _SECRETS))


def _version() -> str:
    try:
        return version("gpufaas")
    except PackageNotFoundError:  # run from a folder that was not installed
        return "0"
