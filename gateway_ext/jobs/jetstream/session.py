"""What a gateway does for as long as it has a connection: it listens, and says that it lives."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from logging import Logger
from typing import Any

from gateway_ext.jobs.jetstream.index import Index
from gateway_ext.jobs.jetstream.presence import Identity, Presence, beat
from gateway_ext.jobs.jetstream.records import decode
from gateway_ext.jobs.jetstream.settings import JetStreamSettings
from gateway_ext.jobs.jetstream.streams import Names, ensure
from gateway_ext.jobs.jetstream.watching import Message, Watch
from gateway_ext.jobs.jetstream.wire import Wire


class Session:
    """Keeps the index and the presence of gateways as the stream has them."""

    def __init__(
        self,
        settings: JetStreamSettings,
        names: Names,
        identity: Identity,
        presence: Presence,
        index: Index,
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
        self._watch: Watch | None = None

    async def begin(self, wire: Wire) -> None:
        """Have the streams, be heard, and read all that is there."""
        tally = self._index.tally
        made = await ensure(wire, self._names, self._settings.replicas, tally.most_bytes)
        tally.fit(made.parts_bytes)
        if made.created != self._created:
            self._index.clear()
            self._created = made.created
        self._began = await self._beat(wire)
        self._index.begin_look()
        self._watch = Watch(wire, self._names.jobs, self._told)
        await self._watch.begin(until=self._began)
        self._index.end_look()
        self._presence.listening_again()

    async def go_on(self, wire: Wire, tidy: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Listen, say that we live, and tidy up, until one of it fails."""
        assert self._watch is not None  # it was begun
        works = (self._watch.go_on(), self._keep_beating(wire), tidy())
        tasks = [asyncio.create_task(work) for work in works]
        try:
            await _first(tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def say_goodbye(self, wire: Wire) -> None:
        """What we had claimed is free."""
        await wire.publish(self._names.gateway(self._identity.gateway), beat(""))

    async def _keep_beating(self, wire: Wire) -> None:
        while True:
            await asyncio.sleep(self._settings.beat_s)
            await self._beat(wire)
            others = [one for one in self._index.claimers() if one != self._identity.session]
            for session in self._presence.newly_dead(others):
                count = self._index.lost(session)
                self._log.warning("gateway %s is gone: %d jobs of it are free", session, count)

    async def _beat(self, wire: Wire) -> int:
        subject = self._names.gateway(self._identity.gateway)
        return await wire.publish(subject, beat(self._identity.session))

    def _told(self, message: Message) -> None:
        """One message of the stream."""
        self._index.passed(message.seq)
        kind, name = message.subject.rsplit(".", 2)[-2:]
        try:
            if kind == "gateway":
                self._presence.heard(name, message.seq, message.content, message.written_s)
                self._check_that_we_are_one(name, message.seq)
            else:
                self._index.unread.add(message.subject)
                self._index.apply(message.subject, message.seq, decode(message.content))
                self._index.unread.discard(message.subject)
        except (ValueError, KeyError, TypeError) as error:
            # A later version's, or somebody else's: it is left alone.
            self._log.error("job queue: %s is not understood: %r", message.subject, error)

    def _check_that_we_are_one(self, gateway: str, seq: int) -> None:
        ours = gateway == self._identity.gateway and seq > self._began
        if ours and self._presence.session_of(gateway) not in {self._identity.session, ""}:
            self._log.error("another gateway has a copy of our state folder: calls are made twice")


async def _first(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Until one of them ends, which is an error."""
    ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in ended:
        await task
