"""The job queue that gateways share: two streams of NATS JetStream, and an index in memory.

A job is one small record at a subject of its own; its call, result and bodies are parts in the
other stream. A record is written only if it was not changed since the writer read it, so a claim
has one winner, and a gateway that was considered dead cannot end another one's claim. `put` returns
True once the servers have acknowledged both; docs/async.md says what that protects against.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from logging import Logger
from pathlib import Path
from random import SystemRandom

from msgspec.structs import replace

from common.tasks import BackgroundTasks
from common.time_limits import time_limit
from gateway_ext.errors import (
    BodyLost,
    Busy,
    ClaimLost,
    JobExists,
    QueueAway,
    QueueFailed,
    UnknownJob,
)
from gateway_ext.jobs.body_buffer import BodyBuffer
from gateway_ext.jobs.queue import JobQueue, JobTally, QueueLimits
from gateway_ext.jobs.values import (
    AsyncCall,
    CallResult,
    DeadLetter,
    Job,
    JobKind,
    JobLane,
    JobNumber,
    LaneHead,
    MemoryBody,
    StoredBody,
    call_lane,
)
from gateway_ext.shared_jobs.bodies import CALL_HEAD, RESULT_HEAD, BodyParts, ScratchSpool
from gateway_ext.shared_jobs.index import IndexEntry, JobIndex
from gateway_ext.shared_jobs.link import NatsLink
from gateway_ext.shared_jobs.records import (
    JobRecord,
    RecordState,
    StoredParts,
    encode,
    job_numbers,
    key_of,
)
from gateway_ext.shared_jobs.requests import (
    NatsRequests,
    RecordConflict,
    StreamsFull,
)
from gateway_ext.shared_jobs.session import (
    GatewayIdentity,
    GatewayPresence,
    GatewaySession,
    beat,
)
from gateway_ext.shared_jobs.settings import JetStreamSettings
from gateway_ext.shared_jobs.streams import RecordWriter, StreamNames

_RETRY_AFTER_S = 5.0
# How many letters of a page are read at the same time.
_TOGETHER = 32


@dataclass(slots=True)
class _Claim:
    """A job claimed by this gateway: its record as written, and the token that signs its end."""

    entry: IndexEntry
    token: str
    result: StoredParts | None = None  # once it is stored, to be written once if the record fails


class JetStreamQueue(JobQueue):
    """See `JobQueue`; `folder` has this gateway's name and arriving bodies."""

    def __init__(
        self, folder: Path, settings: JetStreamSettings, limits: QueueLimits, log: Logger
    ) -> None:
        self._folder = folder
        self._settings = settings
        self._limits = limits
        self._log = log
        self._identity = GatewayIdentity(folder)
        self._names = StreamNames(settings.prefix)
        presence = GatewayPresence(settings.lease_s, time.monotonic)
        self.tally = JobTally(limits)
        self._index = JobIndex(self.tally, self._identity.session, presence.lives)
        self._link = NatsLink(settings, self._serve, log)
        self._parts = BodyParts(self._link, self._names, job_numbers(time.time, SystemRandom()))
        self._writer = RecordWriter(self._link, self._names, self._index, self._identity.session)
        self._session = GatewaySession(
            settings, self._identity, presence, self._parts, self._writer, log
        )
        self._claims: dict[JobNumber, _Claim] = {}
        self._count = 0
        self._removing = BackgroundTasks(log, "removing parts of jobs")

    @property
    def away(self) -> bool:
        return not self._link.up

    async def open(self) -> None:
        """Connect; servers that are away are retried in the background."""
        self._link.start()
        if await self._link.wait(self._settings.connect_s):
            tally = self.tally
            self._log.info("job queue: %d calls wait, %d dead", tally.calls.total(), tally.dead)

    def now_s(self) -> float:
        """The machine's clock, on which the gateways that share the queue agree."""
        return time.time()

    def watch(self, notify: Callable[[], None]) -> None:
        self._index.watchers.append(notify)

    def spool(self) -> ScratchSpool:
        return ScratchSpool(self._folder, self._limits.inline_bytes, self._limits.body_bytes)

    # -- jobs ------------------------------------------------------------------------------------

    async def put(self, call: AsyncCall, body: BodyBuffer) -> bool:
        assert isinstance(body, ScratchSpool)  # a queue accepts its own spools only
        self._link.wire()
        subject = self._names.call(key_of(call.function, call.id))
        if self._index.alive(subject) is not None:
            return False
        try:
            with self.tally.reserve(call.function, call.head_bytes + body.size_bytes):
                # After a longer time its parts would be removed as orphans.
                async with time_limit(self._settings.orphan_s / 3):
                    kept = await self._put(subject, call, body)
        except TimeoutError as error:
            raise QueueAway("its servers are too slow") from error
        except StreamsFull as error:
            self._log.error("%s", error)
            raise Busy(call.function, _RETRY_AFTER_S) from error
        await body.discard()
        return kept

    async def heads(self, kind: JobKind) -> Sequence[LaneHead]:
        """Wait while the servers are away."""
        await self._link.until_up()
        return self._index.heads(kind)

    async def claim(self, lanes: Sequence[JobLane], now_s: float) -> Sequence[Job]:
        """Claim the first due jobs of these lanes, unless another gateway claims them first."""
        self._link.wire()
        jobs: list[Job] = []
        failed: QueueFailed | None = None
        wanted = list(lanes)
        while wanted:
            candidates = [(lane, self._index.take(lane, now_s)) for lane in wanted]
            taken = [(lane, entry) for lane, entry in candidates if entry is not None]
            tried = await asyncio.gather(*(self._try_claim(entry) for _, entry in taken))
            jobs += [job for job in tried if isinstance(job, Job)]
            failed = next((ending for ending in tried if isinstance(ending, QueueFailed)), failed)
            wanted = [] if failed else [taken[at][0] for at, job in enumerate(tried) if not job]
        if failed is not None and not jobs:
            raise failed
        return jobs

    async def reschedule(self, job: JobNumber, due_at_s: float, why: str, *, counts: bool) -> None:
        record = self._claim(job).entry.record
        attempts, deferrals = record.attempts + counts, record.deferrals + (not counts)
        tried = replace(record, attempts=attempts, deferrals=deferrals, why=why)
        await self._end(job, replace(tried, state=RecordState.WAITING, due_at_s=due_at_s))

    async def store_result(
        self, job: JobNumber, result: CallResult, body: BodyBuffer, lane: JobLane, due_at_s: float
    ) -> None:
        assert isinstance(body, ScratchSpool)  # a queue accepts its own spools only
        claim = self._claim(job)
        record = claim.entry.record
        if claim.result is None:
            claim.result = await self._parts.write_result(record.uid, result, body)
        # A failed call may be replayed, which needs its body.
        call = record.call if result.failure else record.call._replace(body=(), size_bytes=0)
        waits = replace(record, state=RecordState.WAITING, lane=lane, due_at_s=due_at_s)
        tried = replace(waits, attempts=0, deferrals=0, why="")
        await self._end(
            job, replace(tried, call=call, result=claim.result, failed=bool(result.failure))
        )
        await body.discard()
        if call is not record.call:
            self._remove(self._parts.remove(record.uid, record.call.body_names()))

    async def finish(self, job: JobNumber) -> None:
        record = self._claim(job).entry.record
        await self._end(job, replace(record, state=RecordState.GONE))
        self._remove(self._parts.remove_all(record))

    async def bury(self, job: JobNumber, why: str, at_s: float, status: int = 0) -> None:
        record = self._claim(job).entry.record
        dead = replace(record, state=RecordState.DEAD, why=why, died_at_s=at_s, last_status=status)
        await self._end(job, replace(dead, attempts=record.attempts + 1))
        # The record says that the job is dead; the clean-up repeats a move that fails here.
        with suppress(QueueFailed):
            await self._writer.finish(job)

    # -- dead letters ----------------------------------------------------------------------------

    async def dead_letters(self, after: int, limit: int) -> Sequence[DeadLetter]:
        records = self._index.dead_after(after, limit)
        letters: list[DeadLetter] = []
        for at in range(0, len(records), _TOGETHER):
            shown = await asyncio.gather(*map(self._shown, records[at : at + _TOGETHER]))
            letters += [letter for letter, _ in shown]
        return letters

    async def dead_letter(self, number: JobNumber) -> tuple[DeadLetter, StoredBody]:
        return await self._shown(self._dead(number).record)

    async def replay(self, number: JobNumber, now_s: float) -> None:
        await self._writer.finish(number)
        entry = self._dead(number)
        dead = entry.record
        alive = replace(
            dead, state=RecordState.WAITING, attempts=0, deferrals=0, why="", due_at_s=now_s
        )
        only_callback = dead.lane.kind is JobKind.CALLBACK and not dead.failed
        if not only_callback:
            alive = replace(alive, lane=call_lane(dead.function), result=None, failed=False)
        if not await self._writer.write_new(self._names.call(dead.key), alive):
            raise JobExists(dead.function, dead.call_id)
        with suppress(RecordConflict, QueueFailed):  # the clean-up repeats it otherwise
            await self._writer.remove(entry)
            if not only_callback and dead.result is not None:
                await self._parts.remove(dead.uid, dead.result.names())

    async def discard(self, number: JobNumber) -> None:
        entry = self._dead(number)
        try:
            await self._writer.remove(entry)
        except RecordConflict as error:
            await self._writer.refresh(entry.subject)
            raise UnknownJob(number) from error
        with suppress(QueueFailed):  # the clean-up removes what remains
            await self._parts.remove_all(entry.record)

    async def close(self) -> None:
        await self._removing.wait()
        with suppress(QueueFailed):
            gateway = self._names.gateway(self._identity.gateway)
            await self._link.wire().publish(gateway, beat(""))
        await self._link.close()
        self._identity.close()

    # -- writes and claims -----------------------------------------------------------------------

    async def _put(self, subject: str, call: AsyncCall, body: ScratchSpool) -> bool:
        number, stored = await self._parts.write_call(call, body)
        record = JobRecord(
            number=number,
            function=call.function,
            call_id=call.id,
            queued_at_s=call.queued_at_s,
            call=stored,
            state=RecordState.WAITING,
            lane=call_lane(call.function),
            due_at_s=call.queued_at_s,
        )
        try:
            kept = await self._writer.write_new(subject, record)
        except StreamsFull:
            self._remove(self._parts.purge(record.uid))
            raise
        if not kept:
            self._remove(self._parts.purge(record.uid))
        return kept

    async def _try_claim(self, entry: IndexEntry) -> Job | QueueFailed | None:
        """The claimed job; None where it is taken or unreadable, an error where that is unknown."""
        job = None
        try:
            job = await self._claimed(entry)
        except QueueFailed as error:
            return error
        finally:
            if job is None:
                self._index.release(entry.subject)
        return job

    async def _claimed(self, entry: IndexEntry) -> Job | None:
        record = replace(entry.record, state=RecordState.CLAIMED, owner=self._identity.session)
        try:
            seq = await self._link.wire().publish(entry.subject, encode(record), entry.seq)
        except RecordConflict:
            await self._writer.refresh(entry.subject)
            return None
        self._index.apply(entry.subject, seq, record)
        self._count += 1
        token = f"{self._identity.session}.{self._count}"
        claim = _Claim(IndexEntry(entry.subject, seq, record), token)
        try:
            call, body = await self._parts.read(record.uid, record.call, CALL_HEAD)
            result = None
            if record.lane.kind is JobKind.CALLBACK and record.result is not None:
                result, body = await self._parts.read(record.uid, record.result, RESULT_HEAD)
        except BodyLost as error:
            self._claims[record.number] = claim
            await self._unreadable(entry.record, error)
            return None
        self._claims[record.number] = claim
        attempts, deferrals = record.attempts, record.deferrals
        return Job(record.number, call, body, record.lane, attempts, deferrals, result)

    async def _unreadable(self, before: JobRecord, error: BodyLost) -> None:
        """Handle a job whose parts are missing: it had ended, or they are lost.

        A killed nats-server may forget that a message was replaced (2.9 does, when busy). A record
        that returns that way was claimed before, and its parts were removed when it ended.
        """
        if before.state is RecordState.CLAIMED and before.call.head:
            self._log.warning(
                "call %s had ended, and its record returned: %s", before.call_id, error
            )
            await self.finish(before.number)
            return
        self._log.error("call %s: it cannot be read: %s", before.call_id, error)
        if not await self._parts.has_call(before):
            # Otherwise the clean-up would treat the letter as one that was discarded.
            claim = self._claim(before.number)
            lost = replace(claim.entry.record, call=before.call._replace(head=0))
            claim.entry.record = lost
        await self.bury(before.number, f"it cannot be read: {error}", time.time())

    def _claim(self, job: JobNumber) -> _Claim:
        claim = self._claims.get(job)
        if claim is None:
            self._link.wire()
            raise ClaimLost(job)
        return claim

    async def _end(self, job: JobNumber, record: JobRecord) -> None:
        """Raise ClaimLost where another gateway has the job now."""
        claim = self._claim(job)
        signed = replace(record, owner="", ended=claim.token)
        try:
            await self._writer.write(claim.entry, signed)
        except RecordConflict as error:
            there = await self._writer.refresh(claim.entry.subject)
            self._drop(claim)
            # The token is ours where an earlier write succeeded without an acknowledgement.
            if there is None or there.ended != claim.token:
                raise ClaimLost(job) from error
            return
        self._drop(claim)

    def _drop(self, claim: _Claim) -> None:
        self._claims.pop(claim.entry.record.number, None)
        self._index.release(claim.entry.subject)

    def _dead(self, number: JobNumber) -> IndexEntry:
        entry = self._index.dead(number)
        if entry is None:
            raise UnknownJob(number)
        return entry

    async def _shown(self, record: JobRecord) -> tuple[DeadLetter, StoredBody]:
        """A letter with its call; where the parts are lost, with what its record has."""
        call = AsyncCall(record.call_id, record.function, "", b"", b"", (), record.queued_at_s)
        body: StoredBody = MemoryBody(b"")
        result = None
        with suppress(BodyLost):
            call, body = await self._parts.read(record.uid, record.call, CALL_HEAD)
            if record.result is not None:
                result, _ = await self._parts.read(record.uid, record.result, RESULT_HEAD)
        letter = DeadLetter(
            number=record.number,
            call=call,
            kind=record.lane.kind,
            attempts=record.attempts,
            why=record.why,
            died_at_s=record.died_at_s,
            result=result,
            size_bytes=record.size_bytes,
            last_status=record.last_status,
        )
        return letter, body

    async def _serve(self, wire: NatsRequests, usable: Callable[[], None]) -> None:
        await self._session.serve(wire, usable)

    def _remove(self, work: Coroutine[None, None, None]) -> None:
        """Remove parts in the background; the clean-up finds what remains."""

        async def tried() -> None:
            with suppress(QueueFailed):
                await work

        self._removing.start(tried())
