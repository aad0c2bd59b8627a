"""Dead letters of the streams: shown, replayed, forgotten."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from gateway_ext.errors import BodyLost, JobExists, QueueFailed, UnknownJob
from gateway_ext.jobs.bodies import Body, Held
from gateway_ext.jobs.jetstream.index import Entry, Index
from gateway_ext.jobs.jetstream.parts import Parts
from gateway_ext.jobs.jetstream.records import Record, State
from gateway_ext.jobs.jetstream.streams import Names
from gateway_ext.jobs.jetstream.wire import Conflict
from gateway_ext.jobs.jetstream.writing import Writing
from gateway_ext.jobs.model import Call, DeadLetter, JobNumber, Kind, call_lane

# So many letters of a page are read at the same time.
_TOGETHER = 32


class Letters:
    """What people ask of dead letters."""

    def __init__(self, writing: Writing, parts: Parts, index: Index, names: Names) -> None:
        self._writing = writing
        self._parts = parts
        self._index = index
        self._names = names

    async def page(self, after: int, limit: int) -> Sequence[DeadLetter]:
        """Those with higher numbers, lowest first."""
        records = self._index.dead_after(after, limit)
        found: list[DeadLetter] = []
        for at in range(0, len(records), _TOGETHER):
            shown = await asyncio.gather(*map(self._shown, records[at : at + _TOGETHER]))
            found += [letter for letter, _ in shown]
        return found

    async def show(self, number: JobNumber) -> tuple[DeadLetter, Body]:
        """One of them, with the body of its call."""
        return await self._shown(self._dead(number).record)

    async def replay(self, number: JobNumber, now_s: float) -> None:
        """Let it wait again."""
        await self._writing.finish(number)
        entry = self._dead(number)
        dead = entry.record
        alive = replace(dead, state=State.WAITING, attempts=0, deferrals=0, why="", due_at_s=now_s)
        only_callback = dead.kind is Kind.CALLBACK and not dead.failed
        if not only_callback:
            lane = call_lane(dead.function)
            alive = replace(alive, kind=lane.kind, lane=lane.key, result=None, failed=False)
        if not await self._writing.write_new(self._names.call(dead.key), alive):
            raise JobExists(dead.function, dead.call_id)
        with suppress(Conflict, QueueFailed):  # else it is done later (`tidying.py`)
            await self._writing.remove(entry)
            if not only_callback and dead.result is not None:
                await self._parts.remove_result(dead.uid, dead.result)

    async def discard(self, number: JobNumber) -> None:
        """Forget it."""
        entry = self._dead(number)
        try:
            await self._writing.remove(entry)
        except Conflict as error:
            await self._writing.look(entry.subject)
            raise UnknownJob(number) from error
        with suppress(QueueFailed):  # what stays behind is found as an orphan later
            await self._parts.remove_all(entry.record)

    def _dead(self, number: JobNumber) -> Entry:
        entry = self._index.dead(number)
        if entry is None:
            raise UnknownJob(number)
        return entry

    async def _shown(self, record: Record) -> tuple[DeadLetter, Body]:
        """A letter whose parts are lost is shown as far as its record knows it."""
        call, result = _call(record), None
        body: Body = Held(b"")
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


def _call(record: Record) -> Call:
    return Call(record.call_id, record.function, "", b"", b"", (), record.queued_at_s)
