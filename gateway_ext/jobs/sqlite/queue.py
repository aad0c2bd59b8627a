"""The job queue in one folder: an SQLite database, and files for the large bodies.

What `put` returned True for is on the disk (fsync, shared by all that are put at the same time) and
survives a loss of power. Claims and ends are written without fsync: they survive the process, and
where power is lost a call that was just made is made again, and so its body's file stays until that
end is on the disk too. One process has the queue at a time.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from logging import Logger
from pathlib import Path
from shutil import disk_usage

from gateway_ext.errors import BodyLost, QueueFailed, UnknownJob
from gateway_ext.jobs.bodies import Body, Held
from gateway_ext.jobs.model import Call, DeadLetter, Head, Job, JobNumber, Kind, Lane, Result
from gateway_ext.jobs.queue import JobQueue, Spool
from gateway_ext.jobs.sqlite import rows
from gateway_ext.jobs.sqlite.changes import Buried, Census, Changes, Found, Stands
from gateway_ext.jobs.sqlite.committer import Committer, Turn
from gateway_ext.jobs.sqlite.spool import FileBody, FileSpool, Kept, sync_folder
from gateway_ext.jobs.tally import QueueLimits, Tally


class SqliteQueue(JobQueue):
    """See `JobQueue`; opened by `sqlite_queue`."""

    away = False  # the disk is here

    def __init__(self, folder: Path, limits: QueueLimits, log: Logger) -> None:
        self._bodies = folder / "bodies"
        self._limits = limits
        self._log = log
        self._tally = Tally(limits)
        self._changes = Changes(self._bodies)
        self._committer = Committer(folder / "jobs.sqlite", self._prepare)
        self._found = Census((), ())
        self._watchers: list[Callable[[], None]] = []

    @property
    def tally(self) -> Tally:
        """What there is."""
        return self._tally

    async def open(self) -> None:
        """Make what is missing, and let everything wait that a dead process had claimed."""
        try:
            self._bodies.mkdir(parents=True, exist_ok=True)
            # What callers send, their credentials too, is not for functions to read.
            self._bodies.parent.chmod(0o700)
            sync_folder(self._bodies.parent)
            self._tally.fit(disk_usage(self._bodies).total)
        except OSError as error:
            raise QueueFailed(f"the job queue has no folder: {error}") from error
        await self._committer.open()
        for one in self._found.alive:
            self._tally.keep(*one)
        for letter in self._found.dead:
            self._tally.bury(*letter)
        self._found = Census((), ())
        calls, dead = self._tally.calls.total(), self._tally.dead
        self._log.info("job queue: %d calls wait, %d dead", calls, dead)

    def watch(self, told: Callable[[], None]) -> None:
        """Call this whenever something waits that did not before."""
        self._watchers.append(told)

    def spool(self) -> FileSpool:
        """Begin a body."""
        return FileSpool(self._bodies, self._limits.inline_bytes, self._limits.body_bytes)

    # -- a job's way -----------------------------------------------------------------------------

    async def put(self, call: Call, body: Spool) -> bool:
        """Keep a call for good."""

        def kept_now(one: Stands | None) -> None:
            if one is not None:
                self._stands(one)

        with self._tally.room(call.function, call.head_bytes + body.size_bytes):
            kept = await _kept(body)
            one = await self._committer.run(
                partial(self._changes.put, call, kept),
                durable=True,
                then=kept_now,
                file=self._file(kept),
            )
        return one is not None

    async def heads(self, kind: Kind) -> Sequence[Head]:
        """The lanes in which something waits."""
        return await self._committer.run(partial(self._changes.heads, kind), durable=False)

    async def claim(self, lanes: Sequence[Lane], now_s: float) -> Sequence[Job]:
        """Take the first due jobs of these lanes."""
        take = partial(self._changes.claim, Counter(lanes), now_s)
        found = await self._committer.run(take, durable=False)
        jobs = [await self._with_body(one) for one in found]
        return [job for job in jobs if job is not None]

    async def again(self, job: JobNumber, due_at_s: float, why: str, *, counts: bool) -> None:
        """Let a claimed job wait until then."""
        counted = "attempts" if counts else "deferrals"
        change = partial(self._changes.again, job, due_at_s, why, counted)
        await self._committer.run(change, durable=False, then=lambda _: self._tell())

    async def answered(
        self, job: JobNumber, result: Result, body: Spool, lane: Lane, due_at_s: float
    ) -> None:
        """A claimed call has its result."""
        kept = await _kept(body)
        change = partial(self._changes.answered, job, result, kept, lane, due_at_s)
        # Where it fails the caller says it again: the body stays.
        await self._committer.run(change, durable=False, then=self._stands)

    async def done(self, job: JobNumber) -> None:
        """Forget a claimed job."""

        def ended(_: None) -> None:
            self._tally.drop(job)
            self._tell()

        await self._committer.run(partial(self._changes.done, job), durable=False, then=ended)

    async def bury(self, job: JobNumber, why: str, at_s: float, status: int = 0) -> None:
        """Make a dead letter of a claimed job."""

        def buried(one: Buried) -> None:
            self._tally.bury(*one)
            self._tell()

        change = partial(self._changes.bury, job, why, at_s, status)
        await self._committer.run(change, durable=False, then=buried)

    # -- dead letters ----------------------------------------------------------------------------

    async def dead(self, after: int, limit: int) -> Sequence[DeadLetter]:
        """Dead letters, lowest number first."""
        return await self._committer.run(partial(self._changes.dead, after, limit), durable=False)

    async def dead_letter(self, number: JobNumber) -> tuple[DeadLetter, Body]:
        """One of them, with the body of its call."""
        find = partial(self._changes.dead_letter, number)
        letter, kept = await self._committer.run(find, durable=False)
        return letter, self._body(kept)

    async def replay(self, number: JobNumber, now_s: float) -> None:
        """Let a dead letter wait again."""

        def replayed(one: Stands) -> None:
            self._tally.unearth(number)
            self._stands(one)

        change = partial(self._changes.replay, number, now_s)
        await self._committer.run(change, durable=True, then=replayed)

    async def discard(self, number: JobNumber) -> None:
        """Forget a dead letter."""
        change = partial(self._changes.discard, number)
        forgotten = self._tally.unearth
        await self._committer.run(change, durable=True, then=lambda _: forgotten(number))

    async def expire(self, now_s: float) -> int:
        """Forget the dead letters that are too old, or too many."""
        gone = 0
        for number in self._tally.overdue(now_s):
            with suppress(UnknownJob):  # somebody discarded or replayed it meanwhile
                await self.discard(JobNumber(number))
                gone += 1
        return gone

    async def close(self) -> None:
        """Keep what there is."""
        await self._committer.close()

    # -- in the event loop -----------------------------------------------------------------------

    def _prepare(self, turn: Turn) -> None:
        self._found = self._changes.prepare(turn)

    def _file(self, kept: Kept) -> Path | None:
        return None if kept.file is None else self._bodies / kept.file

    def _stands(self, one: Stands) -> None:
        self._tally.keep(*one)
        self._tell()

    def _tell(self) -> None:
        for told in self._watchers:
            told()

    def _body(self, kept: Kept) -> Held | FileBody:
        path = self._file(kept)
        return Held(kept.content or b"") if path is None else FileBody(path, kept.size_bytes)

    async def _with_body(self, found: Found) -> Job | None:
        row, body = found.row, self._body(found.body)
        try:
            if isinstance(body, FileBody):
                await body.check()
            return rows.job(row, body)
        except (BodyLost, ValueError) as error:
            why = f"it cannot be read: {error}"
            self._log.error("job %d: %s", row["number"], why)
            try:
                await self.bury(JobNumber(row["number"]), why, row["due_at_s"])
            except QueueFailed as failure:
                # It is free at the next start; the others of this claim are to be made now.
                self._log.error("job %d stays claimed: %s", row["number"], failure)
            return None


async def sqlite_queue(folder: Path, limits: QueueLimits, log: Logger) -> SqliteQueue:
    """Open the queue that is kept in this folder; QueueFailed where somebody else has it open."""
    queue = SqliteQueue(folder, limits, log)
    try:
        await queue.open()
    except BaseException:
        await queue.close()
        raise
    return queue


async def _kept(body: Spool) -> Kept:
    assert isinstance(body, FileSpool)  # a queue takes its own spools only
    return await body.keep()
