"""A disk without room is named as such: to the operator who deploys, and to the caller of a job."""

import errno
import os
import sqlite3
from pathlib import Path

import pytest

from gateway_ext.errors import GatewayError, QueueDiskFull, is_full_disk
from gateway_ext.jobs.queue import QueueLimits
from gateway_ext.jobs.sqlite.committer import Transaction
from gateway_ext.jobs.sqlite.queue import SqliteQueue
from gateway_ext.model import Deployment
from tests.kit.fakes.memory_provider import MemoryProvider
from tests.kit.worlds.gateway_world import gateway_world
from tests.kit.worlds.job_world import LOG

pytestmark = pytest.mark.timeout(180, func_only=True)

NO_ROOM = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class FullProvider(MemoryProvider):
    """Finds no room for what is to be deployed."""

    async def deploy(self, deployment: Deployment, *, update: bool) -> None:
        del deployment, update
        raise NO_ROOM


def test_full_disks_are_told_from_other_failures() -> None:
    assert is_full_disk(NO_ROOM)
    assert is_full_disk(OSError(errno.EDQUOT, "quota"))
    assert not is_full_disk(OSError(errno.EACCES, "no"))
    assert not is_full_disk(sqlite3.OperationalError("locked"))


async def test_deployment_that_finds_no_room_is_answered_507_in_words(tmp_path: Path) -> None:
    async with gateway_world(tmp_path, FullProvider()) as world:
        answer = await world.ask("POST", "/system/functions", {"service": "f", "image": "x"})
        assert answer.status == 507
        assert "disk is full" in answer.body


async def test_body_that_finds_no_room_is_answered_507_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: object) -> None:
        raise NO_ROOM

    monkeypatch.setattr("gateway_ext.jobs.sqlite.body_files._opened", no_room)
    async with gateway_world(tmp_path) as world:
        await world.ask("POST", "/system/functions", {"service": "f", "image": "x"})
        answer = await world.ask("POST", "/async-function/f", b"x" * 3_000_000)
        assert answer.status == 507
        assert "disk of the job queue is full" in answer.body


async def test_database_without_room_fails_with_its_own_error(tmp_path: Path) -> None:
    queue = SqliteQueue(tmp_path, QueueLimits(), LOG)
    await queue.open()

    def fill(transaction: Transaction) -> None:
        (pages,) = transaction.db.execute("PRAGMA page_count").fetchone()
        transaction.db.execute(f"PRAGMA max_page_count={pages}")
        transaction.db.execute("CREATE TABLE large (x)")
        transaction.db.execute("INSERT INTO large VALUES (zeroblob(1000000))")

    with pytest.raises(QueueDiskFull, match="disk of the job queue is full") as caught:
        await queue._committer.run(fill, durable=True)  # noqa: SLF001 - the least way to fill it
    assert isinstance(caught.value, GatewayError)
    await queue.close()
