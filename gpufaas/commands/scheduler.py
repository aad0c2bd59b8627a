"""`gpufaas scheduler`: a leading or standby scheduler; builds the scheduler's process."""

import argparse
import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import uvloop

from cache_manager import eviction, exits
from common.addresses import address_text, host_and_port
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
from gpufaas.stack.etcd_login import USER, stored_login
from gpufaas.stack.own_etcd import kept_etcd_anywhere
from gpufaas.stack_folder import state_folder
from gpufaas.trace_export import span_exporter
from scheduler import policies
from scheduler.model.errors import DatastoreError
from scheduler.service.history.recorder import RunRecorder
from scheduler.service.http.app import listen, make_app, serving
from scheduler.service.scheduler_service import SchedulerService
from scheduler.settings import Etcd, Settings
from scheduler.store.datastore import Store
from scheduler.store.etcd_channel import EtcdSettings
from scheduler.store.etcd_store import EtcdStore
from scheduler.store.memory_store import MemoryStore

log = logging.getLogger(__name__)

_FLUSH_S = 1.0
_ANYWHERE = {"0.0.0.0", "::"}


# Flags of settings: flag, setting, metavar and help.
_FLAGS = (
    ("--listen", "scheduler.listen", "HOST:PORT", "where to answer HTTP (127.0.0.1:7700)"),
    ("--advertise", "scheduler.advertise", "URL", "at which others reach it (what it listens on)"),
    ("--name", "scheduler.name", "NAME", "among several schedulers (HOST:PORT)"),
    ("--policy", "policy", "POLICY", f"one of {', '.join(policies.available())} (lalbo3)"),
    ("--parameters", "parameters", "NAME=N,...", "of the policy, as in o3_limit=10"),
    ("--eviction", "eviction", "RULE", f"one of {', '.join(eviction.available())} (lru)"),
    (
        "--exit-rule",
        "exit_rule",
        "RULE",
        f"for idle models: {', '.join(exits.available())} (never)",
    ),
    ("--etcd", "etcd.endpoints", "URL[,URL]", "keep the state there; without, only in memory"),
    ("--etcd-user", "etcd.user", "NAME", "our user in etcd"),
    ("--etcd-password-file", "etcd.password_file", "FILE", "with that user's password alone"),
    ("--record", "scheduler.record", "FILE", "append every event to it, for `gpufaas replay`"),
)


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser("scheduler", help="decide which GPU runs each request")
    add = parser.add_argument
    add("--config", metavar="FILE", help="settings (gpufaas.toml here, or in /etc/gpufaas)")
    for flag, setting, metavar, text in _FLAGS:
        add(flag, dest=setting, metavar=metavar, help=text)
    own = "keep the state in our own etcd"
    add("--start-etcd", dest="etcd.start", action="store_true", default=None, help=own)
    add_log_level_option(parser, "scheduler.log_level")
    add_log_format_option(parser)
    add_secret_option(parser, "; made if missing")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    share_one_arena()
    flags = {**vars(options), "scheduler.secret_file": options.secret_file}
    everything = read_settings(options.config, options.environment, flags)
    settings = everything.of_scheduler
    secret = cluster_secret(settings.scheduler.secret_file, options.environment, make=True)
    if settings.etcd.start and not settings.etcd.data_dir:
        data = state_folder(options.environment) / "etcd"
        settings = replace(settings, etcd=replace(settings.etcd, data_dir=str(data)))
    configure_logs(settings.scheduler.log_level, everything.log_format)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(settings, secret, everything.tracing, options.environment))
    except ExceptionGroup as group:
        by_store, others = group.split(DatastoreError)
        if by_store is None or others is not None:
            raise
        raise CommandError(f"etcd: {_first_error(by_store)}") from group
    return 0


def _first_error(group: BaseExceptionGroup[DatastoreError]) -> BaseException:
    """The group's first error; an etcd that refuses a login refuses every task."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def _serve(
    settings: Settings, secret: bytes, tracing: TraceSettings, environment: Mapping[str, str]
) -> None:
    stop = stop_event()
    listener = _listener(settings.scheduler.listen)
    url = settings.scheduler.advertise or _url(listener)
    name = settings.scheduler.name or url.partition("//")[2]
    async with (
        recording(settings.scheduler.record) as recorder,
        _store(settings.etcd) as store,
        span_exporter(tracing, environment) as exporter,
    ):
        service = SchedulerService(settings, secret, name, url, recorder, exporter)
        async with serving(make_app(service), listener, streams=service.serve_stream):
            freeze_started_objects()
            log.info("%s answers at %s, documentation at %s/docs", name, url, url)
            working = asyncio.create_task(service.run(store))
            stopping = asyncio.create_task(stop.wait())
            await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
            log.info("stopping")
            working.cancel()
            await asyncio.gather(working, return_exceptions=not working.done())


@asynccontextmanager
async def recording(path: str) -> AsyncIterator[RunRecorder | None]:
    """A recorder to this file, flushed once a second; None if no file is named."""
    if not path:
        yield None
        return
    recorder = RunRecorder(Path(path))

    async def flush() -> None:
        while True:
            await asyncio.sleep(_FLUSH_S)
            recorder.flush()

    flushing = asyncio.create_task(flush())
    try:
        yield recorder
    finally:
        flushing.cancel()
        recorder.close()


@asynccontextmanager
async def _store(etcd: Etcd) -> AsyncIterator[Store]:
    if etcd.start:
        data = Path(etcd.data_dir)
        with ExitStack() as ports:
            async with (
                kept_etcd_anywhere(data, ports, log) as url,
                EtcdStore(
                    EtcdSettings((url,), etcd.prefix, USER, stored_login(data).password), log
                ) as store,
            ):
                yield store
    elif etcd.endpoints:
        async with EtcdStore(etcd_settings(etcd), log) as store:
            yield store
    else:
        log.warning("no etcd: profiles, policy and order of use are lost when this process ends")
        memory = MemoryStore()
        yield memory
        await memory.close()


def etcd_settings(etcd: Etcd) -> EtcdSettings:
    """The endpoints and their credentials; CommandError if a file cannot be read."""
    files = {name: Path(path) for name in ("ca", "cert", "key") if (path := getattr(etcd, name))}
    for name, path in files.items():
        _read(name, path)
    return EtcdSettings(
        etcd.endpoints,
        etcd.prefix,
        etcd.user,
        _read("password_file", Path(etcd.password_file)).strip() if etcd.user else "",
        files.get("ca"),
        files.get("cert"),
        files.get("key"),
    )


def _read(name: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"[etcd] {name}: {path}: {getattr(error, 'strerror', error)}") from error


def _listener(address: str) -> socket.socket:
    host, port = host_and_port(address)
    try:
        return listen(host, port)
    except OSError as error:
        raise CommandError(f"cannot listen on {address}: {error.strerror or error}") from error


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    if host in _ANYWHERE:
        host = socket.gethostname()
    return f"http://{address_text(host, port)}"
