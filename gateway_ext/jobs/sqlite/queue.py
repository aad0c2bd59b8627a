"""The job queue in one folder: an SQLite database, and files for the large bodies.

A call for which `put` returned True is synced to the disk, in one fsync for all concurrent puts,
and survives a loss of power. Claims and ends are written without fsync: they survive the process,
but after a loss of power a call that just ended is made again. The file of its body therefore stays
until the end is synced too. One process has the queue at a time.
"""

import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from logging import Logger
from pathlib import Path
from shutil import disk_usage
from typing import NamedTuple

import msgspec

from gateway_ext.errors import BodyLost, ClaimLost, JobExists, QueueFailed, UnknownJob
from gateway_ext.jobs.queue import BodySpool, JobQueue, JobTally, QueueLimits
from gateway_ext.jobs.sqlite.body_files import FileBody, FileSpool, KeptBody, sync_folder
from gateway_ext.jobs.sqlite.committer import Committer, Transaction
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
from gateway_ext.model import FunctionId

# No job is put off for longer: what is due later was stored when the machine's clock was wrong.
_LONGEST_WAIT_S = 2 * 3600.0
_VERSION = 3
_NEW_FILE = 0  # SQLite's version of a file without tables
_WAITING, _CLAIMED, _DEAD = 0, 1, 2

# Bodies have a table of their own, so that a change of a job does not write its body again. A
# number is never assigned twice, as people refer to dead letters by it.
_TABLES = (
    """CREATE TABLE jobs (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    state INTEGER NOT NULL, kind INTEGER NOT NULL, lane TEXT NOT NULL, due_at_s REAL NOT NULL,
    attempts INTEGER NOT NULL DEFAULT 0, deferrals INTEGER NOT NULL DEFAULT 0,
    why TEXT NOT NULL DEFAULT '', died_at_s REAL NOT NULL DEFAULT 0,
    call_id TEXT NOT NULL, namespace TEXT NOT NULL, name TEXT NOT NULL,
    queued_at_s REAL NOT NULL, call BLOB NOT NULL, result BLOB,
    last_status INTEGER NOT NULL DEFAULT 0)""",
    """CREATE TABLE bodies (
    job INTEGER NOT NULL, kind INTEGER NOT NULL, content BLOB, file TEXT,
    size_bytes INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (job, kind))""",
    f"CREATE UNIQUE INDEX once ON jobs (namespace, name, call_id) WHERE state <> {_DEAD}",
    f"CREATE INDEX waiting ON jobs (kind, lane, due_at_s, number) WHERE state = {_WAITING}",
    f"CREATE INDEX dead ON jobs (number) WHERE state = {_DEAD}",
)

# Steps from lane to lane without scanning the waiting jobs of one.
_HEADS = f"""
WITH RECURSIVE lanes (lane) AS (
  SELECT MIN(lane) FROM jobs WHERE state = {_WAITING} AND kind = :kind
  UNION ALL
  SELECT (SELECT MIN(lane) FROM jobs
          WHERE state = {_WAITING} AND kind = :kind AND lane > lanes.lane)
  FROM lanes WHERE lanes.lane IS NOT NULL)
SELECT lane, (SELECT MIN(due_at_s) FROM jobs
              WHERE state = {_WAITING} AND kind = :kind AND lane = lanes.lane)
FROM lanes WHERE lane IS NOT NULL"""

_DUE = f"""
SELECT * FROM jobs WHERE state = {_WAITING} AND kind = ? AND lane = ? AND due_at_s <= ?
ORDER BY due_at_s, number LIMIT ?"""

_PUT = """
INSERT INTO jobs (state, kind, lane, due_at_s, call_id, namespace, name, queued_at_s, call)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING"""

encode = msgspec.msgpack.encode
_CALL = msgspec.msgpack.Decoder(AsyncCall)
_RESULT = msgspec.msgpack.Decoder(CallResult)

# The values that the tally counts, with the space a job takes: headers may be larger than the body.
_COUNTED = """
SELECT number, namespace, name, kind, queued_at_s, died_at_s,
       LENGTH(call) + IFNULL(LENGTH(result), 0)
       + IFNULL((SELECT SUM(size_bytes) FROM bodies WHERE job = number), 0) AS size_bytes
FROM jobs"""

