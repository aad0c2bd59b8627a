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

import msgspec

from gateway_ext.errors import BodyLost, ClaimLost, JobExists, QueueFailed, UnknownJob
from gateway_ext.jobs.body_buffer import BodyBuffer
from gateway_ext.jobs.queue import JobQueue, JobTally, QueueLimits
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
SELECT number, state, namespace, name, kind, queued_at_s, died_at_s,
       LENGTH(call) + IFNULL(LENGTH(result), 0)
       + IFNULL((SELECT SUM(size_bytes) FROM bodies WHERE job = number), 0) AS size_bytes
FROM jobs"""

# A job that waits with no attempt made yet.
_AFRESH = f"state = {_WAITING}, attempts = 0, deferrals = 0, why = ''"


class SqliteQueue(JobQueue):
    """See `JobQueue`; what takes a `turn` runs in the committer's thread."""

    away = False  # a local disk is always there

    def __init__(self, folder: Path, limits: QueueLimits, log: Logger) -> None:
        self._bodies = folder / "bodies"
        self._limits = limits
        self._log = log
        self.tally = JobTally(limits)
        self._booted_at_s = time.time() - _since_boot_s()  # by the clock as it was at the start
        self._committer = Committer(folder / "jobs.sqlite", self._prepare)
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
        for job in await self._committer.run(_all_counted):
            self._count(job)
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

    async def put(self, call: AsyncCall, body: BodyBuffer) -> bool:
        with self.tally.reserve(call.function, call.head_bytes + body.size_bytes):
            kept = await _kept(body)
            store, file = partial(self._store, call, kept), self._file(kept)
            job = await self._committer.run(store, durable=True, then=self._added, file=file)
        return job is not None

    async def heads(self, kind: JobKind) -> Sequence[LaneHead]:
        def heads(turn: Transaction) -> list[LaneHead]:
            lanes = turn.db.execute(_HEADS, {"kind": kind})
            return [LaneHead(JobLane(kind, key), due_at_s) for key, due_at_s in lanes]

        return await self._committer.run(heads)

    async def claim(self, lanes: Sequence[JobLane], now_s: float) -> Sequence[Job]:
        def claim(turn: Transaction) -> list[tuple[sqlite3.Row, KeptBody]]:
            claimed = []
            for lane, count in Counter(lanes).items():
                for row in list(_rows(turn.db, _DUE, (*lane, now_s, count))):
                    _change(turn, row["number"], f"state = {_CLAIMED}")
                    claimed.append((row, _body_of(turn, row["number"], lane.kind)))
            return claimed

        jobs = [await self._read(*claimed) for claimed in await self._committer.run(claim)]
        return [job for job in jobs if job is not None]

    async def reschedule(self, job: JobNumber, due_at_s: float, why: str, *, counts: bool) -> None:
        counted = "attempts" if counts else "deferrals"
        change = f"state = {_WAITING}, due_at_s = ?, why = ?, {counted} = {counted} + 1"
        await self._end(job, lambda turn: _change(turn, job, change, due_at_s, why))

    async def store_result(
        self, job: JobNumber, result: CallResult, body: BodyBuffer, lane: JobLane, due_at_s: float
    ) -> None:
        kept = await _kept(body)  # it stays where this fails, as the caller repeats it

        def store(turn: Transaction) -> None:
            change = f"{_AFRESH}, due_at_s = ?, kind = ?, lane = ?, result = ?"
            _change(turn, job, change, due_at_s, *lane, encode(result))
            # A failed call may be replayed, which needs its body.
            if not result.failure:
                self._drop_bodies(turn, job, JobKind.CALL)
            _add_body(turn, job, JobKind.CALLBACK, kept)

        await self._end(job, store)

    async def finish(self, job: JobNumber) -> None:
        await self._end(job, lambda turn: self._delete(turn, job))

    async def bury(self, job: JobNumber, why: str, at_s: float, status: int = 0) -> None:
        change = f"state = {_DEAD}, why = ?, died_at_s = ?, last_status = ?"
        change = f"{change}, attempts = attempts + 1"
        await self._end(job, lambda turn: _change(turn, job, change, why, at_s, status))

    # -- dead letters ----------------------------------------------------------------------------

    async def dead_letters(self, after: int, limit: int) -> Sequence[DeadLetter]:
        select = f"SELECT * FROM jobs WHERE state = {_DEAD} AND number > ? ORDER BY number LIMIT ?"

        def letters(turn: Transaction) -> list[DeadLetter]:
            return [_dead_letter(turn, row) for row in list(_rows(turn.db, select, (after, limit)))]

        return await self._committer.run(letters)

    async def dead_letter(self, number: JobNumber) -> tuple[DeadLetter, StoredBody]:
        def letter(turn: Transaction) -> tuple[DeadLetter, KeptBody]:
            return _dead_letter(turn, _dead(turn, number)), _body_of(turn, number, JobKind.CALL)

        found, kept = await self._committer.run(letter)
        return found, self._body(kept)

    async def replay(self, number: JobNumber, now_s: float) -> None:
        def replay(turn: Transaction) -> None:
            row = _dead(turn, number)
            function, result = FunctionId(row["namespace"], row["name"]), _result(row)
            try:
                if result is not None and not result.failure:
                    _change(turn, number, f"{_AFRESH}, due_at_s = ?", now_s)
                else:
                    change = f"{_AFRESH}, due_at_s = ?, kind = ?, lane = ?, result = NULL"
                    _change(turn, number, change, now_s, *call_lane(function))
                    self._drop_bodies(turn, number, JobKind.CALLBACK)
            except sqlite3.IntegrityError as error:
                raise JobExists(function, row["call_id"]) from error

        await self._alter(number, replay, durable=True)

    async def discard(self, number: JobNumber) -> None:
        def discard(turn: Transaction) -> None:
            _dead(turn, number)
            self._delete(turn, number)

        await self._alter(number, discard, durable=True)

    async def close(self) -> None:
        await self._committer.close()

    # -- in the event loop -----------------------------------------------------------------------

    async def _end(self, job: JobNumber, change: Callable[[Transaction], None]) -> None:
        """End a claim with this change; ClaimLost where there is none."""

        def end(turn: Transaction) -> None:
            if _row_in(turn, job, _CLAIMED) is None:
                raise ClaimLost(job)
            change(turn)

        await self._alter(job, end)

    async def _alter(
        self, number: JobNumber, change: Callable[[Transaction], None], *, durable: bool = False
    ) -> None:
        """Change one job, and count it as it is then."""

        def altered(turn: Transaction) -> sqlite3.Row | None:
            change(turn)
            return _counted(turn, number)

        def counted(job: sqlite3.Row | None) -> None:
            if job is None:
                self.tally.remove(number)
                self.tally.remove_dead(number)
            else:
                self._count(job)
            self._notify()

        await self._committer.run(altered, durable=durable, then=counted)

    def _added(self, job: sqlite3.Row | None) -> None:
        if job is not None:
            self._count(job)
            self._notify()

    def _count(self, job: sqlite3.Row) -> None:
        number, size_bytes = job["number"], job["size_bytes"]
        if job["state"] == _DEAD:
            self.tally.add_dead(number, size_bytes, job["died_at_s"])
        else:
            self.tally.remove_dead(number)
            function = FunctionId(job["namespace"], job["name"])
            self.tally.add(number, function, JobKind(job["kind"]), size_bytes, job["queued_at_s"])

    def _notify(self) -> None:
        for notify in self._watchers:
            notify()

    def _file(self, kept: KeptBody) -> Path | None:
        return None if kept.file is None else self._bodies / kept.file

    def _body(self, kept: KeptBody) -> MemoryBody | FileBody:
        path = self._file(kept)
        return MemoryBody(kept.content or b"") if path is None else FileBody(path, kept.size_bytes)

    async def _read(self, row: sqlite3.Row, kept: KeptBody) -> Job | None:
        """The claimed job; None where it cannot be read, which makes it a dead letter."""
        body, number = self._body(kept), JobNumber(row["number"])
        try:
            if isinstance(body, FileBody):
                await body.check()
            call, lane = _CALL.decode(row["call"]), JobLane(JobKind(row["kind"]), row["lane"])
            return Job(number, call, body, lane, row["attempts"], row["deferrals"], _result(row))
        except (BodyLost, ValueError) as error:
            why = f"it cannot be read: {error}"
            self._log.error("job %d: %s", number, why)
            try:
                await self.bury(number, why, row["due_at_s"])
            except QueueFailed as failure:
                # The next start releases it; the other jobs of this claim continue.
                self._log.error("job %d stays claimed: %s", number, failure)
            return None

    # -- in the committer's thread ---------------------------------------------------------------

    def _prepare(self, turn: Transaction) -> None:
        """Create the tables, and release claims of a dead process.

        A job that is due when none can be is due now.
        """
        now_s = self.now_s()
        _create(turn.db)
        turn.db.execute(f"UPDATE jobs SET state = {_WAITING} WHERE state = {_CLAIMED}")
        turn.db.execute(
            f"UPDATE jobs SET due_at_s = ? WHERE state = {_WAITING} AND due_at_s > ?",
            (now_s, now_s + _LONGEST_WAIT_S),
        )
        files = turn.db.execute("SELECT file FROM bodies WHERE file IS NOT NULL")
        named = {name for (name,) in files}
        turn.obsolete += [path for path in self._bodies.iterdir() if path.name not in named]

    def _store(self, call: AsyncCall, body: KeptBody, turn: Transaction) -> sqlite3.Row | None:
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

    def _delete(self, turn: Transaction, number: JobNumber) -> None:
        for kind in JobKind:
            self._drop_bodies(turn, number, kind)
        turn.db.execute("DELETE FROM jobs WHERE number = ?", (number,))

    def _drop_bodies(self, turn: Transaction, number: JobNumber, kind: JobKind) -> None:
        file = self._file(_body_of(turn, number, kind))
        if file is not None:
            turn.obsolete.append(file)
        turn.db.execute("DELETE FROM bodies WHERE job = ? AND kind = ?", (number, kind))


