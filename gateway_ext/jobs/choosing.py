"""Which queue a gateway's settings ask for, and how much it keeps."""

from logging import Logger
from pathlib import Path

from gateway_ext.jobs.jetstream.queue import jetstream_queue
from gateway_ext.jobs.jetstream.settings import JetStreamSettings, check, servers_in
from gateway_ext.jobs.queue import JobQueue
from gateway_ext.jobs.sqlite.queue import sqlite_queue
from gateway_ext.jobs.tally import QueueLimits
from gateway_ext.settings import GatewaySettings

_SQLITE = "sqlite"
_DAY_S = 24 * 3600.0


def check_queue(settings: GatewaySettings) -> None:
    """BadRequest where no gateway can start so."""
    if settings.queue != _SQLITE:
        check(_jetstream(settings))


async def open_queue(settings: GatewaySettings, log: Logger) -> JobQueue:
    """The queue, to be closed; servers that are away are waited for in the background."""
    folder = Path(settings.state_dir)
    limits = QueueLimits(
        body_bytes=settings.async_max_body_bytes,
        waiting_per_function=settings.async_max_waiting,
        waiting_bytes=settings.async_max_waiting_bytes,
        dead=settings.async_dead_letters,
        dead_bytes=settings.async_dead_bytes,
        dead_age_s=settings.async_dead_days * _DAY_S,
    )
    if settings.queue == _SQLITE:
        return await sqlite_queue(folder / "jobs", limits, log)
    return await jetstream_queue(folder / "jobs-nats", _jetstream(settings), limits, log)


def _jetstream(settings: GatewaySettings) -> JetStreamSettings:
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
