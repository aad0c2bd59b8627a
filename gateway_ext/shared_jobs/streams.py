"""The two streams of a queue: their names, subjects and creation, and records written to them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace
from nats.js.api import DiscardPolicy, RetentionPolicy, StorageType, StreamConfig

from gateway_ext.errors import QueueAway, QueueFailed
from gateway_ext.jobs.values import JobNumber
from gateway_ext.shared_jobs.index import IndexEntry, JobIndex, is_dead_subject
from gateway_ext.shared_jobs.link import NatsLink
from gateway_ext.shared_jobs.records import JobRecord, RecordState, decode, encode
from gateway_ext.shared_jobs.requests import (
    FAILURES,
    NatsRequests,
    RecordConflict,
    describe,
    is_full,
)

# Records are small: this is for half a million of them.
_RECORDS_BYTES = 1 << 30
_LEAST_BYTES = 1 << 18
_HALF, _QUARTER = 2, 4


class StreamNames:
    """Names of streams and subjects with one prefix."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self.jobs = f"{prefix}_jobs"
        self.parts = f"{prefix}_parts"
        self.all_jobs = f"{prefix}.jobs.>"
        self.all_parts = f"{prefix}.parts.>"

    def call(self, key: str) -> str:
        return f"{self._prefix}.jobs.call.{key}"

    def dead(self, number: JobNumber) -> str:
        return f"{self._prefix}.jobs.dead.{number}"

    def gateway(self, gateway: str) -> str:
        return f"{self._prefix}.jobs.gateway.{gateway}"

    def part(self, uid: str, name: str) -> str:
        return f"{self._prefix}.parts.{uid}.{name}"

    def all_parts_of(self, uid: str) -> str:
        return f"{self._prefix}.parts.{uid}.>"

    def uid_of(self, subject: str) -> str:
        return subject.rsplit(".", 2)[-2]


async def ensure(
    wire: NatsRequests, names: StreamNames, replicas: int, parts_bytes: int
) -> tuple[str, int]:
    """Create the streams that do not exist; existing ones are not changed.

    Returns when that of records was created, and the size of that of parts; -1: unlimited.

    Both have limits, so that bodies never fill the servers to a point where no job could be claimed
    or ended. If the servers have less space than configured, the limits are lower.
    """
    usual = stream_config(replicas)
    jobs = usual.evolve(name=names.jobs, subjects=[names.all_jobs], max_msgs_per_subject=1)
    parts = usual.evolve(name=names.parts, subjects=[names.all_parts], allow_direct=True)
    made = await ensure_stream(wire, jobs, _RECORDS_BYTES, _QUARTER)
    made_parts = await ensure_stream(wire, parts, parts_bytes, _HALF)
    return str(made["created"]), int(made_parts["config"].get("max_bytes", -1))


def stream_config(replicas: int) -> StreamConfig:
    """What all our streams are; a full one refuses messages, it never discards old ones."""
    return StreamConfig(
        retention=RetentionPolicy.LIMITS,
        storage=StorageType.FILE,
        discard=DiscardPolicy.NEW,
        num_replicas=replicas,
    )


async def ensure_stream(
    wire: NatsRequests, config: StreamConfig, most_bytes: int, less: int
) -> dict[str, Any]:
    """Create the stream if it does not exist, `less` times smaller until the servers have space."""
    info = await wire.ask(f"STREAM.INFO.{config.name}", {})
    while not info:
        if most_bytes < _LEAST_BYTES:
            raise QueueAway(f"the servers have no space for the stream {config.name}")
        try:
            await wire.client.jetstream().add_stream(config.evolve(max_bytes=most_bytes))
        except FAILURES as error:
            if not is_full(error):
                # Another gateway may be creating it; the next connection finds it.
                why = f"the stream {config.name} cannot be created: {describe(error)}"
                raise QueueAway(why) from error
            most_bytes //= less
        else:
            info = await wire.ask(f"STREAM.INFO.{config.name}", {})
    return info


