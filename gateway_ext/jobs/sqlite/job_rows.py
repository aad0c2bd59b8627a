"""The tables of SQLite's queue, and the translation of rows into values."""

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import msgspec

from gateway_ext.errors import QueueFailed
from gateway_ext.jobs.sqlite.body_files import KeptBody
from gateway_ext.jobs.values import (
    AsyncCall,
    CallResult,
    DeadLetter,
    Job,
    JobKind,
    JobLane,
    JobNumber,
    StoredBody,
)

VERSION = 3
_NEW_FILE = 0  # SQLite's version of a file without tables
WAITING, CLAIMED, DEAD = 0, 1, 2

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
    f"CREATE UNIQUE INDEX once ON jobs (namespace, name, call_id) WHERE state <> {DEAD}",
    f"CREATE INDEX waiting ON jobs (kind, lane, due_at_s, number) WHERE state = {WAITING}",
    f"CREATE INDEX dead ON jobs (number) WHERE state = {DEAD}",
)

# Steps from lane to lane without scanning the waiting jobs of one.
HEADS = f"""
WITH RECURSIVE lanes (lane) AS (
  SELECT MIN(lane) FROM jobs WHERE state = {WAITING} AND kind = :kind
  UNION ALL
  SELECT (SELECT MIN(lane) FROM jobs
          WHERE state = {WAITING} AND kind = :kind AND lane > lanes.lane)
  FROM lanes WHERE lanes.lane IS NOT NULL)
SELECT lane, (SELECT MIN(due_at_s) FROM jobs
              WHERE state = {WAITING} AND kind = :kind AND lane = lanes.lane)
FROM lanes WHERE lane IS NOT NULL"""

DUE = f"""
SELECT * FROM jobs WHERE state = {WAITING} AND kind = ? AND lane = ? AND due_at_s <= ?
ORDER BY due_at_s, number LIMIT ?"""

PUT = """
INSERT INTO jobs (state, kind, lane, due_at_s, call_id, namespace, name, queued_at_s, call)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING"""

encode = msgspec.msgpack.encode
_CALL = msgspec.msgpack.Decoder(AsyncCall)
_RESULT = msgspec.msgpack.Decoder(CallResult)

# The space a job takes: headers may be larger than the body.
SIZE = """(
LENGTH(call) + IFNULL(LENGTH(result), 0)
+ IFNULL((SELECT SUM(size_bytes) FROM bodies WHERE job = number), 0))"""


def create(db: sqlite3.Connection) -> None:
    """Create the tables in a new file; QueueFailed where they are of another version."""
    (version,) = db.execute("PRAGMA user_version").fetchone()
    if version == VERSION:
        return
    if version != _NEW_FILE:
        detail = f"the job queue is of version {version}, this gateway's is {VERSION}"
        raise QueueFailed(f"{detail}: use the release that wrote it, or another `state_dir`")
    for table in _TABLES:
        db.execute(table)
    db.execute(f"PRAGMA user_version = {VERSION}")


def put_values(call: AsyncCall, lane: str) -> tuple[object, ...]:
    return (
        *(WAITING, JobKind.CALL, lane, call.queued_at_s, call.id),
        *(call.function.namespace, call.function.name, call.queued_at_s, encode(call)),
    )


def add_body(db: sqlite3.Connection, number: int, kind: JobKind, body: KeptBody) -> None:
    db.execute("INSERT INTO bodies VALUES (?, ?, ?, ?, ?)", (number, kind, *body))


def body_of(db: sqlite3.Connection, number: int, kind: JobKind) -> KeptBody:
    """Empty where the body was removed."""
    select = "SELECT content, file, size_bytes FROM bodies WHERE job = ? AND kind = ?"
    row = db.execute(select, (number, kind)).fetchone()
    return KeptBody(b"", None, 0) if row is None else KeptBody(*row)


def drop_bodies(
    db: sqlite3.Connection, folder: Path, number: int, kind: JobKind | None = None
) -> list[Path]:
    """Remove the bodies of a job, or one of them; return their files."""
    which, values = ("", (number,)) if kind is None else (" AND kind = ?", (number, kind))
    where = f"WHERE job = ?{which}"
    files = db.execute(f"SELECT file FROM bodies {where} AND file IS NOT NULL", values).fetchall()
    db.execute(f"DELETE FROM bodies {where}", values)
    return [folder / name for (name,) in files]


def size_of(db: sqlite3.Connection, number: int) -> int:
    row = db.execute(f"SELECT {SIZE} FROM jobs WHERE number = ?", (number,)).fetchone()
    return int(row[0])


def bodies_bytes_of(db: sqlite3.Connection, number: int) -> int:
    (size_bytes,) = db.execute(
        "SELECT SUM(size_bytes) FROM bodies WHERE job = ?", (number,)
    ).fetchone()
    return size_bytes or 0


def files_named(db: sqlite3.Connection) -> set[str]:
    return {name for (name,) in db.execute("SELECT file FROM bodies WHERE file IS NOT NULL")}


def rows(cursor: sqlite3.Cursor) -> Iterator[sqlite3.Row]:
    cursor.row_factory = sqlite3.Row
    yield from cursor


def job(row: sqlite3.Row, body: StoredBody) -> Job:
    number = JobNumber(row["number"])
    lane = JobLane(JobKind(row["kind"]), row["lane"])
    call = _CALL.decode(row["call"])
    return Job(number, call, body, lane, row["attempts"], row["deferrals"], result(row))


def dead_letter(row: sqlite3.Row, size_bytes: int) -> DeadLetter:
    return DeadLetter(
        number=JobNumber(row["number"]),
        call=_CALL.decode(row["call"]),
        kind=JobKind(row["kind"]),
        attempts=row["attempts"],
        why=row["why"],
        died_at_s=row["died_at_s"],
        result=result(row),
        size_bytes=size_bytes,
        last_status=row["last_status"],
    )


def result(row: sqlite3.Row) -> CallResult | None:
    return None if row["result"] is None else _RESULT.decode(row["result"])
