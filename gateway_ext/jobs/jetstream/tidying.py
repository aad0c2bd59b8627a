"""What is removed from the streams a little later: marks, orphans, gateways of yesterday."""

import asyncio
import time
from collections import deque
from logging import Logger
from typing import NamedTuple

from gateway_ext.errors import QueueFailed
from gateway_ext.jobs.jetstream.index import Index
from gateway_ext.jobs.jetstream.parts import Parts
from gateway_ext.jobs.jetstream.presence import Presence
from gateway_ext.jobs.jetstream.settings import JetStreamSettings
from gateway_ext.jobs.jetstream.wire import Conflict
from gateway_ext.jobs.jetstream.writing import Writing

_ROUNDS_PER_MARK = 4


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
            await self._writing.delete(seq)
            self._presence.forget(gateway)
        if now_s >= self._orphans_due_s:
            self._orphans_due_s = now_s + self._settings.orphan_s / 2
            await self._remove_orphans(now_s)

    async def _remove_marks(self, now_s: float) -> None:
        """Others need them until they have read them; then who left one removes it."""
        due_s = now_s + self._settings.mark_s
        self._marks.extend(_Mark(due_s, *mark) for mark in self._index.marks)
        self._index.marks.clear()
        while self._marks and self._marks[0].due_s <= now_s:
            mark = self._marks[0]
            if mark.seq > self._index.position:
                return  # something older may still be on its way to us
            session = ".".join(mark.left_by.split(".")[:2])
            if session == self._writing.me or not self._presence.lives(session):
                await self._writing.delete(mark.seq)
            self._index.forget_mark(mark.subject, mark.seq)
            self._marks.popleft()

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
            if letter.record.uid not in present:  # it was discarded, and came back (`queue.py`)
                self._log.warning("dead letter %d had been discarded", letter.record.number)
                await self._writing.remove(letter)
