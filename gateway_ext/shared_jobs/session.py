"""While there is a connection: records are followed, heartbeats sent, other gateways known.

And what jobs and gateways have left behind in the streams is removed.
"""

import asyncio
import fcntl
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, takewhile
from logging import Logger
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

import msgspec

from common.tasks import until_first
from gateway_ext.errors import QueueFailed
from gateway_ext.shared_jobs.bodies import BodyParts
from gateway_ext.shared_jobs.index import IndexEntry, JobIndex
from gateway_ext.shared_jobs.records import decode
from gateway_ext.shared_jobs.requests import (
    NatsRequests,
    RecordConflict,
    StreamMessage,
    StreamWatch,
    bounded,
)
from gateway_ext.shared_jobs.settings import JetStreamSettings
from gateway_ext.shared_jobs.streams import RecordWriter, ensure, is_mark

_FORGET_S = 24 * 3600.0


class _Heartbeat(msgspec.Struct):
    session: str


_HEARTBEAT = msgspec.json.Decoder(_Heartbeat)


@dataclass(slots=True)
class _Gateway:
    seq: int
    session: str
    received_s: float
    written_s: float  # by the servers' clock


@dataclass(slots=True)
class GatewayPresence:
    """The sessions of gateways; `now_s` is a monotonic clock.

    A session is dead once it closed, once its gateway has a later session, or after `lease_s`
    without a heartbeat while this gateway was connected.
    """

    lease_s: float
    now_s: Callable[[], float]
    _gateways: dict[str, _Gateway] = field(default_factory=dict)
    _servers_s: float = 0.0
    _lost: set[str] = field(default_factory=set)

    def lives(self, session: str) -> bool:
        gateway = self._gateways.get(gateway_of(session))
        if gateway is None or gateway.session != session:
            return False
        return self.now_s() - gateway.received_s <= self.lease_s

    def receive(self, gateway: str, seq: int, content: bytes, written_s: float) -> None:
        """Note a heartbeat, which names the gateway's session; an empty session means closed."""
        try:
            session = _HEARTBEAT.decode(content).session
        except RecursionError as error:
            raise ValueError("no heartbeat of a gateway") from error
        self._gateways[gateway] = _Gateway(seq, session, self.now_s(), written_s)
        self._servers_s = max(self._servers_s, written_s)
        self._lost.discard(session)

    def session_of(self, gateway: str) -> str:
        """The current session of a gateway; "" where it has none."""
        entry = self._gateways.get(gateway)
        return entry.session if entry is not None else ""

    def restart_leases(self) -> None:
        """Start all leases again, as heartbeats could not arrive without a connection."""
        for gateway in self._gateways.values():
            gateway.received_s = self.now_s()

    def newly_dead(self, sessions: list[str]) -> list[str]:
        """The dead ones of these sessions that the previous call did not return."""
        dead = [
            session for session in sessions if session not in self._lost and not self.lives(session)
        ]
        self._lost |= set(dead)
        self._lost &= set(sessions)
        return dead

    def old(self) -> list[tuple[str, int]]:
        """Gateways without a heartbeat for a day, each with the number of its message."""
        before_s = self._servers_s - _FORGET_S
        return [
            (name, gateway.seq)
            for name, gateway in self._gateways.items()
            if gateway.written_s < before_s
        ]

    def forget(self, gateway: str) -> None:
        """Drop a gateway whose message was removed from the stream."""
        self._gateways.pop(gateway, None)