async def _kept(body: BodyBuffer) -> KeptBody:
    assert isinstance(body, FileSpool)  # a queue accepts its own spools only
    return await body.keep()


def _since_boot_s() -> float:
    """Unlike the monotonic clock it goes on while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


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


def _all_counted(turn: Transaction) -> list[sqlite3.Row]:
    return list(_rows(turn.db, f"{_COUNTED} ORDER BY queued_at_s, number"))


def _counted(turn: Transaction, number: JobNumber) -> sqlite3.Row | None:
    """None for a job that was removed."""
    return next(_rows(turn.db, f"{_COUNTED} WHERE number = ?", (number,)), None)


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
    try:
        call, result = _CALL.decode(row["call"]), _result(row)
    except ValueError:  # it may be dead because of that, and must not hide the other letters
        function, queued_at_s = FunctionId(row["namespace"], row["name"]), row["queued_at_s"]
        call, result = AsyncCall(row["call_id"], function, "", b"", b"", [], queued_at_s), None
    return DeadLetter(
        number=JobNumber(row["number"]),
        call=call,
        kind=JobKind(row["kind"]),
        attempts=row["attempts"],
        why=row["why"],
        died_at_s=row["died_at_s"],
        result=result,
        size_bytes=size_bytes,
        last_status=row["last_status"],
    )


def _result(row: sqlite3.Row) -> CallResult | None:
    return None if row["result"] is None else _RESULT.decode(row["result"])
