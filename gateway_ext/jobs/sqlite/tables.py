"""Reads and changes of the queue's tables, each within a transaction of the committer."""

import sqlite3
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from gateway_ext.errors import ClaimLost, JobExists, UnknownJob
from gateway_ext.jobs.sqlite import job_rows
from gateway_ext.jobs.sqlite.body_files import KeptBody
from gateway_ext.jobs.sqlite.committer import Transaction
from gateway_ext.jobs.values import (
    AsyncCall,
    CallResult,
    DeadLetter,
    JobKind,
    JobLane,
    JobNumber,
    LaneHead,
    call_lane,
)
from gateway_ext.model import FunctionId

# No job is put off for longer: what is due later was stored when the machine's clock was wrong.
_LONGEST_WAIT_S = 2 * 3600.0


class ClaimedRow(NamedTuple):
    """The row of a claimed job, and its body."""

    row: sqlite3.Row
    body: KeptBody


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


class QueueCensus(NamedTuple):
    """Every job of the database, for the tally."""

    alive: Sequence[LiveJob]
    dead: Sequence[BuriedJob]


class QueueTables:
    """Operations on the tables; large bodies are files in the folder `bodies`."""

    def __init__(self, bodies: Path) -> None:
        self._bodies = bodies

    def prepare(self, now_s: float, transaction: Transaction) -> QueueCensus:
        """Create the tables, release claims of a dead process, and list all jobs.

        A job that is due when none can be is due now.
        """
        job_rows.create(transaction.db)
        transaction.db.execute(
            f"UPDATE jobs SET state = {job_rows.WAITING} WHERE state = {job_rows.CLAIMED}"
        )
        transaction.db.execute(
            f"UPDATE jobs SET due_at_s = ? WHERE state = {job_rows.WAITING} AND due_at_s > ?",
            (now_s, now_s + _LONGEST_WAIT_S),
        )
        named = job_rows.files_named(transaction.db)
        transaction.obsolete += [path for path in self._bodies.iterdir() if path.name not in named]
        return QueueCensus(*_census(transaction.db))

    # -- jobs ------------------------------------------------------------------------------------

    def put(self, call: AsyncCall, body: KeptBody, transaction: Transaction) -> LiveJob | None:
        """None where the call is stored already."""
        put = transaction.db.execute(
            job_rows.PUT, job_rows.put_values(call, call_lane(call.function).key)
        )
        if not put.rowcount:
            transaction.obsolete += [] if body.file is None else [self._bodies / body.file]
            return None
        number = JobNumber(put.lastrowid or 0)
        job_rows.add_body(transaction.db, number, JobKind.CALL, body)
        size_bytes = job_rows.size_of(transaction.db, number)
        return LiveJob(number, call.function, JobKind.CALL, size_bytes, call.queued_at_s)

    def heads(self, kind: JobKind, transaction: Transaction) -> list[LaneHead]:
        lanes = transaction.db.execute(job_rows.HEADS, {"kind": kind})
        return [LaneHead(JobLane(kind, key), due_at_s) for key, due_at_s in lanes]

    def claim(
        self, lanes: Counter[JobLane], now_s: float, transaction: Transaction
    ) -> list[ClaimedRow]:
        claimed: list[ClaimedRow] = []
        for lane, count in lanes.items():
            due = transaction.db.execute(job_rows.DUE, (lane.kind, lane.key, now_s, count))
            for row in list(job_rows.rows(due)):
                number = row["number"]
                change = f"UPDATE jobs SET state = {job_rows.CLAIMED} WHERE number = ?"
                transaction.db.execute(change, (number,))
                claimed.append(ClaimedRow(row, job_rows.body_of(transaction.db, number, lane.kind)))
        return claimed

    def reschedule(
        self, job: JobNumber, due_at_s: float, why: str, counted: str, transaction: Transaction
    ) -> None:
        """`counted` is the column that this attempt increments."""
        _claimed(transaction, job)
        transaction.db.execute(
            f"UPDATE jobs SET state = {job_rows.WAITING}, due_at_s = ?, why = ?,"
            f" {counted} = {counted} + 1 WHERE number = ?",
            (due_at_s, why, job),
        )

    def store_result(
        self,
        job: JobNumber,
        result: CallResult,
        body: KeptBody,
        lane: JobLane,
        due_at_s: float,
        transaction: Transaction,
    ) -> LiveJob:
        row = _claimed(transaction, job)
        transaction.db.execute(
            f"UPDATE jobs SET state = {job_rows.WAITING}, kind = ?, lane = ?, due_at_s = ?,"
            " why = '', attempts = 0, deferrals = 0, result = ? WHERE number = ?",
            (*lane, due_at_s, job_rows.encode(result), job),
        )
        # A failed call may be replayed, which needs its body.
        if not result.failure:
            transaction.obsolete += job_rows.drop_bodies(
                transaction.db, self._bodies, job, JobKind.CALL
            )
        job_rows.add_body(transaction.db, job, JobKind.CALLBACK, body)
        return _live_job(transaction.db, row, JobKind.CALLBACK)

    def finish(self, job: JobNumber, transaction: Transaction) -> None:
        _claimed(transaction, job)
        self._remove(transaction, job)

    def bury(
        self, job: JobNumber, why: str, at_s: float, status: int, transaction: Transaction
    ) -> BuriedJob:
        _claimed(transaction, job)
        transaction.db.execute(
            f"UPDATE jobs SET state = {job_rows.DEAD}, why = ?, died_at_s = ?,"
            " last_status = ?, attempts = attempts + 1 WHERE number = ?",
            (why, at_s, status, job),
        )
        return BuriedJob(job, job_rows.size_of(transaction.db, job), at_s)

    # -- dead letters ----------------------------------------------------------------------------

    def dead_letters(self, after: int, limit: int, transaction: Transaction) -> list[DeadLetter]:
        select = f"SELECT * FROM jobs WHERE state = {job_rows.DEAD} AND number > ? ORDER BY number"
        letters = list(job_rows.rows(transaction.db.execute(f"{select} LIMIT ?", (after, limit))))
        return [
            job_rows.dead_letter(row, job_rows.bodies_bytes_of(transaction.db, row["number"]))
            for row in letters
        ]

    def dead_letter(
        self, number: JobNumber, transaction: Transaction
    ) -> tuple[DeadLetter, KeptBody]:
        letter = job_rows.dead_letter(
            _dead(transaction, number), job_rows.bodies_bytes_of(transaction.db, number)
        )
        return letter, job_rows.body_of(transaction.db, number, JobKind.CALL)

    def replay(self, number: JobNumber, now_s: float, transaction: Transaction) -> LiveJob:
        """Turn a dead letter into a waiting call, or callback where only that had failed."""
        row = _dead(transaction, number)
        change = (
            f"state = {job_rows.WAITING}, attempts = 0, deferrals = 0, why = '', due_at_s = :now"
        )
        result = job_rows.result(row)
        only_callback = result is not None and not result.failure
        if not only_callback:
            change += f", kind = {JobKind.CALL:d}, lane = :lane, result = NULL"
            transaction.obsolete += job_rows.drop_bodies(
                transaction.db, self._bodies, number, JobKind.CALLBACK
            )
        function = FunctionId(row["namespace"], row["name"])
        values = {"now": now_s, "lane": call_lane(function).key, "number": number}
        try:
            transaction.db.execute(f"UPDATE jobs SET {change} WHERE number = :number", values)
        except sqlite3.IntegrityError as error:
            raise JobExists(function, row["call_id"]) from error
        return _live_job(transaction.db, row, JobKind.CALLBACK if only_callback else JobKind.CALL)

    def discard(self, number: JobNumber, transaction: Transaction) -> None:
        _dead(transaction, number)
        self._remove(transaction, number)

    def _remove(self, transaction: Transaction, number: JobNumber) -> None:
        transaction.obsolete += job_rows.drop_bodies(transaction.db, self._bodies, number)
        transaction.db.execute("DELETE FROM jobs WHERE number = ?", (number,))


