"""Follows the stream of records and sends heartbeats while there is a connection."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from logging import Logger
from typing import Any

from gateway_ext.jobs.jetstream.connection.gateway_presence import (
    GatewayIdentity,
    GatewayPresence,
    beat,
)
from gateway_ext.jobs.jetstream.connection.nats_requests import NatsRequests
from gateway_ext.jobs.jetstream.connection.stream_watch import StreamMessage, StreamWatch
from gateway_ext.jobs.jetstream.jetstream_settings import JetStreamSettings
from gateway_ext.jobs.jetstream.records.job_index import JobIndex
from gateway_ext.jobs.jetstream.records.job_record import decode
from gateway_ext.jobs.jetstream.streams.job_streams import StreamNames, ensure


class GatewaySession:
    """Keeps the index and the presence of gateways equal to the stream."""

    def __init__(
        self,
        settings: JetStreamSettings,
        names: StreamNames,
        identity: GatewayIdentity,
        presence: GatewayPresence,
        index: JobIndex,
        log: Logger,
    ) -> None:
        self._settings = settings
        self._names = names
        self._identity = identity
        self._presence = presence
        self._index = index
        self._log = log
        self._created = ""
        self._began = 0
        self._watch: StreamWatch | None = None

    async def begin(self, wire: NatsRequests) -> None:
        """Create the streams, send a heartbeat, and read all records."""
        tally = self._index.tally
        made = await ensure(wire, self._names, self._settings.replicas, tally.capacity_bytes)
        tally.limit_to(made.parts_bytes)
        if made.created != self._created:
            self._index.clear()
            self._created = made.created
        self._began = await self._beat(wire)
        self._index.begin_reading()
        self._watch = StreamWatch(wire, self._names.jobs, self._receive)
        await self._watch.begin(until=self._began)
        self._index.end_reading()
        self._presence.restart_leases()

    async def go_on(
        self, wire: NatsRequests, clean_up: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        """Follow the stream, send heartbeats and clean up, until one of them fails."""
        assert self._watch is not None  # `begin` made it
        works = (self._watch.go_on(), self._keep_beating(wire), clean_up())
        tasks = [asyncio.create_task(work) for work in works]
        try:
            await _first(tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def announce_close(self, wire: NatsRequests) -> None:
        """Release this gateway's claims."""
        await wire.publish(self._names.gateway(self._identity.gateway), beat(""))

    async def _keep_beating(self, wire: NatsRequests) -> None:
        while True:
            await asyncio.sleep(self._settings.beat_s)
            await self._beat(wire)
            others = [one for one in self._index.claimers() if one != self._identity.session]
            for session in self._presence.newly_dead(others):
                count = self._index.release_claims(session)
                self._log.warning("gateway %s is dead: its %d claims are released", session, count)

    async def _beat(self, wire: NatsRequests) -> int:
        subject = self._names.gateway(self._identity.gateway)
        return await wire.publish(subject, beat(self._identity.session))

    def _receive(self, message: StreamMessage) -> None:
        """Apply one message of the stream."""
        self._index.passed(message.seq)
        kind, name = message.subject.rsplit(".", 2)[-2:]
        try:
            if kind == "gateway":
                self._presence.receive(name, message.seq, message.content, message.written_s)
                self._check_single_session(name, message.seq)
            else:
                self._index.unread.add(message.subject)
                self._index.apply(message.subject, message.seq, decode(message.content))
                self._index.unread.discard(message.subject)
        except (ValueError, KeyError, TypeError) as error:
            # The message of a later version or of another program stays untouched.
            self._log.error(
                "job queue: the message at %s cannot be read: %r", message.subject, error
            )

    def _check_single_session(self, gateway: str, seq: int) -> None:
        ours = gateway == self._identity.gateway and seq > self._began
        if ours and self._presence.session_of(gateway) not in {self._identity.session, ""}:
            self._log.error("another gateway has a copy of our state folder: calls are made twice")


async def _first(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Wait for the first task to end, and raise its error."""
    ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in ended:
        await task
