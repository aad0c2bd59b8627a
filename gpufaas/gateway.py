"""`gpufaas gateway`: speaks OpenFaaS, runs functions, and finds them GPUs."""

import argparse
import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import uvloop

from gateway_ext.api import (
    Gateway,
    GatewayError,
    GatewaySettings,
    Posting,
    Tracer,
    TracerSettings,
    make_provider,
)
from gpu_manager.api import UnixAddress, parse_address
from gpufaas.administrator import default_address
from gpufaas.arguments import Commands, add_log_format_option
from gpufaas.collector import collector
from gpufaas.credentials import add_secret_option, cluster_secret, state_folder
from gpufaas.errors import CommandError
from gpufaas.garbage import settle
from gpufaas.injection import ShimInjection
from gpufaas.logs import configure_logs
from gpufaas.remote import Remote, scheduler_urls
from gpufaas.settings import Tracing, read_settings
from scheduler.client import SchedulerClient
from scheduler.console import Console
from scheduler.service.access import Role, token

log = logging.getLogger(__name__)

_STATE = "gateway"
# So long a call that needs a GPU waits for a scheduler that leads.
_PATIENCE_S = 30.0
# Pinning waits less: it is tried again. The page says at once that nobody answers.
_PINNING_PATIENCE_S = 5.0
_PAGE_PATIENCE_S = 1.5


def add_parser(commands: Commands) -> None:
    """Describe the command's options."""
    parser = commands.add_parser("gateway", help="deploy and invoke functions, as OpenFaaS does")
    add = parser.add_argument
    add("--config", metavar="FILE", help="settings (gpufaas.toml here, or in /etc/gpufaas)")
    add("--listen", metavar="HOST:PORT", help="where to answer HTTP (127.0.0.1:8080)")
    add("--role", help="gateway, or provider behind the gateway of OpenFaaS (gateway)")
    add("--provider", help="who runs functions: process, docker or upstream (process)")
    add("--upstream-url", metavar="URL", help="of the provider that runs functions")
    add("--builds", metavar="DIR", help="where shrinkwrapped builds are (build)")
    add("--state-dir", metavar="DIR", help="where functions, builds and jobs are kept")
    add("--secrets-dir", metavar="DIR", help="of basic-auth-user and basic-auth-password")
    add("--scheduler", metavar="URL[,URL]", help="who gives GPUs (GPUFAAS_SCHEDULER)")
    add("--node", metavar="ADDRESS", help="of the GPU manager that functions talk to")
    add("--log-level", choices=["debug", "info", "warning", "error"], help="(info)")
    add_log_format_option(parser)
    add_secret_option(parser)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    environment: Mapping[str, str] = options.environment
    flags = {
        "gateway.listen": options.listen,
        "gateway.role": options.role,
        "gateway.provider": options.provider,
        "gateway.upstream_url": options.upstream_url,
        "gateway.builds_dir": options.builds,
        "gateway.state_dir": options.state_dir,
        "gateway.secrets_dir": options.secrets_dir or environment.get("secret_mount_path"),
        "gateway.log_level": options.log_level,
        "log_format": options.log_format,
    }
    settings = read_settings(options.config, environment, flags)
    secret = cluster_secret(
        options.secret_file or settings.scheduler.secret_file or None, environment
    )
    form = "json" if settings.gateway.log_json else settings.log_format
    configure_logs(settings.gateway.log_level, form)
    urls = scheduler_urls(options.scheduler, environment)
    node = options.node or default_address(environment)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            chosen = _placed(settings.gateway, node, environment)
            serving = _Serving(chosen, settings.tracing, secret, urls, node)
            runner.run(_serve(serving, environment))
        except GatewayError as error:
            raise CommandError(str(error)) from error
        except OSError as error:
            raise CommandError(f"{settings.gateway.listen}: {error.strerror or error}") from error
    return 0


def _placed(
    settings: GatewaySettings, node: str, environment: Mapping[str, str]
) -> GatewaySettings:
    """With a folder of its own, and that of the GPU manager's socket open to functions."""
    if not settings.state_dir:
        settings = replace(settings, state_dir=str(state_folder(environment) / _STATE))
    address = parse_address(node)
    if not isinstance(address, UnixAddress) or address.abstract:
        return settings
    return replace(settings, visible=(*settings.visible, str(address.path.parent)))


@dataclass(frozen=True, slots=True)
class _Serving:
    """What one gateway is made of."""

    settings: GatewaySettings
    tracing: Tracing
    secret: bytes
    urls: tuple[str, ...]
    node: str


async def _serve(serving: _Serving, environment: Mapping[str, str]) -> None:
    """Until SIGTERM or SIGINT."""
    settings, secret, urls = serving.settings, serving.secret, serving.urls
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    Path(settings.state_dir).mkdir(parents=True, exist_ok=True)
    injection = ShimInjection(serving.node, secret, Remote(urls, token(secret, Role.CALLER)))
    provider = make_provider(settings, injection, environment)
    administrator = token(secret, Role.ADMIN)
    async with (
        _kept_up_to_date(injection),
        _leases(urls, token(secret, Role.CALLER)) as leases,
        SchedulerClient(urls, administrator, patience_s=_PINNING_PATIENCE_S) as pinning,
        Console(urls, administrator, patience_s=_PAGE_PATIENCE_S) as console,
        _tracer(serving.tracing, environment) as tracer,
        Gateway(
            *(settings, provider, leases),
            pinning=pinning,
            capacity=injection,
            tracer=tracer,
            console=console,
        ) as gateway,
    ):
        settle()
        log.info("documentation at %s", gateway.url)
        await stop.wait()
        log.info("stopping: calls in flight have %g s", settings.drain_s)


@asynccontextmanager
async def _tracer(tracing: Tracing, environment: Mapping[str, str]) -> AsyncIterator[Tracer]:
    """Remembers calls; where a collector is configured, it is told of them until the end."""
    async with collector(tracing, environment) as sink:
        yield Tracer(TracerSettings(keep=tracing.keep, ratio=tracing.ratio), sink)


@asynccontextmanager
async def _leases(urls: Sequence[str], bearer: str) -> AsyncIterator[SchedulerClient]:
    """Who lends GPUs; over our own client, which speaks plain HTTP alone, where that is spoken."""
    plain = all(url.startswith("http://") for url in urls)
    posting = Posting() if plain else None
    try:
        async with SchedulerClient(urls, bearer, patience_s=_PATIENCE_S, post=posting) as leases:
            yield leases
    finally:
        if posting is not None:
            posting.close()


@asynccontextmanager
async def _kept_up_to_date(injection: ShimInjection) -> AsyncIterator[None]:
    """What functions are told of GPUs is what the scheduler knows."""
    await injection.look()
    watching = asyncio.create_task(injection.keep_looking())
    try:
        yield
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