def _census(db: sqlite3.Connection) -> tuple[list[LiveJob], list[BuriedJob]]:
    alive = db.execute(
        f"SELECT number, namespace, name, kind, {job_rows.SIZE}, queued_at_s FROM jobs"
        f" WHERE state <> {job_rows.DEAD} ORDER BY queued_at_s, number"
    )
    dead = db.execute(
        f"SELECT number, {job_rows.SIZE}, died_at_s FROM jobs"
        f" WHERE state = {job_rows.DEAD} ORDER BY number"
    )
    return (
        [
            LiveJob(JobNumber(number), FunctionId(namespace, name), JobKind(kind), bytes_, at_s)
            for number, namespace, name, kind, bytes_, at_s in alive
        ],
        [BuriedJob(JobNumber(number), bytes_, at_s) for number, bytes_, at_s in dead],
    )


def _live_job(db: sqlite3.Connection, row: sqlite3.Row, kind: JobKind) -> LiveJob:
    number = JobNumber(row["number"])
    function = FunctionId(row["namespace"], row["name"])
    return LiveJob(number, function, kind, job_rows.size_of(db, number), row["queued_at_s"])


def _claimed(transaction: Transaction, number: JobNumber) -> sqlite3.Row:
    row = _one(transaction, number, job_rows.CLAIMED)
    if row is None:
        raise ClaimLost(number)
    return row


def _dead(transaction: Transaction, number: JobNumber) -> sqlite3.Row:
    row = _one(transaction, number, job_rows.DEAD)
    if row is None:
        raise UnknownJob(number)
    return row


def _one(transaction: Transaction, number: JobNumber, state: int) -> sqlite3.Row | None:
    cursor = transaction.db.execute(
        "SELECT * FROM jobs WHERE number = ? AND state = ?", (number, state)
    )
    return next(job_rows.rows(cursor), None)