# A job that waits with no attempt made yet.
_AFRESH = f"state = {_WAITING}, attempts = 0, deferrals = 0, why = ''"


class ClaimedRow(NamedTuple):
    """The row of a claimed job, and its body."""

    row: sqlite3.Row
    body: KeptBody

    def job(self, body: StoredBody) -> Job:
        """Raise ValueError where the row cannot be read; `body` is how the queue reads the body."""
        row = self.row
        lane = JobLane(JobKind(row["kind"]), row["lane"])
        number, call = JobNumber(row["number"]), _CALL.decode(row["call"])
        return Job(number, call, body, lane, row["attempts"], row["deferrals"], _result(row))


class LiveJob(NamedTuple):
    """The values that the tally counts of a waiting or claimed job."""

    number: JobNumber
    function: FunctionId
    kind: JobKind
    size_bytes: int
    queued_at_s: float


class BuriedJob(NamedTuple):
    """The values that the tally counts of a dead letter."""

    number: JobNumber
    size_bytes: int
    died_at_s: float


class QueueTables:
    """Operations on the tables; large bodies are files in the folder `bodies`."""

    def __init__(self, bodies: Path) -> None:
        self._bodies = bodies

    def prepare(self, now_s: float, turn: Transaction) -> None:
        """Create the tables, and release claims of a dead process.

        A job that is due when none can be is due now.
        """
        _create(turn.db)
        turn.db.execute(f"UPDATE jobs SET state = {_WAITING} WHERE state = {_CLAIMED}")
        turn.db.execute(
            f"UPDATE jobs SET due_at_s = ? WHERE state = {_WAITING} AND due_at_s > ?",
            (now_s, now_s + _LONGEST_WAIT_S),
        )
        files = turn.db.execute("SELECT file FROM bodies WHERE file IS NOT NULL")
        named = {name for (name,) in files}
        turn.obsolete += [path for path in self._bodies.iterdir() if path.name not in named]

    def census(self, turn: Transaction) -> tuple[list[LiveJob], list[BuriedJob]]:
        """Every job of the database, for the tally."""
        alive = _rows(turn.db, f"{_COUNTED} WHERE state <> {_DEAD} ORDER BY queued_at_s, number")
        dead = _rows(turn.db, f"{_COUNTED} WHERE state = {_DEAD} ORDER BY number")
        return (
            [_live_job(row) for row in alive],
            [BuriedJob(row["number"], row["size_bytes"], row["died_at_s"]) for row in dead],
        )

    # -- jobs ------------------------------------------------------------------------------------

    def put(self, call: AsyncCall, body: KeptBody, turn: Transaction) -> LiveJob | None:
        """None where the call is stored already."""
        function = call.function
        values = (
            *(_WAITING, *call_lane(function), call.queued_at_s, call.id),
            *(function.namespace, function.name, call.queued_at_s, encode(call)),
        )
        put = turn.db.execute(_PUT, values)
        if not put.rowcount:
            turn.obsolete += [] if body.file is None else [self._bodies / body.file]
            return None
        number = JobNumber(put.lastrowid or 0)
        _add_body(turn, number, JobKind.CALL, body)
        return _counted(turn, number)

    def heads(self, kind: JobKind, turn: Transaction) -> list[LaneHead]:
        lanes = turn.db.execute(_HEADS, {"kind": kind})
        return [LaneHead(JobLane(kind, key), due_at_s) for key, due_at_s in lanes]

    def claim(self, lanes: Counter[JobLane], now_s: float, turn: Transaction) -> list[ClaimedRow]:
        claimed: list[ClaimedRow] = []
        for lane, count in lanes.items():
            for row in list(_rows(turn.db, _DUE, (*lane, now_s, count))):
                _change(turn, row["number"], f"state = {_CLAIMED}")
                claimed.append(ClaimedRow(row, _body_of(turn, row["number"], lane.kind)))
        return claimed

    def reschedule(
        self, job: JobNumber, due_at_s: float, why: str, counted: str, turn: Transaction
    ) -> None:
        """`counted` is the column that this attempt increments."""
        _claimed(turn, job)
        change = f"state = {_WAITING}, due_at_s = ?, why = ?, {counted} = {counted} + 1"
        _change(turn, job, change, due_at_s, why)

    def store_result(
        self,
        job: JobNumber,
        result: CallResult,
        body: KeptBody,
        lane: JobLane,
        due_at_s: float,
        turn: Transaction,
    ) -> LiveJob:
        _claimed(turn, job)
        change = f"{_AFRESH}, due_at_s = ?, kind = ?, lane = ?, result = ?"
        _change(turn, job, change, due_at_s, *lane, encode(result))
        # A failed call may be replayed, which needs its body.
        if not result.failure:
            self._drop_bodies(turn, job, JobKind.CALL)
        _add_body(turn, job, JobKind.CALLBACK, body)
        return _counted(turn, job)

    def finish(self, job: JobNumber, turn: Transaction) -> None:
        _claimed(turn, job)
        self._remove(turn, job)

    def bury(
        self, job: JobNumber, why: str, at_s: float, status: int, turn: Transaction
    ) -> BuriedJob:
        _claimed(turn, job)
        change = f"state = {_DEAD}, why = ?, died_at_s = ?, last_status = ?"
        _change(turn, job, f"{change}, attempts = attempts + 1", why, at_s, status)
        return BuriedJob(job, _counted(turn, job).size_bytes, at_s)

    # -- dead letters ----------------------------------------------------------------------------

    def dead_letters(self, after: int, limit: int, turn: Transaction) -> list[DeadLetter]:
        select = f"SELECT * FROM jobs WHERE state = {_DEAD} AND number > ? ORDER BY number LIMIT ?"
        return [_dead_letter(turn, row) for row in list(_rows(turn.db, select, (after, limit)))]

    def dead_letter(self, number: JobNumber, turn: Transaction) -> tuple[DeadLetter, KeptBody]:
        letter = _dead_letter(turn, _dead(turn, number))
        return letter, _body_of(turn, number, JobKind.CALL)

    def replay(self, number: JobNumber, now_s: float, turn: Transaction) -> LiveJob:
        """Turn a dead letter into a waiting call, or callback where only that had failed."""
        row = _dead(turn, number)
        function, result = FunctionId(row["namespace"], row["name"]), _result(row)
        kind, key = call_lane(function)
        try:
            if result is not None and not result.failure:
                _change(turn, number, f"{_AFRESH}, due_at_s = ?", now_s)
            else:
                change = f"{_AFRESH}, due_at_s = ?, kind = ?, lane = ?, result = NULL"
                _change(turn, number, change, now_s, kind, key)
                self._drop_bodies(turn, number, JobKind.CALLBACK)
        except sqlite3.IntegrityError as error:
            raise JobExists(function, row["call_id"]) from error
        return _counted(turn, number)

    def discard(self, number: JobNumber, turn: Transaction) -> None:
        _dead(turn, number)
        self._remove(turn, number)

    def _remove(self, turn: Transaction, number: JobNumber) -> None:
        for kind in JobKind:
            self._drop_bodies(turn, number, kind)
        turn.db.execute("DELETE FROM jobs WHERE number = ?", (number,))

    def _drop_bodies(self, turn: Transaction, number: JobNumber, kind: JobKind) -> None:
        file = _body_of(turn, number, kind).file
        if file is not None:
            turn.obsolete.append(self._bodies / file)
        turn.db.execute("DELETE FROM bodies WHERE job = ? AND kind = ?", (number, kind))


