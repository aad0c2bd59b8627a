"""The job queue that gateways share: two streams of NATS JetStream, and an index in memory.

A job is one small record, at a subject of its own; its call, result and bodies are parts beside it.
Every change of a record is written only where it is still as the writer knows it, so a claim has
one winner and a gateway that was taken for dead cannot end what another one works on. `put` returns
True once the servers have acknowledged both; how safe that is, is theirs to say (docs/async.md).
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from logging import Logger
from pathlib import Path
from random import SystemRandom

from gateway_ext.errors import BodyLost, Busy, ClaimLost, QueueAway, QueueFailed, UnknownJob
from gateway_ext.jobs.bodies import Body
from gateway_ext.jobs.jetstream.index import Entry, Index
from gateway_ext.jobs.jetstream.letters import Letters
from gateway_ext.jobs.jetstream.link import Link
from gateway_ext.jobs.jetstream.numbers import Numbers
from gateway_ext.jobs.jetstream.parts import Parts
from gateway_ext.jobs.jetstream.presence import Identity, Presence
from gateway_ext.jobs.jetstream.records import Record, State, Stored, encode, key_of, uid_of
from gateway_ext.jobs.jetstream.scratch import ScratchSpool
from gateway_ext.jobs.jetstream.session import Session
from gateway_ext.jobs.jetstream.settings import JetStreamSettings, check
from gateway_ext.jobs.jetstream.streams import Names
from gateway_ext.jobs.jetstream.tidying import Tidying
from gateway_ext.jobs.jetstream.wire import Conflict, StoreFull, Wire
from gateway_ext.jobs.jetstream.writing import Writing
from gateway_ext.jobs.model import (
    Call,
    DeadLetter,
    Head,
    Job,
    JobNumber,
    Kind,
    Lane,
    Result,
    call_lane,
)
from gateway_ext.jobs.queue import JobQueue, Spool
from gateway_ext.jobs.tally import QueueLimits, Tally

_RETRY_AFTER_S = 5.0


@dataclass(slots=True)
class _Claim:
    """A job that we work on: its record as we wrote it, and what we sign its end with.

    `result` is there once it is kept: it need not be written again where naming it failed.
    """

    entry: Entry
    token: str
    result: Stored | None = None


class JetStreamQueue(JobQueue):
    """See `JobQueue`; opened by `jetstream_queue`."""

    def __init__(
        self, folder: Path, settings: JetStreamSettings, limits: QueueLimits, log: Logger
    ) -> None:
        check(settings)
        self._folder = folder
        self._settings = settings
        self._limits = limits
        self._log = log
        self._identity = Identity(folder)
        self._names = Names(settings.prefix)
        presence = Presence(settings.lease_s, time.monotonic)
        self._index = Index(Tally(limits), self._identity.session, presence.lives)
        self._session = Session(settings, self._names, self._identity, presence, self._index, log)
        self._link = Link(settings, self._serve, log)
        self._parts = Parts(self._link, self._names, Numbers(time.time, SystemRandom()))
        self._writing = Writing(self._link, self._names, self._index, self._identity.session)
        self._letters = Letters(self._writing, self._parts, self._index, self._names)
        self._tidying = Tidying(settings, self._parts, self._writing, presence, self._index, log)
        self._claims: dict[JobNumber, _Claim] = {}
        self._count = 0
        self._removing: set[asyncio.Task[None]] = set()

    @property
    def tally(self) -> Tally:
        """What there is."""
        return self._index.tally

    @property
    def away(self) -> bool:
        """Whether the servers cannot be reached."""
        return not self._link.up

    async def open(self) -> None:
        """Connect; servers that are away are waited for in the background."""
        self._link.start()
        if await self._link.wait(self._settings.connect_s):
            tally = self.tally
            self._log.info("job queue: %d calls wait, %d dead", tally.calls.total(), tally.dead)

    def watch(self, told: Callable[[], None]) -> None:
        """Call this whenever something waits that did not before."""
        self._index.offered.append(told)

    def spool(self) -> ScratchSpool:
        """Begin a body."""
        return ScratchSpool(self._folder, self._limits.inline_bytes, self._limits.body_bytes)

    # -- a job's way -----------------------------------------------------------------------------

    async def put(self, call: Call, body: Spool) -> bool:
        """Keep a call for good."""
        assert isinstance(body, ScratchSpool)  # a queue takes its own spools only
        self._link.wire()
        subject = self._names.call(key_of(call.function, call.id))
        if self._index.alive(subject) is not None:
            return False
        try:
            with self._index.tally.room(call.function, call.head_bytes + body.size_bytes):
                # Later its parts would be taken for orphans.
                async with asyncio.timeout(self._settings.orphan_s / 3):
                    kept = await self._put(subject, call, body)
        except TimeoutError as error:
            raise QueueAway("its servers are too slow") from error
        except StoreFull as error:
            self._log.error("%s", error)
            raise Busy(call.function, _RETRY_AFTER_S) from error
        await body.discard()
        return kept

    async def heads(self, kind: Kind) -> Sequence[Head]:
        """The lanes in which something waits; while the servers are away nothing is said."""
        await self._link.until_up()
        return self._index.heads(kind)

    async def claim(self, lanes: Sequence[Lane], now_s: float) -> Sequence[Job]:
        """Take the first due jobs of these lanes, as far as no other gateway is faster."""
        self._link.wire()
        jobs: list[Job] = []
        failed: QueueFailed | None = None
        wanted = list(lanes)
        while wanted:
            found = [(lane, self._index.take(lane, now_s)) for lane in wanted]
            taken = [(lane, entry) for lane, entry in found if entry is not None]
            tried = await asyncio.gather(*(self._try_claim(entry) for _, entry in taken))
            jobs += [job for job in tried if isinstance(job, Job)]
            failed = next((one for one in tried if isinstance(one, QueueFailed)), failed)
            wanted = [] if failed else [taken[at][0] for at, job in enumerate(tried) if not job]
        if failed is not None and not jobs:
            raise failed
        return jobs

    async def again(self, job: JobNumber, due_at_s: float, why: str, *, counts: bool) -> None:
        """Let a claimed job wait until then."""
        record = self._claim(job).entry.record
        attempts, deferrals = record.attempts + counts, record.deferrals + (not counts)
        tried = replace(record, attempts=attempts, deferrals=deferrals, why=why)
        await self._end(job, replace(tried, state=State.WAITING, due_at_s=due_at_s))

    async def answered(
        self, job: JobNumber, result: Result, body: Spool, lane: Lane, due_at_s: float
    ) -> None:
        """A claimed call has its result."""
        assert isinstance(body, ScratchSpool)  # a queue takes its own spools only
        claim = self._claim(job)
        record = claim.entry.record
        if claim.result is None:
            claim.result = await self._parts.write_result(record.uid, result, body)
        # A failed call may be replayed, and needs its body then.
        call = record.call if result.failure else record.call._replace(body=(), size_bytes=0)
        waits = replace(record, state=State.WAITING, kind=lane.kind, lane=lane.key)
        tried = replace(waits, due_at_s=due_at_s, attempts=0, deferrals=0, why="")
        await self._end(
            job, replace(tried, call=call, result=claim.result, failed=bool(result.failure))
        )
        await body.discard()
        if call is not record.call:
            self._remove(self._parts.remove_body(record.uid, record.call))

    async def done(self, job: JobNumber) -> None:
        """Forget a claimed job."""
        record = self._claim(job).entry.record
        await self._end(job, replace(record, state=State.GONE))
        self._remove(self._parts.remove_all(record))

    async def bury(self, job: JobNumber, why: str, at_s: float, status: int = 0) -> None:
        """Make a dead letter of a claimed job."""
        record = self._claim(job).entry.record
        dead = replace(record, state=State.DEAD, why=why, died_at_s=at_s, last_status=status)
        await self._end(job, replace(dead, attempts=record.attempts + 1))
        # It is dead by now; where this fails it is done later (`tidying.py`).
        with suppress(QueueFailed):
            await self._writing.finish(job)

    # -- dead letters ----------------------------------------------------------------------------

    async def dead(self, after: int, limit: int) -> Sequence[DeadLetter]:
        """Dead letters, lowest number first."""
        return await self._letters.page(after, limit)

    async def dead_letter(self, number: JobNumber) -> tuple[DeadLetter, Body]:
        """One of them, with the body of its call."""
        return await self._letters.show(number)

    async def replay(self, number: JobNumber, now_s: float) -> None:
        """Let a dead letter wait again."""
        await self._letters.replay(number, now_s)

    async def discard(self, number: JobNumber) -> None:
        """Forget a dead letter."""
        await self._letters.discard(number)

    async def expire(self, now_s: float) -> int:
        """Forget the dead letters that are too old, or too many."""
        gone = 0
        for number in self.tally.overdue(now_s):
            with suppress(UnknownJob):  # another gateway was faster
                await self.discard(JobNumber(number))
                gone += 1
        return gone

    async def close(self) -> None:
        """Say that what we had claimed is free, and hang up."""
        await asyncio.gather(*self._removing, return_exceptions=True)
        with suppress(QueueFailed):
            await self._session.say_goodbye(self._link.wire())
        await self._link.close()
        self._identity.close()

    # -- how it is done --------------------------------------------------------------------------

    async def _put(self, subject: str, call: Call, body: ScratchSpool) -> bool:
        number, stored = await self._parts.write_call(call, body)
        record = Record(
            number=number,
            uid=uid_of(number),
            function=call.function,
            call_id=call.id,
            queued_at_s=call.queued_at_s,
            call=stored,
            state=State.WAITING,
            kind=Kind.CALL,
            lane=call_lane(call.function).key,
            due_at_s=call.queued_at_s,
        )
        try:
            kept = await self._writing.write_new(subject, record)
        except StoreFull:
            self._remove(self._parts.purge(record.uid))
            raise
        if not kept:
            self._remove(self._parts.purge(record.uid))
        return kept

    async def _try_claim(self, entry: Entry) -> Job | QueueFailed | None:
        """The job; None where there is nothing to be made of it, an error where nobody can say."""
        subject = entry.subject
        try:
            job = await self._claimed(entry)
        except QueueFailed as error:
            self._index.let_go(subject)
            return error
        except BaseException:
            self._index.let_go(subject)
            raise
        if job is None:
            self._index.let_go(subject)
        return job

    async def _claimed(self, entry: Entry) -> Job | None:
        record = replace(entry.record, state=State.CLAIMED, owner=self._identity.session)
        try:
            seq = await self._link.wire().publish(entry.subject, encode(record), entry.seq)
        except Conflict:
            await self._writing.look(entry.subject)
            return None
        self._index.apply(entry.subject, seq, record)
        self._count += 1
        token = f"{self._identity.session}.{self._count}"
        claim = _Claim(Entry(entry.subject, seq, record), token)
        try:
            call, body = await self._parts.read_call(record)
            result = None
            if record.kind is Kind.CALLBACK and record.result is not None:
                result, body = await self._parts.read_result(record.uid, record.result)
        except BodyLost as error:
            self._claims[record.number] = claim
            await self._unreadable(entry.record, error)
            return None
        self._claims[record.number] = claim
        return Job(record.number, call, body, record.attempts, record.deferrals, result)

    async def _unreadable(self, before: Record, error: BodyLost) -> None:
        """What of a job is not there: it ended, or it is lost.

        Servers that are killed may forget that a message was replaced (2.9 does, when busy).
        A record that comes back so is one that was claimed, and its parts were removed at its end.
        """
        if before.state is State.CLAIMED and before.call.head:
            self._log.warning("call %s came back, and had ended: %s", before.call_id, error)
            await self.done(before.number)
            return
        self._log.error("call %s: it cannot be read: %s", before.call_id, error)
        if not await self._parts.has_call(before):
            # Else its letter would be taken for one that was discarded (`tidying.py`).
            claim = self._claim(before.number)
            lost = replace(claim.entry.record, call=before.call._replace(head=0))
            claim.entry = replace(claim.entry, record=lost)
        await self.bury(before.number, f"it cannot be read: {error}", time.time())

    def _claim(self, job: JobNumber) -> _Claim:
        claim = self._claims.get(job)
        if claim is None:
            self._link.wire()
            raise ClaimLost(job)
        return claim

    async def _end(self, job: JobNumber, record: Record) -> None:
        """Write down what became of a claimed job; ClaimLost where it is not ours any more."""
        claim = self._claim(job)
        signed = replace(record, owner="", ended=claim.token)
        try:
            await self._writing.write(claim.entry, signed)
        except Conflict as error:
            there = await self._writing.look(claim.entry.subject)
            self._drop(claim)
            # Ours all the same, where an earlier try was written and nobody told us.
            if there is None or there.ended != claim.token:
                raise ClaimLost(job) from error
            return
        self._drop(claim)

    def _drop(self, claim: _Claim) -> None:
        self._claims.pop(claim.entry.record.number, None)
        self._index.let_go(claim.entry.subject)

    async def _serve(self, wire: Wire, usable: Callable[[], None]) -> None:
        """What is done with a connection, until it breaks."""
        await self._session.begin(wire)
        usable()
        await self._session.go_on(wire, self._tidying.go_on)

    def _remove(self, work: Coroutine[None, None, None]) -> None:
        """In the background; what stays behind is found as an orphan later."""

        async def tried() -> None:
            with suppress(QueueFailed):
                await work

        task = asyncio.create_task(tried())
        self._removing.add(task)
        task.add_done_callback(self._removing.discard)


async def jetstream_queue(
    folder: Path, settings: JetStreamSettings, limits: QueueLimits, log: Logger
) -> JetStreamQueue:
    """Open the queue on these servers; `folder` says who we are, and has bodies on their way."""
    queue = JetStreamQueue(folder, settings, limits, log)
    try:
        await queue.open()
    except BaseException:
        await queue.close()
        raise
    return queue
