"""The job queue in one folder: an SQLite database, and files for the large bodies.

A call for which `put` returned True is synced to the disk, in one fsync for all concurrent puts,
and survives a loss of power. Claims and ends are written without fsync: they survive the process,
but after a loss of power a call that just ended is made again. The file of its body therefore stays
until the end is synced too. One process has the queue at a time.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from logging import Logger
from pathlib import Path
from shutil import disk_usage

from gateway_ext.errors import BodyLost, QueueFailed
from gateway_ext.jobs.queue import BodySpool, JobQueue, JobTally, QueueLimits
from gateway_ext.jobs.sqlite.body_files import FileBody, FileSpool, KeptBody, sync_folder
from gateway_ext.jobs.sqlite.committer import Committer, Transaction
from gateway_ext.jobs.sqlite.tables import BuriedJob, ClaimedRow, LiveJob, QueueTables
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
)


class SqliteQueue(JobQueue):
    """See `JobQueue`."""

    away = False  # a local disk is always there

    def __init__(self, folder: Path, limits: QueueLimits, log: Logger) -> None:
        self._bodies = folder / "bodies"
        self._limits = limits
        self._log = log
        self._tally = JobTally(limits)
        self._clock = SteadyClock()
        self._tables = QueueTables(self._bodies)
        self._committer = Committer(folder / "jobs.sqlite", self._prepare)
        self._watchers: list[Callable[[], None]] = []

    @property
    def tally(self) -> JobTally:
        return self._tally

    async def open(self) -> None:
        """Create missing files, and release claims of a dead process.

        QueueFailed where another process has the queue of this folder open.
        """
        try:
            self._bodies.mkdir(parents=True, exist_ok=True)
            # Requests, with the credentials in them, must not be readable for functions.
            self._bodies.parent.chmod(0o700)
            sync_folder(self._bodies.parent)
            self._tally.limit_to(disk_usage(self._bodies).total)
        except OSError as error:
            raise QueueFailed(f"the job queue has no folder: {error}") from error
        await self._committer.open()
        alive, buried = await self._committer.run(self._tables.census, durable=False)
        for job in alive:
            self._tally.add(*job)
        for letter in buried:
            self._tally.add_dead(*letter)
        calls, dead = self._tally.calls.total(), self._tally.dead
        self._log.info("job queue: %d calls wait, %d dead", calls, dead)

    def now_s(self) -> float:
        """The time of this process, whatever the machine's clock is set to meanwhile."""
        return self._clock.now_s()

    def watch(self, notify: Callable[[], None]) -> None:
        self._watchers.append(notify)

    def spool(self) -> FileSpool:
        return FileSpool(self._bodies, self._limits.inline_bytes, self._limits.body_bytes)

    # -- jobs ------------------------------------------------------------------------------------

    async def put(self, call: AsyncCall, body: BodySpool) -> bool:
        def stored(job: LiveJob | None) -> None:
            if job is not None:
                self._add(job)

        with self._tally.reserve(call.function, call.head_bytes + body.size_bytes):
            kept = await _kept(body)
            job = await self._committer.run(
                partial(self._tables.put, call, kept),
                durable=True,
                then=stored,
                file=self._file(kept),
            )
        return job is not None

    async def heads(self, kind: JobKind) -> Sequence[LaneHead]:
        return await self._committer.run(partial(self._tables.heads, kind), durable=False)

    async def claim(self, lanes: Sequence[JobLane], now_s: float) -> Sequence[Job]:
        take = partial(self._tables.claim, Counter(lanes), now_s)
        claimed = await self._committer.run(take, durable=False)
        jobs = [await self._with_body(row) for row in claimed]
        return [job for job in jobs if job is not None]

    async def reschedule(self, job: JobNumber, due_at_s: float, why: str, *, counts: bool) -> None:
        counted = "attempts" if counts else "deferrals"
        change = partial(self._tables.reschedule, job, due_at_s, why, counted)
        await self._committer.run(change, durable=False, then=lambda _: self._notify())

    async def store_result(
        self, job: JobNumber, result: CallResult, body: BodySpool, lane: JobLane, due_at_s: float
    ) -> None:
        kept = await _kept(body)
        change = partial(self._tables.store_result, job, result, kept, lane, due_at_s)
        # The body stays where this fails, as the caller repeats it.
        await self._committer.run(change, durable=False, then=self._add)

    async def finish(self, job: JobNumber) -> None:
        def ended(_: None) -> None:
            self._tally.remove(job)
            self._notify()

        await self._committer.run(partial(self._tables.finish, job), durable=False, then=ended)

    async def bury(self, job: JobNumber, why: str, at_s: float, status: int = 0) -> None:
        def buried(letter: BuriedJob) -> None:
            self._tally.add_dead(*letter)
            self._notify()

        change = partial(self._tables.bury, job, why, at_s, status)
        await self._committer.run(change, durable=False, then=buried)

    # -- dead letters ----------------------------------------------------------------------------

    async def dead_letters(self, after: int, limit: int) -> Sequence[DeadLetter]:
        return await self._committer.run(
            partial(self._tables.dead_letters, after, limit), durable=False
        )

    async def dead_letter(self, number: JobNumber) -> tuple[DeadLetter, StoredBody]:
        find = partial(self._tables.dead_letter, number)
        letter, kept = await self._committer.run(find, durable=False)
        return letter, self._body(kept)

    async def replay(self, number: JobNumber, now_s: float) -> None:
        def replayed(job: LiveJob) -> None:
            self._tally.remove_dead(number)
            self._add(job)

        change = partial(self._tables.replay, number, now_s)
        await self._committer.run(change, durable=True, then=replayed)

    async def discard(self, number: JobNumber) -> None:
        change = partial(self._tables.discard, number)
        uncount = self._tally.remove_dead
        await self._committer.run(change, durable=True, then=lambda _: uncount(number))

    async def close(self) -> None:
        await self._committer.close()

    # -- in the event loop -----------------------------------------------------------------------

    def _prepare(self, turn: Transaction) -> None:
        self._tables.prepare(self.now_s(), turn)

    def _file(self, kept: KeptBody) -> Path | None:
        return None if kept.file is None else self._bodies / kept.file

    def _add(self, job: LiveJob) -> None:
        self._tally.add(*job)
        self._notify()

    def _notify(self) -> None:
        for notify in self._watchers:
            notify()

    def _body(self, kept: KeptBody) -> MemoryBody | FileBody:
        path = self._file(kept)
        return MemoryBody(kept.content or b"") if path is None else FileBody(path, kept.size_bytes)

    async def _with_body(self, claimed: ClaimedRow) -> Job | None:
        row, body = claimed.row, self._body(claimed.body)
        try:
            if isinstance(body, FileBody):
                await body.check()
            return claimed.job(body)
        except (BodyLost, ValueError) as error:
            why = f"it cannot be read: {error}"
            self._log.error("job %d: %s", row["number"], why)
            try:
                await self.bury(JobNumber(row["number"]), why, row["due_at_s"])
            except QueueFailed as failure:
                # The next start releases it; the other jobs of this claim continue.
                self._log.error("job %d stays claimed: %s", row["number"], failure)
            return None


async def _kept(body: BodySpool) -> KeptBody:
    assert isinstance(body, FileSpool)  # a queue accepts its own spools only
    return await body.keep()


class SteadyClock:
    """The wall clock as it was at first, going on at the pace of a clock that nobody sets.

    What waits until a moment is neither put off nor hurried by a correction of the time.
    """

    def __init__(self) -> None:
        self._boot_s = time.time() - _since_boot_s()

    def now_s(self) -> float:
        """Seconds since 1970."""
        return self._boot_s + _since_boot_s()


def _since_boot_s() -> float:
    """Unlike the monotonic clock it goes on while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
