"""Obsolete files are removed once the commit that made them obsolete is synced."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from gateway_ext.errors import QueueFailed
from gateway_ext.jobs.sqlite.committer import Committer, Transaction
from tests.kit.waiting import eventually


@asynccontextmanager
async def a_committer(folder: Path, idle_s: float = 3600.0) -> AsyncIterator[Committer]:
    def prepare(transaction: Transaction) -> None:
        transaction.db.execute("CREATE TABLE rows (value)")

    committer = Committer(folder / "some.sqlite", prepare, idle_s=idle_s)
    await committer.open()
    try:
        yield committer
    finally:
        await committer.close()


async def drop(committer: Committer, file: Path, *, durable: bool = False) -> None:
    """Commit a change that makes the file obsolete."""
    file.touch()

    def end(transaction: Transaction) -> None:
        transaction.db.execute("INSERT INTO rows VALUES (1)")
        transaction.obsolete.append(file)

    await committer.run(end, durable=durable)


@pytest.fixture
def synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """The names of synced files, each with whether the file `body` existed then."""
    found: list[tuple[str, bool]] = []
    fsync = os.fsync

    def noting(descriptor: int) -> None:
        name = Path(f"/proc/self/fd/{descriptor}").readlink().name
        found.append((name, (tmp_path / "body").exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noting)
    return found


async def test_file_goes_after_a_sync_of_what_took_it_away(
    tmp_path: Path, synced: list[tuple[str, bool]]
) -> None:
    async with a_committer(tmp_path, idle_s=0.05) as committer:
        await drop(committer, tmp_path / "body")
        await eventually(lambda: not (tmp_path / "body").exists())
    assert synced[0] == ("some.sqlite-wal", True)


@pytest.mark.parametrize("durable", [False, True])
async def test_files_do_not_wait_for_an_idle_moment_when_they_are_many(
    tmp_path: Path, *, durable: bool
) -> None:
    files = [tmp_path / f"body{at}" for at in range(64)]

    async with a_committer(tmp_path) as committer:
        for file in files[:-1]:
            await drop(committer, file, durable=durable)
        assert all(file.exists() for file in files[:-1])
        await drop(committer, files[-1], durable=durable)
        await eventually(lambda: not any(file.exists() for file in files))


async def test_file_stays_as_long_as_nothing_can_be_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = 0

    def failing(_: int) -> None:
        nonlocal tried
        tried += 1
        raise OSError("the disk is gone")

    async with a_committer(tmp_path, idle_s=0.01) as committer:
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", failing)
            await drop(committer, tmp_path / "body")
            await eventually(lambda: tried)
            assert (tmp_path / "body").exists()
        await drop(committer, tmp_path / "another")
        await eventually(lambda: not (tmp_path / "body").exists())


async def test_file_of_work_that_failed_goes_at_once(tmp_path: Path) -> None:
    def fail(why: str, _: Transaction) -> None:
        raise QueueFailed(why)

    async with a_committer(tmp_path) as committer:
        (tmp_path / "body").touch()
        work = partial(fail, "it is full")
        with pytest.raises(QueueFailed, match="full"):
            await committer.run(work, durable=True, file=tmp_path / "body")
        assert not (tmp_path / "body").exists()
