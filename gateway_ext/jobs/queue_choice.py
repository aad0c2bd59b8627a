"""Opens the queue that the gateway's settings name, with the limits they set."""

from logging import Logger
from pathlib import Path

from gateway_ext.jobs.jetstream.jetstream_queue import jetstream_queue
from gateway_ext.jobs.jetstream.jetstream_settings import JetStreamSettings, check, servers_in
from gateway_ext.jobs.queue.job_queue import JobQueue
from gateway_ext.jobs.queue.job_tally import QueueLimits
from gateway_ext.jobs.sqlite.sqlite_queue import sqlite_queue
from gateway_ext.settings import GatewaySettings

_SQLITE = "sqlite"
_DAY_S = 24 * 3600.0


def check_queue(settings: GatewaySettings) -> None:
    """Raise BadRequest where the settings of the queue are invalid."""
    shared = jetstream_settings(settings)
    if shared is not None:
        check(shared)


async def open_queue(settings: GatewaySettings, log: Logger) -> JobQueue:
    """Open the queue; a server that is away is retried in the background. The caller closes it."""
    folder = Path(settings.state_dir)
    limits = QueueLimits(
        body_bytes=settings.async_max_body_bytes,
        waiting_per_function=settings.async_max_waiting,
        waiting_bytes=settings.async_max_waiting_bytes,
        dead_bytes=settings.async_dead_bytes,
        dead_age_s=settings.async_dead_days * _DAY_S,
    )
    shared = jetstream_settings(settings)
    if shared is None:
        return await sqlite_queue(folder / "jobs", limits, log)
    return await jetstream_queue(folder / "jobs-nats", shared, limits, log)


def jetstream_settings(settings: GatewaySettings) -> JetStreamSettings | None:
    """The servers that gateways share; None: this gateway keeps all it knows in files."""
    if settings.queue == _SQLITE:
        return None
    return JetStreamSettings(
        servers=servers_in(settings.queue),
        user=settings.queue_user,
        password_file=settings.queue_password_file,
        ca_file=settings.queue_ca_file,
        cert_file=settings.queue_cert_file,
        key_file=settings.queue_key_file,
        replicas=settings.queue_replicas,
        prefix=settings.queue_prefix,
    )