def _create(db: sqlite3.Connection) -> None:
    """Create the tables in a new file; QueueFailed where they are of another version."""
    (version,) = db.execute("PRAGMA user_version").fetchone()
    if version == _VERSION:
        return
    if version != _NEW_FILE:
        detail = f"the job queue is of version {version}, this gateway's is {_VERSION}"
        raise QueueFailed(f"{detail}: use the release that wrote it, or another `state_dir`")
    for table in _TABLES:
        db.execute(table)
    db.execute(f"PRAGMA user_version = {_VERSION}")


def _rows(
    db: sqlite3.Connection, select: str, values: Sequence[object] = ()
) -> Iterator[sqlite3.Row]:
    cursor = db.execute(select, values)
    cursor.row_factory = sqlite3.Row
    yield from cursor


def _change(turn: Transaction, number: int, change: str, *values: object) -> None:
    turn.db.execute(f"UPDATE jobs SET {change} WHERE number = ?", (*values, number))


def _add_body(turn: Transaction, number: int, kind: JobKind, body: KeptBody) -> None:
    turn.db.execute("INSERT INTO bodies VALUES (?, ?, ?, ?, ?)", (number, kind, *body))


def _body_of(turn: Transaction, number: int, kind: JobKind) -> KeptBody:
    """Empty where the body was removed."""
    select = "SELECT content, file, size_bytes FROM bodies WHERE job = ? AND kind = ?"
    row = turn.db.execute(select, (number, kind)).fetchone()
    return KeptBody(b"", None, 0) if row is None else KeptBody(*row)


