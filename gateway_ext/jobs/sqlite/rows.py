"""How jobs are kept in SQLite: the tables, and what stands in a row."""

import json
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from gateway_ext.asgi import Header
from gateway_ext.errors import QueueFailed
from gateway_ext.jobs.bodies import Body
from gateway_ext.jobs.model import Call, DeadLetter, Job, JobNumber, Kind, Result
from gateway_ext.jobs.sqlite.spool import Kept
from gateway_ext.model import FunctionId

VERSION = 2
WAITING, CLAIMED, DEAD = 0, 1, 2

# Bodies stand apart, so that a change of a job does not write its body once more. A number is
# never given twice, as people name dead letters by it.
_TABLES = (
    """CREATE TABLE jobs (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    state INTEGER NOT NULL, kind INTEGER NOT NULL, lane TEXT NOT NULL, due_at_s REAL NOT NULL,
    attempts INTEGER NOT NULL DEFAULT 0, deferrals INTEGER NOT NULL DEFAULT 0,
    why TEXT NOT NULL DEFAULT '', died_at_s REAL NOT NULL DEFAULT 0,
    call_id TEXT NOT NULL, namespace TEXT NOT NULL, name TEXT NOT NULL,
    method TEXT NOT NULL, path BLOB NOT NULL, query BLOB NOT NULL, headers TEXT NOT NULL,
    queued_at_s REAL NOT NULL, callback_url TEXT NOT NULL,
    status INTEGER, result_headers TEXT, duration_s REAL, failure TEXT,
    last_status INTEGER NOT NULL DEFAULT 0)""",
    """CREATE TABLE bodies (
    job INTEGER NOT NULL, kind INTEGER NOT NULL, content BLOB, file TEXT,
    size_bytes INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (job, kind))""",
    f"CREATE UNIQUE INDEX once ON jobs (namespace, name, call_id) WHERE state <> {DEAD}",
    f"CREATE INDEX waiting ON jobs (kind, lane, due_at_s, number) WHERE state = {WAITING}",
    f"CREATE INDEX dead ON jobs (number) WHERE state = {DEAD}",
)

# Goes from lane to lane, never over all that waits in one.
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
INSERT INTO jobs (state, kind, lane, due_at_s, call_id, namespace, name, method, path, query,
                  headers, queued_at_s, callback_url)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING"""

# What a job takes: headers can come to more than many bodies do.
SIZE = """(
LENGTH(path) + LENGTH(query) + LENGTH(headers) + IFNULL(LENGTH(result_headers), 0)
+ IFNULL((SELECT SUM(size_bytes) FROM bodies WHERE job = number), 0))"""


def create(db: sqlite3.Connection, folder: Path) -> None:
    """Make the tables in a new file; QueueFailed where they are a later version's."""
    (version,) = db.execute("PRAGMA user_version").fetchone()
    if version == VERSION:
        return
    if version > VERSION:
        raise QueueFailed(f"the job queue is of version {version}, this gateway's is {VERSION}")
    if version == 1:
        db.execute("ALTER TABLE jobs ADD COLUMN last_status INTEGER NOT NULL DEFAULT 0")
        _measure(db, folder)
    else:
        for table in _TABLES:
            db.execute(table)
    db.execute(f"PRAGMA user_version = {VERSION}")


def put_values(call: Call, lane: str) -> tuple[object, ...]:
    """What PUT takes."""
    return (
        *(WAITING, Kind.CALL, lane, call.queued_at_s, call.id),
        *(call.function.namespace, call.function.name, call.method, call.path, call.query),
        *(headers_text(call.headers), call.queued_at_s, call.callback_url),
    )


def add_body(db: sqlite3.Connection, number: int, kind: Kind, body: Kept) -> None:
    """Keep a body with its job."""
    db.execute("INSERT INTO bodies VALUES (?, ?, ?, ?, ?)", (number, kind, *body))


