"""Writes records to the stream and the index, each only if it was not changed in between."""

from dataclasses import replace

from gateway_ext.errors import QueueAway, QueueFailed
from gateway_ext.jobs.jetstream.connection.nats_link import NatsLink
from gateway_ext.jobs.jetstream.connection.nats_requests import RecordConflict
from gateway_ext.jobs.jetstream.records.job_index import IndexEntry, JobIndex, is_dead_subject
from gateway_ext.jobs.jetstream.records.job_record import JobRecord, RecordState, decode, encode
from gateway_ext.jobs.jetstream.streams.job_streams import StreamNames
from gateway_ext.jobs.queue.job_values import JobNumber

_TRIES = 8


class RecordWriter:
    """Writes records on behalf of the session `me`."""

    def __init__(self, link: NatsLink, names: StreamNames, index: JobIndex, me: str) -> None:
        self._link = link
        self._names = names
        self._index = index
        self.me = me

    async def write(self, entry: IndexEntry, record: JobRecord) -> None:
        """Replace a known record; RecordConflict where it was changed meanwhile."""
        seq = await self._link.wire().publish(entry.subject, encode(record), entry.seq)
        self._index.apply(entry.subject, seq, record)

    async def write_new(self, subject: str, record: JobRecord) -> bool:
        """Write a record at a free subject; False where a job is there already."""
        expected = self._index.mark_of(subject)
        for _ in range(_TRIES):
            try:
                seq = await self._link.wire().publish(subject, encode(record), expected)
            except RecordConflict:
                there = await self.refresh(subject)
                entry = self._index.alive(subject)
                if entry is not None:
                    return entry.record.uid == record.uid
                if there is not None and there.state is RecordState.DEAD:
                    await self.finish(there.number)
                expected = self._index.mark_of(subject)
            except QueueAway:
                # The servers may have stored it and only their answer is lost: then it is run, or
                # was by now.
                there = await self.refresh(subject)
                if there is None or there.uid != record.uid:
                    raise
                # A replayed letter has the number that its call had: its mark is no sign of it.
                if self._index.alive(subject) is None and record.died_at_s:
                    raise
                return True
            else:
                self._index.apply(subject, seq, record)
                return True
        raise QueueFailed(f"{subject} is changed by others at every attempt")

    async def remove(self, entry: IndexEntry) -> None:
        """Replace a record by a mark; RecordConflict where it was changed meanwhile."""
        await self.write(
            entry, replace(entry.record, state=RecordState.GONE, owner="", ended=self.me)
        )

    async def delete_mark(self, subject: str, seq: int) -> None:
        """Remove a message, if it is a mark."""
        await self._link.wire().delete(self._names.jobs, seq, subject, _is_mark)

    async def delete_outdated(self, subject: str, seq: int) -> None:
        """Remove a record that a newer one of the same subject follows."""
        await self._link.wire().delete(self._names.jobs, seq, subject)

    async def delete_gateway(self, gateway: str, seq: int) -> None:
        """Remove the heartbeat of a gateway that is gone."""
        await self._link.wire().delete(self._names.jobs, seq, self._names.gateway(gateway))

    async def refresh(self, subject: str) -> JobRecord | None:
        """Read a subject's record from the leader, and update the index."""
        before = self._index.seq_of(subject)
        found = await self._link.wire().last(self._names.jobs, subject)
        if found is None:
            self._index.vanished(subject)
            return None
        seq, content = found
        if seq < before:  # the servers have lost an acknowledged message
            self._index.vanished(subject)
        try:
            record = decode(content)
        except ValueError as error:
            raise QueueFailed(f"{subject}: {error}") from error
        self._index.apply(subject, seq, record)
        return record

    async def finish(self, number: JobNumber) -> None:
        """Complete the move of a dead letter to its own subject, or the removal of a replayed one.

        No effect where the letter is complete.
        """
        entry = self._index.dead(number)
        if entry is None:
            return
        if not is_dead_subject(entry.subject):
            await self._move(entry)
        elif self._index.is_alive(number):
            await self._remove_if_there(entry)

    async def _move(self, entry: IndexEntry) -> None:
        subject = self._names.dead(entry.record.number)
        moved = replace(entry.record, ended=self.me)
        for _ in range(_TRIES):
            expected = self._index.mark_of(subject)
            try:
                seq = await self._link.wire().publish(subject, encode(moved), expected)
            except RecordConflict:
                there = await self.refresh(subject)
                if there is not None and there.state is RecordState.DEAD:
                    break
            else:
                self._index.apply(subject, seq, moved)
                break
        else:
            raise QueueFailed(f"{subject} is changed by others at every attempt")
        await self._remove_if_there(entry)

    async def _remove_if_there(self, entry: IndexEntry) -> None:
        try:
            await self.remove(entry)
        except RecordConflict:
            await self.refresh(entry.subject)


def _is_mark(content: bytes) -> bool:
    try:
        return decode(content).state is RecordState.GONE
    except ValueError:
        return False  # a message of a later version stays untouched
