"""Removes unneeded messages from the streams: marks, orphaned parts, old heartbeats."""

import asyncio
import time
from collections import deque
from functools import partial
from itertools import islice, takewhile
from logging import Logger
from typing import NamedTuple

from gateway_ext.errors import QueueFailed
from gateway_ext.jobs.jetstream.bodies import BodyParts
from gateway_ext.jobs.jetstream.index import IndexEntry, JobIndex
from gateway_ext.jobs.jetstream.requests import RecordConflict, bounded
from gateway_ext.jobs.jetstream.session import GatewayPresence
from gateway_ext.jobs.jetstream.settings import JetStreamSettings
from gateway_ext.jobs.jetstream.streams import RecordWriter, is_mark

_ROUNDS_PER_MARK = 4
# How many marks are removed at the same time, and how many are considered at once.
_TOGETHER, _AT_ONCE = 8, 256


class _Mark(NamedTuple):
    """The mark of a job that ended, and the time from which it is no longer needed."""

    due_s: float
    subject: str
    seq: int
    left_by: str


class StreamCleanup:
    """Cleans up regularly while there is a connection; a later round finds what one missed."""

    def __init__(
        self,
        settings: JetStreamSettings,
        parts: BodyParts,
        writer: RecordWriter,
        presence: GatewayPresence,
        index: JobIndex,
        log: Logger,
    ) -> None:
        self._settings = settings
        self._parts = parts
        self._writer = writer
        self._presence = presence
        self._index = index
        self._log = log
        self._marks: deque[_Mark] = deque()
        self._suspects: dict[str, float] = {}
        self._orphans_due_s = 0.0

    async def go_on(self) -> None:
        while True:
            await asyncio.sleep(self._settings.mark_s / _ROUNDS_PER_MARK)
            try:
                await self.once(time.monotonic())
            except (QueueFailed, RecordConflict) as error:
                self._log.warning("job queue: the clean-up failed: %r", error)

    async def once(self, now_s: float) -> None:
        for entry in self._index.halves():
            await self._writer.finish(entry.record.number)
        await self._remove_outdated()
        await self._remove_marks(now_s)
        for gateway, seq in self._presence.old():
            await self._writer.delete(self._writer.names.gateway(gateway), seq)
            self._presence.forget(gateway)
        if now_s >= self._orphans_due_s:
            self._orphans_due_s = now_s + self._settings.orphan_s / 2
            await self._remove_orphans(now_s)

    async def _remove_outdated(self) -> None:
        """Remove records that a killed nats-server has beside those that replaced them.

        With the removal of a mark, the record of a job that had ended would be the last one of its
        subject, and the job would be made once more. So this comes before the marks.
        """
        outdated = self._index.outdated
        while outdated:
            await self._writer.delete(*outdated[-1])
            outdated.pop()

    async def _remove_marks(self, now_s: float) -> None:
        """Remove marks that all gateways have read; the session that left a mark removes it."""
        due_s = now_s + self._settings.mark_s
        self._marks.extend(_Mark(due_s, *mark) for mark in self._index.marks)
        self._index.marks.clear()
        while due := self._due_marks(now_s):
            await bounded((partial(self._remove_mark, mark) for mark in due), _TOGETHER)
            for mark in due:  # after all of them, so that a failed one is tried again
                self._index.forget_mark(mark.subject, mark.seq)
                self._marks.popleft()

    def _due_marks(self, now_s: float) -> list[_Mark]:
        """The next marks that are due, where no older message can arrive any more."""
        first = islice(self._marks, _AT_ONCE)
        position = self._index.position
        return list(takewhile(lambda mark: mark.due_s <= now_s and mark.seq <= position, first))

    async def _remove_mark(self, mark: _Mark) -> None:
        session = ".".join(mark.left_by.split(".")[:2])
        if session == self._writer.me or not self._presence.lives(session):
            await self._writer.delete(mark.subject, mark.seq, is_mark)

    async def _remove_orphans(self, now_s: float) -> None:
        """Remove parts without a job: of calls that were not stored, or of gateways that died."""
        if self._index.unread:
            return  # it is unknown which parts are needed
        letters = self._index.letters()
        present = await self._parts.uids()
        needed = self._index.uids()  # read after `present`, as jobs may arrive in between
        seen = {uid: self._suspects.get(uid, now_s) for uid in present - needed}
        for uid, first_s in seen.items():
            if now_s - first_s >= self._settings.orphan_s:
                await self._parts.purge(uid)
                self._log.info("job queue: the orphaned parts %s are removed", uid)
        self._suspects = {
            uid: at for uid, at in seen.items() if now_s - at < self._settings.orphan_s
        }
        for letter in letters:
            # A letter whose call is known to be lost stays.
            if letter.record.uid not in present and letter.record.call.head:
                await self._remove_discarded(letter)

    async def _remove_discarded(self, letter: IndexEntry) -> None:
        """Remove a letter that was discarded, and whose record returned."""
        if not await self._parts.has_call(letter.record):
            self._log.warning("dead letter %d had been discarded", letter.record.number)
            await self._writer.remove(letter)
