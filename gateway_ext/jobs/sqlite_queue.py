"""The job queue in one folder: an SQLite database, and files for the large bodies.

What `put` returned True for is on the disk (fsync, shared by all that are put at the same time) and
survives a loss of power. Claims and ends are written without fsync: they survive the process, and
where power is lost a call that was just made is made again. One process has the queue at a time.
"""

import asyncio
import sqlite3
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from logging import Logger
from pathlib import Path
from typing import NamedTuple

from gateway_ext.errors import Busy, JobExists, QueueFailed, UnknownJob
from gateway_ext.jobs import sqlite_rows as rows
from gateway_ext.jobs.committer import Committer, Turn
from gateway_ext.jobs.model import (
    Call,
    Counts,
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
from gateway_ext.jobs.spool import FileSpool, Kept, sync_folder
from gateway_ext.model import FunctionId

_RETRY_AFTER_S = 5.0


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """How much is kept, and from which size on a body has a file."""

    body_bytes: int = 64 << 20
    inline_bytes: int = 1 << 20
    waiting_per_function: int = 100_000


class _Found(NamedTuple):
    """A claimed row, and where its body is."""

    row: sqlite3.Row
    body: Kept


class SqliteQueue(JobQueue):
    """See `JobQueue`; opened by `sqlite_queue`."""

    def __init__(self, folder: Path, limits: QueueLimits, log: Logger) -> None:
        self._bodies = folder / "bodies"
        self._limits = limits
        self._log = log
        self._committer = Committer(folder / "jobs.sqlite", self._prepare)
        self._calls: Counter[FunctionId] = Counter()
        self._watchers: list[Callable[[], None]] = []

    async def open(self) -> None:
        """Make what is missing, and let everything wait that a dead process had claimed."""
        try:
            self._bodies.mkdir(parents=True, exist_ok=True)
            # What callers send, their credentials too, is not for functions to read.
            self._bodies.parent.chmod(0o700)
            sync_folder(self._bodies.parent)
        except OSError as error:
            raise QueueFailed(f"the job queue has no folder: {error}") from error
        await self._committer.open()
        counts = await self.counts()
        self._calls.update(counts.calls)
        self._log.info("job queue: %d calls wait, %d dead", sum(counts.calls.values()), counts.dead)

    def watch(self, told: Callable[[], None]) -> None:
        """Call this whenever something waits that did not before."""
        self._watchers.append(told)

    def spool(self) -> FileSpool:
        """Begin a body."""
        return FileSpool(self._bodies, self._limits.inline_bytes, self._limits.body_bytes)

    # -- a job's way -----------------------------------------------------------------------------

    async def put(self, call: Call, body: Spool) -> bool:
        """Keep a call for good."""
        if self._calls[call.function] >= self._limits.waiting_per_function:
            raise Busy(call.function, _RETRY_AFTER_S)
        kept = await _kept(body)
        return await self._committer.run(
            partial(self._put, call, kept),
            durable=True,
            then=lambda new: self._queued(call.function) if new else None,
            file=self._file(kept),
        )

    async def heads(self, kind: Kind) -> Sequence[Head]:
        """The lanes in which something waits."""

        def find(turn: Turn) -> list[Head]:
            found = turn.db.execute(rows.HEADS, {"kind": kind})
            return [Head(Lane(kind, key), due_at_s) for key, due_at_s in found]

        return await self._committer.run(find, durable=False)

    async def claim(self, lanes: Sequence[Lane], now_s: float) -> Sequence[Job]:
        """Take the first due jobs of these lanes."""
        found = await self._committer.run(partial(_claim, Counter(lanes), now_s), durable=False)
        jobs = [await self._with_body(row, body) for row, body in found]
        return [job for job in jobs if job is not None]

    async def again(self, job: JobNumber, due_at_s: float, why: str, *, counts: bool) -> None:
        """Let a claimed job wait until then."""
        more = "attempts = attempts + 1" if counts else "deferrals = deferrals + 1"
        change = f"state = {rows.WAITING}, due_at_s = ?, why = ?, {more}"
        await self._change(job, change, (due_at_s, why))

    async def answered(
        self, job: JobNumber, result: Result, body: Spool, lane: Lane, due_at_s: float
    ) -> None:
        """A claimed call has its result."""
        kept = await _kept(body)
        write = partial(self._answered, job, result, kept, lane, due_at_s)
        # Where it fails the caller says it again: the body stays.
        await self._committer.run(write, durable=False, then=self._called)

    async def done(self, job: JobNumber) -> None:
        """Forget a claimed job."""
        await self._committer.run(partial(self._done, job), durable=False, then=self._called)

    async def bury(self, job: JobNumber, why: str, at_s: float) -> None:
        """Make a dead letter of a claimed job."""
        change = f"state = {rows.DEAD}, why = ?, died_at_s = ?, attempts = attempts + 1"
        await self._change(job, change, (why, at_s))

    # -- dead letters ----------------------------------------------------------------------------

    async def dead(self, after: int, limit: int) -> Sequence[DeadLetter]:
        """Dead letters, lowest number first."""

        def find(turn: Turn) -> list[DeadLetter]:
            select = f"SELECT * FROM jobs WHERE state = {rows.DEAD} AND number > ? ORDER BY number"
            found = turn.db.execute(f"{select} LIMIT ?", (after, limit))
            return [rows.dead_letter(row) for row in rows.rows(found)]

        return await self._committer.run(find, durable=False)

    async def dead_letter(self, number: JobNumber) -> tuple[DeadLetter, bytes]:
        """One of them, with the body of its call."""

        def find(turn: Turn) -> tuple[DeadLetter, Kept]:
            letter = rows.dead_letter(_dead(turn, number))
            return letter, rows.body_of(turn.db, number, Kind.CALL)

        letter, kept = await self._committer.run(find, durable=False)
        try:
            return letter, await self._read(kept)
        except OSError as error:
            raise QueueFailed(f"its body cannot be read: {error}") from error

    async def replay(self, number: JobNumber, now_s: float) -> None:
        """Let a dead letter wait again."""
        await self._committer.run(
            partial(self._replay, number, now_s), durable=True, then=self._replayed
        )

    async def discard(self, number: JobNumber) -> None:
        """Forget a dead letter."""

        def forget(turn: Turn) -> None:
            _dead(turn, number)
            self._forget(turn, number)

        await self._committer.run(forget, durable=True)

    # -- all of it -------------------------------------------------------------------------------

    def waiting(self) -> Mapping[FunctionId, int]:
        """How many calls of each function are kept, not yet made."""
        return self._calls

    async def counts(self) -> Counts:
        """How many there are of each."""
        return await self._committer.run(_counts, durable=False)

    async def close(self) -> None:
        """Keep what there is."""
        await self._committer.close()

    # -- in the event loop -----------------------------------------------------------------------

    def _file(self, kept: Kept) -> Path | None:
        return None if kept.file is None else self._bodies / kept.file

    def _queued(self, function: FunctionId) -> None:
        self._calls[function] += 1
        self._tell()

    def _called(self, function: FunctionId | None) -> None:
        """A call of this function is kept no longer, or is a callback now."""
        if function is not None:
            self._calls[function] -= 1
            if self._calls[function] <= 0:
                del self._calls[function]
        self._tell()

    def _replayed(self, function: FunctionId | None) -> None:
        if function is not None:
            self._calls[function] += 1
        self._tell()

    def _tell(self) -> None:
        for told in self._watchers:
            told()

    async def _with_body(self, row: sqlite3.Row, body: Kept) -> Job | None:
        try:
            return rows.job(row, await self._read(body))
        except (OSError, ValueError) as error:
            why = f"it cannot be read: {error}"
            self._log.error("job %d: %s", row["number"], why)
            await self.bury(JobNumber(row["number"]), why, row["due_at_s"])
            return None

    async def _read(self, body: Kept) -> bytes:
        path = self._file(body)
        return (body.content or b"") if path is None else await asyncio.to_thread(path.read_bytes)

    async def _change(self, job: JobNumber, change: str, values: tuple[object, ...]) -> None:
        def write(turn: Turn) -> FunctionId | None:
            row = _claimed(turn, job)
            turn.db.execute(f"UPDATE jobs SET {change} WHERE number = ?", (*values, job))
            return _function(row) if _is_dead(turn, job) else None

        await self._committer.run(write, durable=False, then=self._called)

    # -- in the committer's thread ---------------------------------------------------------------

    def _prepare(self, turn: Turn) -> None:
        rows.create(turn.db)
        turn.db.execute(f"UPDATE jobs SET state = {rows.WAITING} WHERE state = {rows.CLAIMED}")
        named = rows.files_named(turn.db)
        turn.obsolete += [path for path in self._bodies.iterdir() if path.name not in named]

    def _put(self, call: Call, body: Kept, turn: Turn) -> bool:
        put = turn.db.execute(rows.PUT, rows.put_values(call, call_lane(call.function).key))
        if not put.rowcount:
            turn.obsolete += [path for path in (self._file(body),) if path is not None]
            return False
        rows.add_body(turn.db, put.lastrowid or 0, Kind.CALL, body)
        return True

    def _answered(
        self, job: JobNumber, result: Result, body: Kept, lane: Lane, due_at_s: float, turn: Turn
    ) -> FunctionId | None:
        row = _claimed(turn, job)
        turn.db.execute(
            f"UPDATE jobs SET state = {rows.WAITING}, kind = ?, lane = ?, due_at_s = ?, why = '',"
            " attempts = 0, deferrals = 0, status = ?, result_headers = ?, duration_s = ?,"
            " failure = ? WHERE number = ?",
            (
                *(*lane, due_at_s, result.status, rows.headers_text(result.headers)),
                *(result.duration_s, result.failure, job),
            ),
        )
        # A failed call may be replayed, and needs its body then.
        if not result.failure:
            turn.obsolete += rows.drop_bodies(turn.db, self._bodies, job, Kind.CALL)
        rows.add_body(turn.db, job, Kind.CALLBACK, body)
        return _function(row)

    def _done(self, job: JobNumber, turn: Turn) -> FunctionId | None:
        row = _claimed(turn, job)
        self._forget(turn, job)
        return _function(row)

    def _replay(self, number: JobNumber, now_s: float, turn: Turn) -> FunctionId | None:
        row = _dead(turn, number)
        function = FunctionId(row["namespace"], row["name"])
        change = f"state = {rows.WAITING}, attempts = 0, deferrals = 0, why = '', due_at_s = :now"
        only_callback = row["kind"] == Kind.CALLBACK and not row["failure"]
        if not only_callback:
            change += f", kind = {Kind.CALL:d}, lane = :lane, status = NULL"
            turn.obsolete += rows.drop_bodies(turn.db, self._bodies, number, Kind.CALLBACK)
        values = {"now": now_s, "lane": call_lane(function).key, "number": number}
        try:
            turn.db.execute(f"UPDATE jobs SET {change} WHERE number = :number", values)
        except sqlite3.IntegrityError as error:
            raise JobExists(function, row["call_id"]) from error
        return None if only_callback else function

    def _forget(self, turn: Turn, number: JobNumber) -> None:
        turn.obsolete += rows.drop_bodies(turn.db, self._bodies, number)
        turn.db.execute("DELETE FROM jobs WHERE number = ?", (number,))


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


# -- in the committer's thread -------------------------------------------------------------------


def _claim(lanes: Mapping[Lane, int], now_s: float, turn: Turn) -> list[_Found]:
    found: list[_Found] = []
    for lane, count in lanes.items():
        due = turn.db.execute(rows.DUE, (lane.kind, lane.key, now_s, count))
        for row in list(rows.rows(due)):
            number = row["number"]
            change = f"UPDATE jobs SET state = {rows.CLAIMED} WHERE number = ?"
            turn.db.execute(change, (number,))
            found.append(_Found(row, rows.body_of(turn.db, number, lane.kind)))
    return found


def _claimed(turn: Turn, number: JobNumber) -> sqlite3.Row:
    row = _one(turn, number, rows.CLAIMED)
    if row is None:
        raise QueueFailed(f"job {number} is not claimed")
    return row


def _dead(turn: Turn, number: JobNumber) -> sqlite3.Row:
    row = _one(turn, number, rows.DEAD)
    if row is None:
        raise UnknownJob(number)
    return row


def _one(turn: Turn, number: JobNumber, state: int) -> sqlite3.Row | None:
    found = turn.db.execute("SELECT * FROM jobs WHERE number = ? AND state = ?", (number, state))
    return next(rows.rows(found), None)


def _is_dead(turn: Turn, number: JobNumber) -> bool:
    return _one(turn, number, rows.DEAD) is not None


def _function(row: sqlite3.Row) -> FunctionId | None:
    """Whose call it is; None for a callback."""
    return FunctionId(row["namespace"], row["name"]) if row["kind"] == Kind.CALL else None


def _counts(turn: Turn) -> Counts:
    alive = f"FROM jobs WHERE state <> {rows.DEAD}"
    calls = turn.db.execute(
        f"SELECT namespace, name, COUNT(*) {alive} AND kind = {Kind.CALL:d} GROUP BY 1, 2"
    )
    by_function = {FunctionId(namespace, name): count for namespace, name, count in calls}
    (callbacks,) = turn.db.execute(
        f"SELECT COUNT(*) {alive} AND kind = {Kind.CALLBACK:d}"
    ).fetchone()
    (dead,) = turn.db.execute(f"SELECT COUNT(*) FROM jobs WHERE state = {rows.DEAD}").fetchone()
    return Counts(by_function, callbacks, dead)
