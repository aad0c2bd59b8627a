"""Files that no job has any more: they go once the commit that says so is on the disk."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from gateway_ext.errors import QueueFailed
from gateway_ext.jobs.sqlite import committer as module
from gateway_ext.jobs.sqlite.committer import Committer, Turn
from tests.job_world import soon


@asynccontextmanager
async def a_committer(folder: Path) -> AsyncIterator[Committer]:
    def prepare(turn: Turn) -> None:
        turn.db.execute("CREATE TABLE rows (value)")

    committer = Committer(folder / "some.sqlite", prepare)
    await committer.open()
    try:
        yield committer
    finally:
        await committer.close()


async def drop(committer: Committer, file: Path, *, durable: bool = False) -> None:
    """A commit after which nobody needs the file."""
    file.touch()

    def end(turn: Turn) -> None:
        turn.db.execute("INSERT INTO rows VALUES (1)")
        turn.obsolete.append(file)

    await committer.run(end, durable=durable)


@pytest.fixture
def synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """What was synced, and whether the file `body` was there then."""
    found: list[tuple[str, bool]] = []
    fsync = os.fsync

    def noting(descriptor: int) -> None:
        name = Path(f"/proc/self/fd/{descriptor}").readlink().name
        found.append((name, (tmp_path / "body").exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noting)
    return found


def test_file_goes_after_a_sync_of_what_took_it_away(
    tmp_path: Path, synced: list[tuple[str, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_IDLE_S", 0.05)

    async def test() -> None:
        async with a_committer(tmp_path) as committer:
            await drop(committer, tmp_path / "body")
            await soon(lambda: not (tmp_path / "body").exists())
        assert synced[0] == ("some.sqlite-wal", True)

    asyncio.run(test())


@pytest.mark.parametrize("durable", [False, True])
def test_files_do_not_wait_for_an_idle_moment_when_they_are_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, durable: bool
) -> None:
    monkeypatch.setattr(module, "_IDLE_S", 3600.0)
    files = [tmp_path / f"body{at}" for at in range(64)]

    async def test() -> None:
        async with a_committer(tmp_path) as committer:
            for file in files[:-1]:
                await drop(committer, file, durable=durable)
            assert all(file.exists() for file in files[:-1])
            await drop(committer, files[-1], durable=durable)
            await soon(lambda: not any(file.exists() for file in files))

    asyncio.run(test())


def test_file_stays_as_long_as_nothing_can_be_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_IDLE_S", 0.01)
    tried = 0

    def failing(_: int) -> None:
        nonlocal tried
        tried += 1
        raise OSError("the disk is gone")

    async def test() -> None:
        async with a_committer(tmp_path) as committer:
            with monkeypatch.context() as patch:
                patch.setattr(os, "fsync", failing)
                await drop(committer, tmp_path / "body")
                await soon(lambda: tried)
                assert (tmp_path / "body").exists()
            await drop(committer, tmp_path / "another")
            await soon(lambda: not (tmp_path / "body").exists())

    asyncio.run(test())


def test_file_of_work_that_failed_goes_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_IDLE_S", 3600.0)

    def fail(why: str, _: Turn) -> None:
        raise QueueFailed(why)

    async def test() -> None:
        async with a_committer(tmp_path) as committer:
            (tmp_path / "body").touch()
            work = partial(fail, "it is full")
            with pytest.raises(QueueFailed, match="full"):
                await committer.run(work, durable=True, file=tmp_path / "body")
            assert not (tmp_path / "body").exists()

    asyncio.run(test())
