"""One SQLite connection in a thread of its own; concurrent work shares a transaction."""

import asyncio
import os
import sqlite3
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from gateway_ext.errors import GatewayError, QueueDiskFull, QueueFailed, is_full_disk
from gateway_ext.jobs.sqlite.body_files import sync_folder

_Value = TypeVar("_Value")

# The most work in one transaction: enough to share an fsync, and the first does not wait long.
_MOST_TOGETHER = 256
# Obsolete files are removed at this number, or after an idle moment.
_MOST_OWED = 64


@dataclass(slots=True)
class Transaction:
    """The connection for one piece of work; `obsolete` files are removed once it is synced."""

    db: sqlite3.Connection
    obsolete: list[Path] = field(default_factory=list)


@dataclass(slots=True)
class _Work(Generic[_Value]):
    do: Callable[[Transaction], _Value]
    durable: bool
    then: Callable[[_Value], None] | None
    # A file to remove where this work fails, as no row can name it then.
    file: Path | None
    future: "asyncio.Future[_Value]"
    value: _Value | None = None
    error: GatewayError | None = None
    obsolete: Sequence[Path] = ()

    def fail(self, error: BaseException) -> None:
        if isinstance(error, GatewayError):
            self.error = error
        else:
            full = is_full_disk(error)
            failed = QueueFailed(f"the job queue failed: {error}")
            self.error = QueueDiskFull(error) if full else failed
            self.error.__cause__ = error
        self.obsolete = () if self.file is None else (self.file,)

    def resolve(self) -> None:
        """Complete the future; `then` is called even where the caller was cancelled."""
        if self.error is not None:
            if not self.future.done():
                self.future.set_exception(self.error)
            return
        value: _Value = self.value  # type: ignore[assignment] # the work succeeded, so this is its value
        if self.then is not None:
            self.then(value)
        if not self.future.done():
            self.future.set_result(value)


class Committer:
    """Runs work in transactions. Durable work is synced to the disk once `run` returns.

    Other work survives the process, but not a loss of power. Obsolete files are removed after
    `idle_s` without work.
    """

    def __init__(
        self, path: Path, prepare: Callable[[Transaction], None], *, idle_s: float = 0.2
    ) -> None:
        self._path = path
        self._prepare = prepare
        self._idle_s = idle_s
        self._works: SimpleQueue[_Work[object] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="jobs", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._full = True  # the current value of `synchronous`
        # Obsolete files; after a loss of power a job may need one again, until the commit that made
        # it obsolete is synced.
        self._owed: list[Path] = []

    async def open(self) -> None:
        """Raise QueueFailed where the database cannot be opened or prepared."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        await self.run(self._prepare, durable=True)

    async def run(
        self,
        do: Callable[[Transaction], _Value],
        *,
        durable: bool = False,
        then: Callable[[_Value], None] | None = None,
        file: Path | None = None,
    ) -> _Value:
        """Run work in a transaction with other work of the moment, even if the caller is cancelled.

        `then` is called in the event loop with the value, after the commit.
        """
        if self._closed or self._loop is None:
            raise QueueFailed("the job queue is closed")
        future: asyncio.Future[_Value] = self._loop.create_future()
        self._works.put(_Work(do, durable, then, file, future))  # type: ignore[arg-type] # of any
        return await future

    async def close(self) -> None:
        """Finish the work accepted so far, and stop."""
        if self._closed or self._loop is None:
            return
        self._closed = True
        self._works.put(None)
        await asyncio.to_thread(self._thread.join)

    # -- in the thread ---------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            db = _opened(self._path)
        except sqlite3.Error as error:
            self._refuse_all(_unusable(self._path, error))
            return
        works: list[_Work[object]] = []
        try:
            while works := self._together(self._next()):
                self._commit(db, works)
                self._publish(works)
                if len(self._owed) >= _MOST_OWED:
                    self._remove_owed()
            self._remove_owed()
        except BaseException as error:
            # A defect: callers must not wait for ever because of it.
            self._refuse(works, error)
            self._refuse_all(error)
            raise
        finally:
            db.close()

    def _next(self) -> _Work[object] | None:
        """Wait for work; None once the committer is closed."""
        if self._owed:
            with suppress(Empty):
                return self._works.get(timeout=self._idle_s)
            self._remove_owed()
        return self._works.get()

    def _together(self, first: _Work[object] | None) -> list[_Work[object]]:
        """This work and what else is queued; nothing once the committer is closed."""
        if first is None:
            return []
        works = [first]
        with suppress(Empty):
            while len(works) < _MOST_TOGETHER:
                work = self._works.get(block=False)
                if work is None:
                    self._works.put(None)
                    break
                works.append(work)
        return works

    def _commit(self, db: sqlite3.Connection, works: Sequence[_Work[object]]) -> None:
        try:
            full = any(work.durable for work in works)
            if full != self._full:
                db.execute(f"PRAGMA synchronous={'FULL' if full else 'NORMAL'}")
                self._full = full
            db.execute("BEGIN IMMEDIATE")
            for work in works:
                _do(db, work)
            db.execute("COMMIT")
        except sqlite3.Error as error:
            if db.in_transaction:
                db.execute("ROLLBACK")
            for work in works:
                work.fail(error)
        for work in works:
            if work.error is None:
                self._owed += work.obsolete
            else:
                _remove(work.obsolete)

    def _remove_owed(self) -> None:
        """Remove obsolete files, after a sync of the commits that were made without fsync."""
        if not self._owed:
            return
        with suppress(OSError):  # they are tried again, and the next start removes the rest
            _sync(self._path.with_name(f"{self._path.name}-wal"))
            _remove(self._owed)
            self._owed.clear()

    def _publish(self, works: Sequence[_Work[object]]) -> None:
        assert self._loop is not None
        # Nobody waits in a loop that is closed.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(_resolve, works)

    def _refuse_all(self, error: BaseException) -> None:
        while works := self._together(self._works.get()):
            self._refuse(works, error)

    def _refuse(self, works: Sequence[_Work[object]], error: BaseException) -> None:
        for work in works:
            work.fail(error)
        self._publish(works)


def _sync(wal: Path) -> None:
    """Sync every commit so far: each is in this file, or was synced before."""
    descriptor = os.open(wal, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    sync_folder(wal.parent)


def _remove(files: Sequence[Path]) -> None:
    for path in files:
        with suppress(OSError):  # the next start removes it
            path.unlink(missing_ok=True)


def _opened(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, timeout=0.0, isolation_level=None)
    try:
        db.execute("PRAGMA locking_mode=EXCLUSIVE")  # or two gateways would make each call twice
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=FULL")
    except sqlite3.Error:
        db.close()
        raise
    return db


def _unusable(path: Path, error: sqlite3.Error) -> QueueFailed:
    if error.sqlite_errorcode == sqlite3.SQLITE_BUSY:
        return QueueFailed(f"another gateway has the job queue {path}")
    return QueueFailed(f"the job queue {path} cannot be opened: {error}")


def _do(db: sqlite3.Connection, work: _Work[object]) -> None:
    """Run one piece of work; a failure undoes this work alone."""
    transaction = Transaction(db)
    db.execute("SAVEPOINT work")
    try:
        work.value = work.do(transaction)
    except (sqlite3.IntegrityError, GatewayError, OSError, ValueError) as error:
        db.execute("ROLLBACK TO work")
        work.fail(error)
    else:
        work.obsolete = transaction.obsolete
    db.execute("RELEASE work")


def _resolve(works: Sequence[_Work[object]]) -> None:
    for work in works:
        work.resolve()
