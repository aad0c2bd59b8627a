"""The disk of a job queue in a simulation: SQLite's tables in memory, which outlive a gateway.

`SimulatedCommitter` takes the place of the thread that has the connection: the same work in the
same transactions, a moment later, unless the gateway was killed before.
"""

import asyncio
import errno
import sqlite3
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, TypeVar

from gateway_ext.errors import GatewayError, QueueDiskFull, QueueFailed
from gateway_ext.jobs.sqlite.committer import Transaction

_Value = TypeVar("_Value")

_COMMIT_S = (0.0001, 0.005)


class JobDisk:
    """What is committed stays; what was not synced does not survive a loss of power."""

    def __init__(self, chance: Random) -> None:
        self.full = False
        self.chance = chance
        self._db = sqlite3.connect(":memory:", isolation_level=None)
        self._synced = b""

    def lose_power(self) -> None:
        """Forget what was not synced."""
        if self._synced:
            self._db.deserialize(self._synced)

    def commit(self, do: Callable[[Transaction], _Value], *, durable: bool) -> _Value:
        """One transaction; on a full disk it fails if it writes."""
        db = self._db
        before = db.total_changes
        db.execute("BEGIN IMMEDIATE")
        try:
            value = do(Transaction(db))
            if self.full and db.total_changes != before:
                raise QueueDiskFull(OSError(errno.ENOSPC, "no space left on device"))
        except BaseException:
            db.execute("ROLLBACK")
            raise
        db.execute("COMMIT")
        if durable:
            self._synced = db.serialize()
        return value

    def close(self) -> None:
        """The simulation is over."""
        self._db.close()


class SimulatedCommitter:
    """See `gateway_ext.jobs.sqlite.committer.Committer`: works and answers keep their order."""

    def __init__(self, disk: JobDisk, prepare: Callable[[Transaction], None]) -> None:
        self._disk = disk
        self._prepare = prepare
        self._closed = False
        self._works, self._answers = _Line(disk.chance), _Line(disk.chance)

    async def open(self) -> None:
        await self.run(self._prepare, durable=True)

    async def run(
        self,
        do: Callable[[Transaction], _Value],
        *,
        durable: bool = False,
        then: Callable[[_Value], None] | None = None,
        file: Path | None = None,
    ) -> _Value:
        """The work is done even if its caller is cancelled; no body here needs a file."""
        assert file is None, "bodies are small here"
        if self._closed:
            raise QueueFailed("the job queue is closed")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[_Value] = loop.create_future()

        def work() -> None:
            try:
                value = self._disk.commit(do, durable=durable)
            except GatewayError as error:
                self._answers.call(fail, error)
            except (sqlite3.Error, OSError, ValueError) as error:
                failed = QueueFailed(f"the job queue failed: {error}")
                self._answers.call(fail, failed)
            else:
                self._answers.call(succeed, value)

        def succeed(value: _Value) -> None:
            if then is not None:
                then(value)
            if not future.done():
                future.set_result(value)

        def fail(error: GatewayError) -> None:
            if not future.done():
                future.set_exception(error)

        self._works.call(work)
        return await future

    async def close(self) -> None:
        self._closed = True


class _Line:
    """Calls what it is given after a moment each, and never before what it was given earlier."""

    def __init__(self, chance: Random) -> None:
        self._chance = chance
        self._last_s = float("-inf")

    def call(self, work: Callable[..., None], *arguments: Any) -> None:
        loop = asyncio.get_running_loop()
        self._last_s = max(self._last_s, loop.time() + self._chance.uniform(*_COMMIT_S))
        loop.call_at(self._last_s, work, *arguments)
