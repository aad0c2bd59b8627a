"""Builds what gateways share, by the settings of one of them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from logging import Logger
from pathlib import Path

from gateway_ext.jobs.queue import QueueLimits
from gateway_ext.jobs.shared import TextCopy
from gateway_ext.settings import GatewaySettings
from gateway_ext.shared_jobs.queue import JetStreamQueue
from gateway_ext.shared_jobs.settings import JetStreamSettings, check, servers_in
from gateway_ext.shared_jobs.texts import TextStream


def shared_jobs(settings: GatewaySettings) -> "JetStream":
    """The servers of the setting `queue`; BadRequest where a setting is invalid."""
    shared = JetStreamSettings(
        servers=servers_in(settings.queue),
        user=settings.queue_user,
        password_file=settings.queue_password_file,
        ca_file=settings.queue_ca_file,
        cert_file=settings.queue_cert_file,
        key_file=settings.queue_key_file,
        replicas=settings.queue_replicas,
        prefix=settings.queue_prefix,
    )
    check(shared)
    return JetStream(shared)


class JetStream:
    """See `SharedStore`: on NATS JetStream."""

    def __init__(self, settings: JetStreamSettings) -> None:
        self._settings = settings

    def queue(self, folder: Path, limits: QueueLimits, log: Logger) -> JetStreamQueue:
        return JetStreamQueue(folder / "jobs-nats", self._settings, limits, log)

    @asynccontextmanager
    async def texts(
        self, name: str, copy: TextCopy, copied: Path, log: Logger
    ) -> AsyncIterator[TextStream]:
        stream = TextStream(self._settings, name, copy, copied, log)
        try:
            await stream.open()
            yield stream
        finally:
            await stream.close()
