"""What is removed from the streams a little later: marks, orphans, gateways of yesterday."""

import asyncio
import time
from collections import deque
from itertools import islice, takewhile
from logging import Logger
from typing import NamedTuple

from gateway_ext.errors import QueueFailed
from gateway_ext.jobs.jetstream.index import Entry, Index
from gateway_ext.jobs.jetstream.parts import Parts
from gateway_ext.jobs.jetstream.presence import Presence
from gateway_ext.jobs.jetstream.settings import JetStreamSettings
from gateway_ext.jobs.jetstream.wire import Conflict, bounded
from gateway_ext.jobs.jetstream.writing import Writing

_ROUNDS_PER_MARK = 4
# Marks are removed so many at a time, of so many that are looked at.
_TOGETHER, _AT_ONCE = 8, 256


class _Mark(NamedTuple):
    """What a job left behind, and from when on nobody needs it."""

    due_s: float
    subject: str
    seq: int
    left_by: str


class Tidying:
    """Goes round for as long as there is a connection; what it misses is found the next time."""

    def __init__(
        self,
        settings: JetStreamSettings,
        parts: Parts,
        writing: Writing,
        presence: Presence,
        index: Index,
        log: Logger,
    ) -> None:
        self._settings = settings
        self._parts = parts
        self._writing = writing
        self._presence = presence
        self._index = index
        self._log = log
        self._marks: deque[_Mark] = deque()
        self._suspects: dict[str, float] = {}
        self._orphans_due_s = 0.0

    async def go_on(self) -> None:
        """Until the connection is gone."""
        while True:
            await asyncio.sleep(self._settings.mark_s / _ROUNDS_PER_MARK)
            try:
                await self.once(time.monotonic())
            except (QueueFailed, Conflict) as error:
                self._log.warning("job queue: tidying up: %r", error)

    async def once(self, now_s: float) -> None:
        """One round."""
        for entry in self._index.halves():
            await self._writing.finish(entry.record.number)
        await self._remove_marks(now_s)
        for gateway, seq in self._presence.old():
            await self._writing.delete_gateway(gateway, seq)
            self._presence.forget(gateway)
        if now_s >= self._orphans_due_s:
            self._orphans_due_s = now_s + self._settings.orphan_s / 2
            await self._remove_orphans(now_s)

    async def _remove_marks(self, now_s: float) -> None:
        """Others need them until they have read them; then who left one removes it."""
        due_s = now_s + self._settings.mark_s
        self._marks.extend(_Mark(due_s, *mark) for mark in self._index.marks)
        self._index.marks.clear()
        while due := self._due_marks(now_s):
            await bounded(map(self._remove_mark, due), _TOGETHER)
            for mark in due:  # once all are: those that failed are tried again
                self._index.forget_mark(mark.subject, mark.seq)
                self._marks.popleft()

    def _due_marks(self, now_s: float) -> list[_Mark]:
        """The next ones, of which nothing older can be on its way to us any more."""
        first = islice(self._marks, _AT_ONCE)
        position = self._index.position
        return list(takewhile(lambda one: one.due_s <= now_s and one.seq <= position, first))

    async def _remove_mark(self, mark: _Mark) -> None:
        session = ".".join(mark.left_by.split(".")[:2])
        if session == self._writing.me or not self._presence.lives(session):
            await self._writing.delete_mark(mark.subject, mark.seq)

    async def _remove_orphans(self, now_s: float) -> None:
        """Parts that no job has: of calls that were not kept, or of gateways that died."""
        if self._index.unread:
            return  # whose parts are needed is not known
        letters = self._index.letters()
        present = await self._parts.uids()
        needed = self._index.uids()  # some came while we read
        seen = {uid: self._suspects.get(uid, now_s) for uid in present - needed}
        for uid, first_s in seen.items():
            if now_s - first_s >= self._settings.orphan_s:
                await self._parts.purge(uid)
                self._log.info("job queue: parts %s that no job has are removed", uid)
        self._suspects = {
            uid: at for uid, at in seen.items() if now_s - at < self._settings.orphan_s
        }
        for letter in letters:
            # One whose call is lost, which is known of it, stays.
            if letter.record.uid not in present and letter.record.call.head:
                await self._remove_discarded(letter)

    async def _remove_discarded(self, letter: Entry) -> None:
        """A letter that was discarded, and came back (`queue.py`)."""
        if not await self._parts.has_call(letter.record):
            self._log.warning("dead letter %d had been discarded", letter.record.number)
            await self._writing.remove(letter)