_TRIES = 8


@dataclass(frozen=True, slots=True)
class RecordWriter:
    """Writes records on behalf of the session `me`."""

    link: NatsLink
    names: StreamNames
    index: JobIndex
    me: str

    async def write(self, entry: IndexEntry, record: JobRecord) -> None:
        """Raise RecordConflict where the record was changed meanwhile."""
        seq = await self.link.wire().publish(entry.subject, encode(record), entry.seq)
        self.index.apply(entry.subject, seq, record)

    async def write_new(self, subject: str, record: JobRecord) -> bool:
        """Write a record at a free subject; False where a job is there already."""
        expected = self.index.mark_of(subject)
        for _ in range(_TRIES):
            try:
                seq = await self.link.wire().publish(subject, encode(record), expected)
            except RecordConflict:
                there = await self.refresh(subject)
                entry = self.index.alive(subject)
                if entry is not None:
                    return entry.record.uid == record.uid
                if there is not None and there.state is RecordState.DEAD:
                    await self.finish(there.number)
                expected = self.index.mark_of(subject)
            except QueueAway:
                # The servers may have stored it and only their answer is lost: then it is run, or
                # was by now.
                there = await self.refresh(subject)
                if there is None or there.uid != record.uid:
                    raise
                # A replayed letter has the number that its call had: its mark is no sign of it.
                if self.index.alive(subject) is None and record.died_at_s:
                    raise
                return True
            else:
                self.index.apply(subject, seq, record)
                return True
        raise QueueFailed(f"{subject} is changed by others at every attempt")

    async def remove(self, entry: IndexEntry) -> None:
        """Replace a record by a mark; RecordConflict where it was changed meanwhile."""
        await self.write(
            entry, replace(entry.record, state=RecordState.GONE, owner="", ended=self.me)
        )

    async def delete(
        self, subject: str, seq: int, wanted: Callable[[bytes], bool] | None = None
    ) -> None:
        """See `NatsRequests.delete`."""
        await self.link.wire().delete(self.names.jobs, seq, subject, wanted)

    async def refresh(self, subject: str) -> JobRecord | None:
        """Read a subject's record from the leader, and update the index."""
        before = self.index.seq_of(subject)
        last = await self.link.wire().last(self.names.jobs, subject)
        if last is None:
            self.index.vanished(subject)
            return None
        seq, content = last
        if seq < before:  # the servers have lost an acknowledged message
            self.index.vanished(subject)
        try:
            record = decode(content)
        except ValueError as error:
            raise QueueFailed(f"{subject}: {error}") from error
        self.index.apply(subject, seq, record)
        return record

    async def finish(self, number: JobNumber) -> None:
        """Complete the move of a dead letter to its own subject, or the removal of a replayed one.

        No effect where the letter is complete.
        """
        entry = self.index.dead(number)
        if entry is None:
            return
        if not is_dead_subject(entry.subject):
            await self._move(entry)
        elif self.index.is_alive(number):
            await self._remove_if_there(entry)

    async def _move(self, entry: IndexEntry) -> None:
        subject = self.names.dead(entry.record.number)
        moved = replace(entry.record, ended=self.me)
        for _ in range(_TRIES):
            expected = self.index.mark_of(subject)
            try:
                seq = await self.link.wire().publish(subject, encode(moved), expected)
            except RecordConflict:
                there = await self.refresh(subject)
                if there is not None and there.state is RecordState.DEAD:
                    break
            else:
                self.index.apply(subject, seq, moved)
                break
        else:
            raise QueueFailed(f"{subject} is changed by others at every attempt")
        await self._remove_if_there(entry)

    async def _remove_if_there(self, entry: IndexEntry) -> None:
        try:
            await self.remove(entry)
        except RecordConflict:
            await self.refresh(entry.subject)


def is_mark(content: bytes) -> bool:
    try:
        return decode(content).state is RecordState.GONE
    except ValueError:
        return False  # a message of a later version stays untouched
