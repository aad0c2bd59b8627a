"""Records written to the stream and to the index, each only where it stands as the writer knows."""

from dataclasses import replace

from gateway_ext.errors import QueueFailed
from gateway_ext.jobs.jetstream.index import Entry, Index, is_dead_subject
from gateway_ext.jobs.jetstream.link import Link
from gateway_ext.jobs.jetstream.records import Record, State, decode, encode
from gateway_ext.jobs.jetstream.streams import Names
from gateway_ext.jobs.jetstream.wire import Conflict
from gateway_ext.jobs.model import JobNumber

_TRIES = 8


class Writing:
    """What all writers of records share; `me` is the session that they write for."""

    def __init__(self, link: Link, names: Names, index: Index, me: str) -> None:
        self._link = link
        self._names = names
        self._index = index
        self.me = me

    async def write(self, entry: Entry, record: Record) -> None:
        """Put a record in the place of one that we know; Conflict where it is another by now."""
        seq = await self._link.wire().publish(entry.subject, encode(record), entry.seq)
        self._index.apply(entry.subject, seq, record)

    async def write_new(self, subject: str, record: Record) -> bool:
        """Write a record where none is; False where a job waits there already."""
        expected = self._index.mark_of(subject)
        for _ in range(_TRIES):
            try:
                seq = await self._link.wire().publish(subject, encode(record), expected)
            except Conflict:
                there = await self.look(subject)
                entry = self._index.alive(subject)
                if entry is not None:
                    return entry.record.uid == record.uid
                if there is not None and there.state is State.DEAD:
                    await self.finish(there.number)
                expected = self._index.mark_of(subject)
            else:
                self._index.apply(subject, seq, record)
                return True
        raise QueueFailed(f"{subject} is written by others all the time")

    async def remove(self, entry: Entry) -> None:
        """Leave a mark in the place of a record; Conflict where it is another by now."""
        await self.write(entry, replace(entry.record, state=State.GONE, owner="", ended=self.me))

    async def delete_mark(self, subject: str, seq: int) -> None:
        """Remove a mark that nobody needs, if that is what stands there."""
        await self._link.wire().delete(self._names.jobs, seq, subject, _is_mark)

    async def delete_gateway(self, gateway: str, seq: int) -> None:
        """Remove what a gateway said that is long gone."""
        await self._link.wire().delete(self._names.jobs, seq, self._names.gateway(gateway))

    async def look(self, subject: str) -> Record | None:
        """What stands there now, for the index too."""
        before = self._index.seq_of(subject)
        found = await self._link.wire().last(self._names.jobs, subject)
        if found is None:
            self._index.vanished(subject)
            return None
        seq, content = found
        if seq < before:  # the servers have lost what they had acknowledged
            self._index.vanished(subject)
        try:
            record = decode(content)
        except ValueError as error:
            raise QueueFailed(f"{subject}: {error}") from error
        self._index.apply(subject, seq, record)
        return record

    async def finish(self, number: JobNumber) -> None:
        """Bring a dead letter to where dead letters stand; of no effect where it does.

        Where it was replayed and still stands there, it is removed.
        """
        entry = self._index.dead(number)
        if entry is None:
            return
        if not is_dead_subject(entry.subject):
            await self._move(entry)
        elif self._index.is_alive(number):
            await self._remove_if_there(entry)

    async def _move(self, entry: Entry) -> None:
        subject = self._names.dead(entry.record.number)
        moved = replace(entry.record, ended=self.me)
        for _ in range(_TRIES):
            expected = self._index.mark_of(subject)
            try:
                seq = await self._link.wire().publish(subject, encode(moved), expected)
            except Conflict:
                there = await self.look(subject)
                if there is not None and there.state is State.DEAD:
                    break
            else:
                self._index.apply(subject, seq, moved)
                break
        else:
            raise QueueFailed(f"{subject} is written by others all the time")
        await self._remove_if_there(entry)

    async def _remove_if_there(self, entry: Entry) -> None:
        try:
            await self.remove(entry)
        except Conflict:
            await self.look(entry.subject)


def _is_mark(content: bytes) -> bool:
    try:
        return decode(content).state is State.GONE
    except ValueError:
        return False  # a later gateway's: it is left alone