def _counted(turn: Transaction, number: JobNumber) -> LiveJob:
    return _live_job(next(_rows(turn.db, f"{_COUNTED} WHERE number = ?", (number,))))


def _live_job(row: sqlite3.Row) -> LiveJob:
    function = FunctionId(row["namespace"], row["name"])
    kind, size_bytes = JobKind(row["kind"]), row["size_bytes"]
    return LiveJob(row["number"], function, kind, size_bytes, row["queued_at_s"])


def _claimed(turn: Transaction, number: JobNumber) -> None:
    if _row_in(turn, number, _CLAIMED) is None:
        raise ClaimLost(number)


def _dead(turn: Transaction, number: JobNumber) -> sqlite3.Row:
    row = _row_in(turn, number, _DEAD)
    if row is None:
        raise UnknownJob(number)
    return row


def _row_in(turn: Transaction, number: JobNumber, state: int) -> sqlite3.Row | None:
    select = "SELECT * FROM jobs WHERE number = ? AND state = ?"
    return next(_rows(turn.db, select, (number, state)), None)


def _dead_letter(turn: Transaction, row: sqlite3.Row) -> DeadLetter:
    bodies = "SELECT IFNULL(SUM(size_bytes), 0) FROM bodies WHERE job = ?"
    (size_bytes,) = turn.db.execute(bodies, (row["number"],)).fetchone()
    return DeadLetter(
        number=JobNumber(row["number"]),
        call=_CALL.decode(row["call"]),
        kind=JobKind(row["kind"]),
        attempts=row["attempts"],
        why=row["why"],
        died_at_s=row["died_at_s"],
        result=_result(row),
        size_bytes=size_bytes,
        last_status=row["last_status"],
    )


def _result(row: sqlite3.Row) -> CallResult | None:
    return None if row["result"] is None else _RESULT.decode(row["result"])


