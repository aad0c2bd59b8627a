"""What is done to the queue's database: each in one turn of the committer, in its thread."""

import sqlite3
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from gateway_ext.errors import ClaimLost, JobExists, UnknownJob
from gateway_ext.jobs.model import (
    Call,
    DeadLetter,
    Head,
    JobNumber,
    Kind,
    Lane,
    Result,
    call_lane,
)
from gateway_ext.jobs.sqlite import rows
from gateway_ext.jobs.sqlite.committer import Turn
from gateway_ext.jobs.sqlite.spool import Kept
from gateway_ext.model import FunctionId


class Found(NamedTuple):
    """A claimed row, and where its body is."""

    row: sqlite3.Row
    body: Kept


class Stands(NamedTuple):
    """What the tally is to know of a job."""

    number: JobNumber
    function: FunctionId
    kind: Kind
    size_bytes: int
    queued_at_s: float


class Buried(NamedTuple):
    """What it is to know of a dead one."""

    number: JobNumber
    size_bytes: int
    died_at_s: float


class Census(NamedTuple):
    """All that is there."""

    alive: Sequence[Stands]
    dead: Sequence[Buried]


class Changes:
    """Everything that is asked of the tables; large bodies are files in `bodies`."""

    def __init__(self, bodies: Path) -> None:
        self._bodies = bodies

    def prepare(self, turn: Turn) -> Census:
        """Make tables, free what a dead process had claimed, and say what there is."""
        rows.create(turn.db, self._bodies)
        turn.db.execute(f"UPDATE jobs SET state = {rows.WAITING} WHERE state = {rows.CLAIMED}")
        named = rows.files_named(turn.db)
        turn.obsolete += [path for path in self._bodies.iterdir() if path.name not in named]
        return Census(*_census(turn.db))

    # -- a job's way -----------------------------------------------------------------------------

    def put(self, call: Call, body: Kept, turn: Turn) -> Stands | None:
        """Keep a call; None where it is kept already."""
        put = turn.db.execute(rows.PUT, rows.put_values(call, call_lane(call.function).key))
        if not put.rowcount:
            turn.obsolete += [] if body.file is None else [self._bodies / body.file]
            return None
        number = JobNumber(put.lastrowid or 0)
        rows.add_body(turn.db, number, Kind.CALL, body)
        size_bytes = rows.size_of(turn.db, number)
        return Stands(number, call.function, Kind.CALL, size_bytes, call.queued_at_s)

    def heads(self, kind: Kind, turn: Turn) -> list[Head]:
        """The lanes in which something waits."""
        found = turn.db.execute(rows.HEADS, {"kind": kind})
        return [Head(Lane(kind, key), due_at_s) for key, due_at_s in found]

    def claim(self, lanes: Counter[Lane], now_s: float, turn: Turn) -> list[Found]:
        """Take so many due jobs of each of these lanes."""
        found: list[Found] = []
        for lane, count in lanes.items():
            due = turn.db.execute(rows.DUE, (lane.kind, lane.key, now_s, count))
            for row in list(rows.rows(due)):
                number = row["number"]
                change = f"UPDATE jobs SET state = {rows.CLAIMED} WHERE number = ?"
                turn.db.execute(change, (number,))
                found.append(Found(row, rows.body_of(turn.db, number, lane.kind)))
        return found

    def again(self, job: JobNumber, due_at_s: float, why: str, counted: str, turn: Turn) -> None:
        """Let it wait; `counted` is the column that this try counts for."""
        _claimed(turn, job)
        turn.db.execute(
            f"UPDATE jobs SET state = {rows.WAITING}, due_at_s = ?, why = ?,"
            f" {counted} = {counted} + 1 WHERE number = ?",
            (due_at_s, why, job),
        )

    def answered(
        self, job: JobNumber, result: Result, body: Kept, lane: Lane, due_at_s: float, turn: Turn
    ) -> Stands:
        """It is a callback now."""
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
        return _stands(turn.db, row, Kind.CALLBACK)

    def done(self, job: JobNumber, turn: Turn) -> None:
        """It is made."""
        _claimed(turn, job)
        self._forget(turn, job)

    def bury(self, job: JobNumber, why: str, at_s: float, status: int, turn: Turn) -> Buried:
        """It is dead."""
        _claimed(turn, job)
        turn.db.execute(
            f"UPDATE jobs SET state = {rows.DEAD}, why = ?, died_at_s = ?,"
            " last_status = ?, attempts = attempts + 1 WHERE number = ?",
            (why, at_s, status, job),
        )
        return Buried(job, rows.size_of(turn.db, job), at_s)

    # -- dead letters ----------------------------------------------------------------------------

    def dead(self, after: int, limit: int, turn: Turn) -> list[DeadLetter]:
        """A page of them."""
        select = f"SELECT * FROM jobs WHERE state = {rows.DEAD} AND number > ? ORDER BY number"
        found = list(rows.rows(turn.db.execute(f"{select} LIMIT ?", (after, limit))))
        return [
            rows.dead_letter(row, rows.bodies_bytes_of(turn.db, row["number"])) for row in found
        ]

    def dead_letter(self, number: JobNumber, turn: Turn) -> tuple[DeadLetter, Kept]:
        """One of them, and the body of its call."""
        letter = rows.dead_letter(_dead(turn, number), rows.bodies_bytes_of(turn.db, number))
        return letter, rows.body_of(turn.db, number, Kind.CALL)

    def replay(self, number: JobNumber, now_s: float, turn: Turn) -> Stands:
        """It waits again, for its call, or for its callback where that alone failed."""
        row = _dead(turn, number)
        change = f"state = {rows.WAITING}, attempts = 0, deferrals = 0, why = '', due_at_s = :now"
        only_callback = row["kind"] == Kind.CALLBACK and not row["failure"]
        if not only_callback:
            change += f", kind = {Kind.CALL:d}, lane = :lane, status = NULL"
            turn.obsolete += rows.drop_bodies(turn.db, self._bodies, number, Kind.CALLBACK)
        function = FunctionId(row["namespace"], row["name"])
        values = {"now": now_s, "lane": call_lane(function).key, "number": number}
        try:
            turn.db.execute(f"UPDATE jobs SET {change} WHERE number = :number", values)
        except sqlite3.IntegrityError as error:
            raise JobExists(function, row["call_id"]) from error
        return _stands(turn.db, row, Kind.CALLBACK if only_callback else Kind.CALL)

    def discard(self, number: JobNumber, turn: Turn) -> None:
        """Forget a dead letter."""
        _dead(turn, number)
        self._forget(turn, number)

    def _forget(self, turn: Turn, number: JobNumber) -> None:
        turn.obsolete += rows.drop_bodies(turn.db, self._bodies, number)
        turn.db.execute("DELETE FROM jobs WHERE number = ?", (number,))