def body_of(db: sqlite3.Connection, number: int, kind: Kind) -> Kept:
    """One body of a job; nothing where it is not kept any more."""
    select = "SELECT content, file, size_bytes FROM bodies WHERE job = ? AND kind = ?"
    row = db.execute(select, (number, kind)).fetchone()
    return Kept(b"", None, 0) if row is None else Kept(*row)


def drop_bodies(
    db: sqlite3.Connection, folder: Path, number: int, kind: Kind | None = None
) -> list[Path]:
    """Forget the bodies of a job, or one of them; their files are returned."""
    which, values = ("", (number,)) if kind is None else (" AND kind = ?", (number, kind))
    where = f"WHERE job = ?{which}"
    files = db.execute(f"SELECT file FROM bodies {where} AND file IS NOT NULL", values).fetchall()
    db.execute(f"DELETE FROM bodies {where}", values)
    return [folder / name for (name,) in files]


def size_of(db: sqlite3.Connection, number: int) -> int:
    """How much a job is, its headers and bodies together."""
    row = db.execute(f"SELECT {SIZE} FROM jobs WHERE number = ?", (number,)).fetchone()
    return int(row[0])


def bodies_bytes_of(db: sqlite3.Connection, number: int) -> int:
    """How much the bodies of a job are."""
    (size_bytes,) = db.execute(
        "SELECT SUM(size_bytes) FROM bodies WHERE job = ?", (number,)
    ).fetchone()
    return size_bytes or 0


def files_named(db: sqlite3.Connection) -> set[str]:
    """The files that some job has."""
    return {name for (name,) in db.execute("SELECT file FROM bodies WHERE file IS NOT NULL")}


def rows(cursor: sqlite3.Cursor) -> Iterator[sqlite3.Row]:
    """What was found, by column."""
    cursor.row_factory = sqlite3.Row
    yield from cursor


def job(row: sqlite3.Row, body: Body) -> Job:
    """A claimed job."""
    number = JobNumber(row["number"])
    return Job(number, _call(row), body, row["attempts"], row["deferrals"], _result(row))


def dead_letter(row: sqlite3.Row, size_bytes: int) -> DeadLetter:
    """A dead letter."""
    return DeadLetter(
        number=JobNumber(row["number"]),
        call=_call(row),
        kind=Kind(row["kind"]),
        attempts=row["attempts"],
        why=row["why"],
        died_at_s=row["died_at_s"],
        result=_result(row),
        size_bytes=size_bytes,
        last_status=row["last_status"],
    )


def headers_text(headers: Sequence[Header]) -> str:
    """Headers as they are kept."""
    return json.dumps([[name.decode("latin-1"), said.decode("latin-1")] for name, said in headers])


def _measure(db: sqlite3.Connection, folder: Path) -> None:
    """What version 1 did not know: how large bodies are."""
    db.execute("ALTER TABLE bodies ADD COLUMN size_bytes INTEGER NOT NULL DEFAULT 0")
    db.execute("UPDATE bodies SET size_bytes = LENGTH(content) WHERE content IS NOT NULL")
    for name in files_named(db):
        with suppress(OSError):  # a job without its body becomes a dead letter when it is claimed
            size_bytes = (folder / name).stat().st_size
            db.execute("UPDATE bodies SET size_bytes = ? WHERE file = ?", (size_bytes, name))


def _call(row: sqlite3.Row) -> Call:
    return Call(
        id=row["call_id"],
        function=FunctionId(row["namespace"], row["name"]),
        method=row["method"],
        path=row["path"],
        query=row["query"],
        headers=_headers(row["headers"]),
        queued_at_s=row["queued_at_s"],
        callback_url=row["callback_url"],
    )


def _result(row: sqlite3.Row) -> Result | None:
    if row["status"] is None:
        return None
    headers = _headers(row["result_headers"])
    return Result(row["status"], headers, row["duration_s"], row["failure"])


def _headers(text: str) -> tuple[Header, ...]:
    return tuple(
        (name.encode("latin-1"), said.encode("latin-1")) for name, said in json.loads(text)
    )
