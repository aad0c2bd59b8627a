"""Dead letters in the streams: listed, shown, replayed, removed."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from gateway_ext.errors import BodyLost, JobExists, QueueFailed, UnknownJob
from gateway_ext.jobs.jetstream.connection.nats_requests import RecordConflict
from gateway_ext.jobs.jetstream.records.job_index import IndexEntry, JobIndex
from gateway_ext.jobs.jetstream.records.job_record import JobRecord, RecordState
from gateway_ext.jobs.jetstream.streams.body_parts import BodyParts
from gateway_ext.jobs.jetstream.streams.job_streams import StreamNames
from gateway_ext.jobs.jetstream.streams.record_writer import RecordWriter
from gateway_ext.jobs.queue.job_bodies import MemoryBody, StoredBody
from gateway_ext.jobs.queue.job_values import AsyncCall, DeadLetter, JobKind, JobNumber, call_lane

# How many letters of a page are read at the same time.
_TOGETHER = 32


class DeadLetterRecords:
    """Reads and changes dead letters."""

    def __init__(
        self, writer: RecordWriter, parts: BodyParts, index: JobIndex, names: StreamNames
    ) -> None:
        self._writer = writer
        self._parts = parts
        self._index = index
        self._names = names

    async def page(self, after: int, limit: int) -> Sequence[DeadLetter]:
        """Letters with higher numbers than `after`, lowest first."""
        records = self._index.dead_after(after, limit)
        found: list[DeadLetter] = []
        for at in range(0, len(records), _TOGETHER):
            shown = await asyncio.gather(*map(self._shown, records[at : at + _TOGETHER]))
            found += [letter for letter, _ in shown]
        return found

    async def show(self, number: JobNumber) -> tuple[DeadLetter, StoredBody]:
        """One letter with the body of its call."""
        return await self._shown(self._dead(number).record)

    async def replay(self, number: JobNumber, now_s: float) -> None:
        """Turn a letter into a waiting job."""
        await self._writer.finish(number)
        entry = self._dead(number)
        dead = entry.record
        alive = replace(
            dead, state=RecordState.WAITING, attempts=0, deferrals=0, why="", due_at_s=now_s
        )
        only_callback = dead.kind is JobKind.CALLBACK and not dead.failed
        if not only_callback:
            lane = call_lane(dead.function)
            alive = replace(alive, kind=lane.kind, lane=lane.key, result=None, failed=False)
        if not await self._writer.write_new(self._names.call(dead.key), alive):
            raise JobExists(dead.function, dead.call_id)
        with suppress(RecordConflict, QueueFailed):  # `stream_cleanup` repeats it otherwise
            await self._writer.remove(entry)
            if not only_callback and dead.result is not None:
                await self._parts.remove_result(dead.uid, dead.result)

    async def discard(self, number: JobNumber) -> None:
        """Remove a letter."""
        entry = self._dead(number)
        try:
            await self._writer.remove(entry)
        except RecordConflict as error:
            await self._writer.refresh(entry.subject)
            raise UnknownJob(number) from error
        with suppress(QueueFailed):  # the clean-up removes what remains
            await self._parts.remove_all(entry.record)

    def _dead(self, number: JobNumber) -> IndexEntry:
        entry = self._index.dead(number)
        if entry is None:
            raise UnknownJob(number)
        return entry

    async def _shown(self, record: JobRecord) -> tuple[DeadLetter, StoredBody]:
        """A letter with its call; where the parts are lost, with what its record has."""
        call, result = _call(record), None
        body: StoredBody = MemoryBody(b"")
        with suppress(BodyLost):
            call, body = await self._parts.read_call(record)
            if record.result is not None:
                result, _ = await self._parts.read_result(record.uid, record.result)
        letter = DeadLetter(
            number=record.number,
            call=call,
            kind=record.kind,
            attempts=record.attempts,
            why=record.why,
            died_at_s=record.died_at_s,
            result=result,
            size_bytes=record.size_bytes,
            last_status=record.last_status,
        )
        return letter, body


def _call(record: JobRecord) -> AsyncCall:
    return AsyncCall(record.call_id, record.function, "", b"", b"", (), record.queued_at_s)
