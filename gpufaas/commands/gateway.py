"""`gpufaas gateway`: OpenFaaS's API, with GPUs for functions; builds the gateway's process."""

import argparse
import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvloop

from common.addresses import UnixAddress, parse_address
from common.gpu_wishes import USUAL, GpuWishes
from common.tasks import BackgroundTasks
from gateway_ext.api import (
    CallTracer,
    FunctionId,
    Gateway,
    GatewayError,
    GatewaySettings,
    make_provider,
)
from gpu_manager.api import FunctionCredentials, FunctionIdentity
from gpufaas.daemon_process import freeze_started_objects, share_one_arena, stop_event
from gpufaas.errors import CommandError
from gpufaas.log_format import configure_logs
from gpufaas.options.configuration import TraceSettings, read_settings
from gpufaas.options.shared import (
    Commands,
    add_log_format_option,
    add_log_level_option,
    add_secret_option,
    cluster_secret,
)
from gpufaas.remote.manager_api import announce_start, default_address
from gpufaas.remote.scheduler_api import SchedulerApi, scheduler_urls
from gpufaas.shim_environment import largest_gpu, seen_gpu, shim_variables
from gpufaas.stack_folder import state_folder
from gpufaas.trace_export import span_exporter
from scheduler.client.lease_client import LeaseClient
from scheduler.client.operator_client import OperatorClient
from scheduler.service.access import ApiRole, token

log = logging.getLogger(__name__)

_STATE = "gateway"
# How long a call waits for a leading scheduler.
_PATIENCE_S = 30.0
# Pinning waits less, because it is retried; the page reports a missing scheduler at once.
_PINNING_PATIENCE_S = 5.0
_PAGE_PATIENCE_S = 1.5


# Flags of settings: flag, setting, metavar and help.
_FLAGS = (
    ("--listen", "gateway.listen", "HOST:PORT", "where to answer HTTP (127.0.0.1:8080)"),
    ("--state-dir", "gateway.state_dir", "DIR", "where functions, builds and jobs are kept"),
    ("--secrets-dir", "gateway.secrets_dir", "DIR", "of basic-auth-user and basic-auth-password"),
)


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser("gateway", help="deploy and invoke functions, as OpenFaaS does")
    add = parser.add_argument
    add("--config", metavar="FILE", help="settings (gpufaas.toml here, or in /etc/gpufaas)")
    for flag, setting, metavar, text in _FLAGS:
        add(flag, dest=setting, metavar=metavar, help=text)
    which = "the schedulers that grant GPUs (GPUFAAS_SCHEDULER)"
    add("--scheduler", dest="urls", metavar="URL[,URL]", help=which)
    manager = "of the GPU manager that functions connect to"
    add("--node", dest="manager", metavar="ADDRESS", help=manager)
    add_log_level_option(parser, "gateway.log_level")
    add_log_format_option(parser)
    add_secret_option(parser, "; made if missing")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    share_one_arena()
    environment: Mapping[str, str] = options.environment
    flags = {"gateway.secrets_dir": environment.get("secret_mount_path")}
    flags |= {key: value for key, value in vars(options).items() if value is not None}
    settings = read_settings(options.config, environment, flags)
    secret = cluster_secret(
        options.secret_file or settings.scheduler.secret_file or None, environment, make=True
    )
    configure_logs(settings.gateway.log_level, settings.log_format)
    urls = scheduler_urls(options.urls, environment)
    node = options.manager or default_address(environment)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            gateway = _with_folders(settings.gateway, node, environment)
            runner.run(_serve(gateway, settings.tracing, secret, urls, node, environment))
        except GatewayError as error:
            raise CommandError(str(error)) from error
        except OSError as error:
            raise CommandError(f"{settings.gateway.listen}: {error.strerror or error}") from error
    return 0


def _with_folders(
    settings: GatewaySettings, node: str, environment: Mapping[str, str]
) -> GatewaySettings:
    """The settings with a state folder, and with the GPU manager's socket visible to functions."""
    if not settings.state_dir:
        settings = replace(settings, state_dir=str(state_folder(environment) / _STATE))
    address = parse_address(node)
    if not isinstance(address, UnixAddress) or address.abstract:
        return settings
    return replace(settings, visible=(*settings.visible, str(address.path.parent)))


async def _serve(
    settings: GatewaySettings,
    tracing: TraceSettings,
    secret: bytes,
    urls: tuple[str, ...],
    node: str,
    environment: Mapping[str, str],
) -> None:
    stop = stop_event()
    Path(settings.state_dir).mkdir(parents=True, exist_ok=True)
    shim = ShimEnvironment(node, secret, SchedulerApi(urls, token(secret, ApiRole.CALLER)))
    provider = make_provider(settings, shim, environment)
    admin_token = token(secret, ApiRole.ADMIN)
    async with (
        _refreshed(shim),
        LeaseClient(urls, token(secret, ApiRole.CALLER), patience_s=_PATIENCE_S) as leases,
        OperatorClient(urls, admin_token, patience_s=_PINNING_PATIENCE_S) as pinning,
        OperatorClient(urls, admin_token, patience_s=_PAGE_PATIENCE_S) as console,
        span_exporter(tracing, environment) as exporter,
        Gateway(
            *(settings, provider, leases),
            pinning=pinning,
            largest_gpu_bytes=shim.largest_gpu_bytes,
            tracer=CallTracer(exporter, keep=tracing.keep, ratio=tracing.ratio),
            console=console,
        ) as gateway,
    ):
        freeze_started_objects()
        log.info("documentation at %s", gateway.url)
        await stop.wait()
        log.info("stopping: calls in flight have %g s", settings.drain_s)


_REFRESH_EVERY_S = 30.0


class ShimEnvironment:
    """Variables for functions of this machine; they see the cluster's largest GPU."""

    def __init__(self, node: str, secret: bytes, scheduler: SchedulerApi) -> None:
        self._node = node
        self._credentials = FunctionCredentials(secret)
        self._scheduler = scheduler
        self._largest: Mapping[str, Any] | None = None

    def environment(self, function: FunctionId, wishes: GpuWishes = USUAL) -> Mapping[str, str]:
        """The variables of one function; the GPU manager learns that the function may start."""
        identity = FunctionIdentity(function.namespace, function.name, wishes)
        variables = shim_variables(self._node, self._credentials.issue(identity))
        announce_start(self._node, variables["GPUFAAS_CREDENTIAL"])
        if self._largest is not None:
            variables |= seen_gpu(self._largest["memory_bytes"], self._largest["gpu_type"])
        return variables

    def largest_gpu_bytes(self) -> int | None:
        """The memory of the largest GPU; None while no GPU is known."""
        return None if self._largest is None else int(self._largest["memory_bytes"])

    async def refresh(self) -> None:
        """Ask the scheduler for the GPUs; without an answer the known GPU stays."""
        try:
            cluster = await asyncio.to_thread(self._scheduler.get, "/cluster")
        except CommandError as error:
            log.warning("the cluster's GPUs are unknown: %s", error)
            return
        self._largest = largest_gpu(cluster) or self._largest


@asynccontextmanager
async def _refreshed(shim: ShimEnvironment) -> AsyncIterator[None]:
    """Refresh the GPUs that functions see, as long as the context lasts."""

    async def refresh_forever() -> None:
        while True:
            await asyncio.sleep(_REFRESH_EVERY_S)
            await shim.refresh()

    await shim.refresh()
    refreshing = BackgroundTasks(log, "asking for the cluster's GPUs")
    refreshing.start(refresh_forever())
    try:
        yield
    finally:
        await refreshing.close()