class GatewayIdentity:
    """The name of this gateway, kept in its state folder, which is locked against other processes.

    `session` is new at each start, so that claims of the session before are released at once.
    """

    def __init__(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(0o700)
            self._file = os.open(folder / "gateway", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise QueueFailed(f"the job queue has no folder: {error}") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.gateway = os.pread(self._file, 64, 0).decode("ascii")
            if not self.gateway.isalnum():
                self.gateway = uuid4().hex
                os.pwrite(self._file, self.gateway.encode(), 0)
        except (OSError, ValueError) as error:
            os.close(self._file)
            raise QueueFailed(f"another gateway has the folder {folder}: {error}") from error
        self.session = f"{self.gateway}.{uuid4().hex[:12]}"

    def close(self) -> None:
        """Unlock the folder for another process."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def beat(session: str) -> bytes:
    """The content of a heartbeat; an empty session announces that the gateway closes."""
    return msgspec.json.encode(_Heartbeat(session))


def gateway_of(session: str) -> str:
    return session.partition(".")[0]


_ROUNDS_PER_MARK = 4
# How many marks are removed at the same time, and how many are considered at once.
_MARKS_TOGETHER, _AT_ONCE = 8, 256


class _Mark(NamedTuple):
    """The mark of a job that ended, and the time from which it is no longer needed."""

    due_s: float
    subject: str
    seq: int
    left_by: str


@dataclass(slots=True)
class GatewaySession:
    """Keeps the index and the presence of gateways equal to the stream, and the stream clean."""

    settings: JetStreamSettings
    identity: GatewayIdentity
    presence: GatewayPresence
    parts: BodyParts
    writer: RecordWriter
    log: Logger
    _created: str = ""  # when the stream was, as the servers say
    _began: int = 0  # the first heartbeat of this connection
    _marks: deque[_Mark] = field(default_factory=deque)
    _suspects: dict[str, float] = field(default_factory=dict)
    _orphans_due_s: float = 0.0

    async def serve(self, wire: NatsRequests, usable: Callable[[], None]) -> None:
        """Read the stream, then follow it, send heartbeats and clean up, until one fails."""
        tally = self._index.tally
        created, parts_bytes = await ensure(
            wire, self.writer.names, self.settings.replicas, tally.capacity_bytes
        )
        tally.limit_to(parts_bytes)
        if created != self._created:
            self._index.clear()
            self._created = created
        self._began = await self._beat(wire)
        self._index.begin_reading()
        watch = StreamWatch(wire, self.writer.names.jobs, self._receive)
        await watch.begin(until=self._began)
        self._index.end_reading()
        self.presence.restart_leases()
        usable()
        await until_first(watch.go_on(), self._keep_beating(wire), self._keep_cleaning())

    @property
    def _index(self) -> JobIndex:
        return self.writer.index

    async def _keep_beating(self, wire: NatsRequests) -> None:
        while True:
            await asyncio.sleep(self.settings.beat_s)
            await self._beat(wire)
            others = [
                session for session in self._index.claimers() if session != self.identity.session
            ]
            for session in self.presence.newly_dead(others):
                count = self._index.release_claims(session)
                self.log.warning("gateway %s is dead: its %d claims are released", session, count)

    async def _beat(self, wire: NatsRequests) -> int:
        subject = self.writer.names.gateway(self.identity.gateway)
        return await wire.publish(subject, beat(self.identity.session))

    def _receive(self, message: StreamMessage) -> None:
        self._index.passed(message.seq)
        kind, name = message.subject.rsplit(".", 2)[-2:]
        try:
            if kind == "gateway":
                self.presence.receive(name, message.seq, message.content, message.written_s)
                self._check_single_session(name, message.seq)
            else:
                self._index.unread.add(message.subject)
                self._index.apply(message.subject, message.seq, decode(message.content))
                self._index.unread.discard(message.subject)
        except ValueError as error:
            # The message of a later version or of another program stays untouched.
            self.log.error(
                "job queue: the message at %s cannot be read: %r", message.subject, error
            )

    def _check_single_session(self, gateway: str, seq: int) -> None:
        ours = gateway == self.identity.gateway and seq > self._began
        if ours and self.presence.session_of(gateway) not in {self.identity.session, ""}:
            self.log.error("another gateway has a copy of our state folder: calls are made twice")

    # -- what is left behind ----------------------------------------------------------------------

    async def _keep_cleaning(self) -> None:
        """Clean up regularly; a later round finds what one missed."""
        while True:
            await asyncio.sleep(self.settings.mark_s / _ROUNDS_PER_MARK)
            try:
                await self._clean_up(time.monotonic())
            except (QueueFailed, RecordConflict) as error:
                self.log.warning("job queue: the clean-up failed: %r", error)

    async def _clean_up(self, now_s: float) -> None:
        for entry in self._index.halves():
            await self.writer.finish(entry.record.number)
        await self._remove_outdated()
        await self._remove_marks(now_s)
        for gateway, seq in self.presence.old():
            await self.writer.delete(self.writer.names.gateway(gateway), seq)
            self.presence.forget(gateway)
        if now_s >= self._orphans_due_s:
            self._orphans_due_s = now_s + self.settings.orphan_s / 2
            await self._remove_orphans(now_s)

    async def _remove_outdated(self) -> None:
        """Remove records that a killed nats-server has beside those that replaced them.

        With the removal of a mark, the record of a job that had ended would be the last one of its
        subject, and the job would be made once more. So this comes before the marks.
        """
        outdated = self._index.outdated
        while outdated:
            await self.writer.delete(*outdated[-1])
            outdated.pop()

    async def _remove_marks(self, now_s: float) -> None:
        """Remove marks that all gateways have read; the session that left a mark removes it."""
        due_s = now_s + self.settings.mark_s
        self._marks.extend(_Mark(due_s, *mark) for mark in self._index.marks)
        self._index.marks.clear()
        while due := self._due_marks(now_s):
            await bounded((partial(self._remove_mark, mark) for mark in due), _MARKS_TOGETHER)
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
        if session == self.writer.me or not self.presence.lives(session):
            await self.writer.delete(mark.subject, mark.seq, is_mark)

    async def _remove_orphans(self, now_s: float) -> None:
        """Remove parts without a job: of calls that were not stored, or of gateways that died."""
        if self._index.unread:
            return  # it is unknown which parts are needed
        letters = self._index.letters()
        present = await self.parts.uids()
        needed = self._index.uids()  # read after `present`, as jobs may arrive in between
        seen = {uid: self._suspects.get(uid, now_s) for uid in present - needed}
        for uid, first_s in seen.items():
            if now_s - first_s >= self.settings.orphan_s:
                await self.parts.purge(uid)
                self.log.info("job queue: the orphaned parts %s are removed", uid)
        self._suspects = {
            uid: at for uid, at in seen.items() if now_s - at < self.settings.orphan_s
        }
        for letter in letters:
            # A letter whose call is known to be lost stays.
            if letter.record.uid not in present and letter.record.call.head:
                await self._remove_discarded(letter)

    async def _remove_discarded(self, letter: IndexEntry) -> None:
        """Remove a letter that was discarded, and whose record returned."""
        if not await self.parts.has_call(letter.record):
            self.log.warning("dead letter %d had been discarded", letter.record.number)
            await self.writer.remove(letter)
