"""`gpufaas gpu-manager`: the daemon of one node; builds its process."""

import argparse
import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from cache_manager.model.ids import NodeId
from common.addresses import host_and_port, parse_address
from common.numerals import parse_size
from gpu_manager.api import GpuManager, MakeRuntime, NodeSettings
from gpu_manager.attachment.attachment import Attachment
from gpu_manager.credentials import load_secret
from gpufaas.daemon_process import share_one_arena, stop_event
from gpufaas.embedded_node import embedded_node, worker_processes
from gpufaas.extras import require_torch
from gpufaas.log_format import FORMATS, configure_logs
from gpufaas.options.configuration import AT_START, PREPARE_CHOICES
from gpufaas.options.gpu_node import add_node_options, node_settings
from gpufaas.options.shared import Commands, add_log_format_option, default_secret_file
from gpufaas.remote.manager_api import default_address
from scheduler.wire.node_stream import StreamTimes

log = logging.getLogger(__name__)


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser("gpu-manager", help="manage the GPUs of this node")
    add = parser.add_argument
    add("--node", default=socket.gethostname(), help="the node's name (the host's)")
    where = "unix:/path, unix:@name, tcp:host:port or tls:host:port; may be given several times"
    add("--listen", action="append", metavar="ADDRESS", help=where)
    add("--certificate", metavar="FILE", help="PEM, for clients that connect to a tls address")
    add("--key", metavar="FILE", help="the certificate's key")
    spilled = "the most bytes in that folder (64GiB)"
    add("--spill-size", default="64GiB", metavar="SIZE", help=spilled)
    add("--data-memory", metavar="SIZE", help="host memory for data of functions (an eighth)")
    on_disk = "the most bytes of such data in the folder of --spill (16GiB)"
    add("--data-disk", default="16GiB", metavar="SIZE", help=on_disk)
    add("--secret-file", metavar="FILE", help="the secret for credentials; made if missing")
    add("--scheduler", metavar="URL[,URL]", help="join the cluster of these schedulers")
    elsewhere = "where functions on other hosts reach this node (where it listens)"
    add("--advertise", action="append", metavar="ADDRESS", help=elsewhere)
    prepare = "when workers import torch: at the start, or for the first GPU function"
    add("--prepare", default=AT_START, choices=PREPARE_CHOICES, help=f"{prepare} ({AT_START})")
    add("--metrics", metavar="HOST:PORT", help="where to answer Prometheus and health checks")
    add_node_options(parser)
    add_log_format_option(parser)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    require_torch()
    share_one_arena()
    form = options.log_format or options.environment.get("GPUFAAS_LOG_FORMAT") or FORMATS[0]
    configure_logs(options.log_level, form)
    asyncio.run(_serve(_settings(options), options))
    return 0


def _settings(options: argparse.Namespace) -> NodeSettings:
    texts = options.listen or [default_address(options.environment)]
    listen = tuple(parse_address(text) for text in texts)
    return replace(
        node_settings(options, options.node, listen),
        spill=Path(options.spill) if options.spill else None,
        spill_bytes=parse_size(options.spill_size),
        data_memory_bytes=None if options.data_memory is None else parse_size(options.data_memory),
        data_disk_bytes=parse_size(options.data_disk),
        metrics=None if options.metrics is None else host_and_port(options.metrics),
        secret_file=_secret_file(options),
        prepare_at_start=options.prepare == AT_START,
        advertise=tuple(parse_address(text) for text in options.advertise or ()),
        certificate=None if options.certificate is None else Path(options.certificate),
        key=None if options.key is None else Path(options.key),
    )


def _secret_file(options: argparse.Namespace) -> Path | None:
    """A cluster's nodes share a secret; a single node makes one for the process's lifetime."""
    if options.secret_file is not None:
        return Path(options.secret_file)
    return None if options.scheduler is None else default_secret_file(options.environment)


async def _serve(settings: NodeSettings, options: argparse.Namespace) -> None:
    """Serve until SIGTERM or SIGINT; a second signal does not shorten the drain."""
    stop = stop_event()
    async with _node(settings, options) as manager:
        gpus = ", ".join(f"{device.id} ({device.name})" for device in manager.devices)
        log.info("node %s with %s", settings.node, gpus)
        await stop.wait()
        log.info("stopping: calls in flight have %g s", settings.drain_s)


@asynccontextmanager
async def _node(settings: NodeSettings, options: argparse.Namespace) -> AsyncIterator[GpuManager]:
    """A node with its own scheduler, or a node of a cluster."""
    if options.scheduler is None:
        async with embedded_node(settings, options.policy) as node:
            yield node.manager
        return
    assert settings.secret_file is not None, "a cluster has a secret"
    urls = [url.strip() for url in options.scheduler.split(",")]
    async with cluster_node(settings, urls, load_secret(settings.secret_file)) as (manager, _):
        yield manager


_TIMES = StreamTimes()


@asynccontextmanager
async def cluster_node(
    settings: NodeSettings,
    schedulers: Sequence[str],
    secret: bytes,
    make_runtime: MakeRuntime | None = None,
    times: StreamTimes = _TIMES,
) -> AsyncIterator[tuple[GpuManager, Attachment]]:
    """Run a node of a cluster; at the end its GPUs are drained and it detaches."""
    attachment = Attachment(schedulers, NodeId(settings.node), secret, times)
    make_runtime = make_runtime or worker_processes(settings)
    async with attachment, GpuManager(settings, attachment, make_runtime, attachment) as manager:
        attaching = asyncio.get_running_loop().create_task(_log_attached(attachment, settings.node))
        try:
            yield manager, attachment
        finally:
            attaching.cancel()
            attachment.drain(device.id for device in manager.devices)


async def _log_attached(attachment: Attachment, node: str) -> None:
    await attachment.attached()
    log.info("node %s is attached", node)