def _census(db: sqlite3.Connection) -> tuple[list[Stands], list[Buried]]:
    alive = db.execute(
        f"SELECT number, namespace, name, kind, {rows.SIZE}, queued_at_s FROM jobs"
        f" WHERE state <> {rows.DEAD} ORDER BY queued_at_s, number"
    )
    dead = db.execute(
        f"SELECT number, {rows.SIZE}, died_at_s FROM jobs WHERE state = {rows.DEAD} ORDER BY number"
    )
    return (
        [
            Stands(JobNumber(number), FunctionId(namespace, name), Kind(kind), bytes_, at_s)
            for number, namespace, name, kind, bytes_, at_s in alive
        ],
        [Buried(JobNumber(number), bytes_, at_s) for number, bytes_, at_s in dead],
    )


def _stands(db: sqlite3.Connection, row: sqlite3.Row, kind: Kind) -> Stands:
    number = JobNumber(row["number"])
    function = FunctionId(row["namespace"], row["name"])
    return Stands(number, function, kind, rows.size_of(db, number), row["queued_at_s"])


def _claimed(turn: Turn, number: JobNumber) -> sqlite3.Row:
    row = _one(turn, number, rows.CLAIMED)
    if row is None:
        raise ClaimLost(number)
    return row


def _dead(turn: Turn, number: JobNumber) -> sqlite3.Row:
    row = _one(turn, number, rows.DEAD)
    if row is None:
        raise UnknownJob(number)
    return row


def _one(turn: Turn, number: JobNumber, state: int) -> sqlite3.Row | None:
    found = turn.db.execute("SELECT * FROM jobs WHERE number = ? AND state = ?", (number, state))
    return next(rows.rows(found), None)