class SqliteQueue(JobQueue):
    """See `JobQueue`."""

    away = False  # a local disk is always there

    def __init__(self, folder: Path, limits: QueueLimits, log: Logger) -> None:
        self._bodies = folder / "bodies"
        self._limits = limits
        self._log = log
        self.tally = JobTally(limits)
        self._booted_at_s = time.time() - _since_boot_s()  # by the clock as it was at the start
        self._tables = QueueTables(self._bodies)
        self._committer = Committer(
            folder / "jobs.sqlite", lambda turn: self._tables.prepare(self.now_s(), turn)
        )
        self._watchers: list[Callable[[], None]] = []

    async def open(self) -> None:
        """Create missing files, and release claims of a dead process.

        QueueFailed where another process has the queue of this folder open.
        """
        try:
            self._bodies.mkdir(parents=True, exist_ok=True)
            # Requests, with the credentials in them, must not be readable for functions.
            self._bodies.parent.chmod(0o700)
            sync_folder(self._bodies.parent)
            self.tally.limit_to(disk_usage(self._bodies).total)
        except OSError as error:
            raise QueueFailed(f"the job queue has no folder: {error}") from error
        await self._committer.open()
        alive, buried = await self._committer.run(self._tables.census)
        for job in alive:
            self.tally.add(*job)
        for letter in buried:
            self.tally.add_dead(*letter)
        calls, dead = self.tally.calls.total(), self.tally.dead
        self._log.info("job queue: %d calls wait, %d dead", calls, dead)

    def now_s(self) -> float:
        """The time of this process: no correction of the clock puts a job off, or hurries it."""
        return self._booted_at_s + _since_boot_s()

    def watch(self, notify: Callable[[], None]) -> None:
        self._watchers.append(notify)

    def spool(self) -> FileSpool:
        return FileSpool(self._bodies, self._limits.inline_bytes, self._limits.body_bytes)

    # -- jobs ------------------------------------------------------------------------------------

    async def put(self, call: AsyncCall, body: BodySpool) -> bool:
        def stored(job: LiveJob | None) -> None:
            if job is not None:
                self._add(job)

        with self.tally.reserve(call.function, call.head_bytes + body.size_bytes):
            kept = await _kept(body)
            job = await self._committer.run(
                partial(self._tables.put, call, kept),
                durable=True,
                then=stored,
                file=self._file(kept),
            )
        return job is not None

    async def heads(self, kind: JobKind) -> Sequence[LaneHead]:
        return await self._committer.run(partial(self._tables.heads, kind))

    async def claim(self, lanes: Sequence[JobLane], now_s: float) -> Sequence[Job]:
        claimed = await self._committer.run(partial(self._tables.claim, Counter(lanes), now_s))
        jobs = [await self._with_body(row) for row in claimed]
        return [job for job in jobs if job is not None]

    async def reschedule(self, job: JobNumber, due_at_s: float, why: str, *, counts: bool) -> None:
        counted = "attempts" if counts else "deferrals"
        change = partial(self._tables.reschedule, job, due_at_s, why, counted)
        await self._committer.run(change, then=lambda _: self._notify())

    async def store_result(
        self, job: JobNumber, result: CallResult, body: BodySpool, lane: JobLane, due_at_s: float
    ) -> None:
        kept = await _kept(body)
        change = partial(self._tables.store_result, job, result, kept, lane, due_at_s)
        # The body stays where this fails, as the caller repeats it.
        await self._committer.run(change, then=self._add)

    async def finish(self, job: JobNumber) -> None:
        def ended(_: None) -> None:
            self.tally.remove(job)
            self._notify()

        await self._committer.run(partial(self._tables.finish, job), then=ended)

    async def bury(self, job: JobNumber, why: str, at_s: float, status: int = 0) -> None:
        def buried(letter: BuriedJob) -> None:
            self.tally.add_dead(*letter)
            self._notify()

        change = partial(self._tables.bury, job, why, at_s, status)
        await self._committer.run(change, then=buried)

    # -- dead letters ----------------------------------------------------------------------------

    async def dead_letters(self, after: int, limit: int) -> Sequence[DeadLetter]:
        return await self._committer.run(partial(self._tables.dead_letters, after, limit))

    async def dead_letter(self, number: JobNumber) -> tuple[DeadLetter, StoredBody]:
        letter, kept = await self._committer.run(partial(self._tables.dead_letter, number))
        return letter, self._body(kept)

    async def replay(self, number: JobNumber, now_s: float) -> None:
        def replayed(job: LiveJob) -> None:
            self.tally.remove_dead(number)
            self._add(job)

        change = partial(self._tables.replay, number, now_s)
        await self._committer.run(change, durable=True, then=replayed)

    async def discard(self, number: JobNumber) -> None:
        change = partial(self._tables.discard, number)
        uncount = self.tally.remove_dead
        await self._committer.run(change, durable=True, then=lambda _: uncount(number))

    async def close(self) -> None:
        await self._committer.close()

    # -- in the event loop -----------------------------------------------------------------------

    def _file(self, kept: KeptBody) -> Path | None:
        return None if kept.file is None else self._bodies / kept.file

    def _add(self, job: LiveJob) -> None:
        self.tally.add(*job)
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


def _since_boot_s() -> float:
    """Unlike the monotonic clock it goes on while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
