"""What only SQLite's queue does: one owner, shared commits, removal of obsolete files."""

import asyncio
import errno
import os
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

from gateway_ext.errors import Busy, QueueFailed
from gateway_ext.jobs.queue import QueueLimits
from gateway_ext.jobs.sqlite.committer import Committer, Transaction
from gateway_ext.jobs.sqlite.queue import SqliteQueue, encode
from gateway_ext.jobs.values import JobNumber, call_lane, whole
from tests.kit.waiting import eventually
from tests.kit.worlds.job_world import ECHO, LOG, a_queue, call, claimed, put

LIMITS = QueueLimits(inline_bytes=10)
LARGE = b"x" * 100
HEAD_BYTES = len(encode(call()))


async def test_queue_has_one_owner_at_a_time(tmp_path: Path) -> None:
    async with a_queue(tmp_path) as queue:
        await put(queue, call())
        with pytest.raises(QueueFailed, match="another gateway"):
            async with a_queue(tmp_path):
                pytest.fail("two own the queue")
        assert await put(queue, call("another"))


async def test_job_is_due_on_time_when_the_machines_clock_is_set_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its caller got 202, and would wait for the hour by which the clock was put back."""
    wall_s = [1e9]
    monkeypatch.setattr(time, "time", lambda: wall_s[0])
    async with a_queue(tmp_path) as queue:
        await put(queue, call(queued_at_s=queue.now_s()))
        wall_s[0] -= 3600.0
        assert await queue.claim([call_lane(ECHO)], queue.now_s())
        assert queue.now_s() == pytest.approx(1e9, abs=60.0)


async def test_job_is_due_at_once_when_it_was_put_off_by_a_wrong_clock_before_a_restart(
    tmp_path: Path,
) -> None:
    async with a_queue(tmp_path) as queue:
        await put(queue, call())
        now_s = queue.now_s()
        await queue.reschedule(await claimed(queue), now_s + 86_400.0, "wrong", counts=True)
        await put(queue, call("soon"))
        await queue.reschedule(await claimed(queue), now_s + 3_000.0, "right", counts=True)
    async with a_queue(tmp_path) as queue:
        (job,) = await queue.claim([call_lane(ECHO)] * 2, queue.now_s())
        assert job.call.id == "c1"


async def test_queue_is_for_the_gateway_alone(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)

    async with a_queue(tmp_path):
        assert tmp_path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("version", [2, 99])
async def test_queue_of_another_version_is_refused(tmp_path: Path, version: int) -> None:
    with closing(sqlite3.connect(tmp_path / "jobs.sqlite")) as db:
        db.execute(f"PRAGMA user_version = {version}")

    with pytest.raises(QueueFailed, match=f"version {version}, this gateway's is 3"):
        async with a_queue(tmp_path):
            pytest.fail("it was opened")


async def test_body_that_is_cut_short_makes_a_dead_letter(tmp_path: Path) -> None:
    async with a_queue(tmp_path, LIMITS) as queue:
        await put(queue, call(), LARGE)
        (file,) = (tmp_path / "bodies").iterdir()
        file.write_bytes(LARGE[:50])
        assert await queue.claim([call_lane(ECHO)], 1e9) == []
        (letter,) = await queue.dead_letters(0, 10)
        assert "50 of 100 bytes" in letter.why


async def test_file_that_is_no_queue_is_refused(tmp_path: Path) -> None:
    (tmp_path / "jobs.sqlite").write_bytes(b"no database at all" * 100)

    with pytest.raises(QueueFailed, match="cannot be opened"):
        async with a_queue(tmp_path):
            pytest.fail("it was opened")


async def test_files_of_bodies_go_with_their_jobs(tmp_path: Path) -> None:
    bodies = tmp_path / "bodies"

    async with a_queue(tmp_path, LIMITS) as queue:
        await put(queue, call(), LARGE)
        assert not await put(queue, call(), LARGE)
        await eventually(lambda: len(list(bodies.iterdir())) == 1)
        await queue.finish(await claimed(queue))
        await eventually(lambda: not list(bodies.iterdir()))
        spool = queue.spool()
        await spool.write(b"y" * (3 << 20))
        assert len(list(bodies.iterdir())) == 1
        await spool.discard()
        assert list(bodies.iterdir()) == []


async def test_files_that_no_job_has_go_at_the_next_start(tmp_path: Path) -> None:
    async with a_queue(tmp_path, LIMITS) as queue:
        await put(queue, call(), LARGE)
    (tmp_path / "bodies" / "left").write_bytes(b"by a process that was killed")
    async with a_queue(tmp_path, LIMITS) as queue:
        await eventually(lambda: not (tmp_path / "bodies" / "left").exists())
        assert len(list((tmp_path / "bodies").iterdir())) == 1
        (job,) = await queue.claim([call_lane(ECHO)], 1e9)
        assert await whole(job.body) == LARGE


async def test_job_whose_body_is_gone_becomes_a_dead_letter_and_hinders_no_other_job(
    tmp_path: Path,
) -> None:
    async with a_queue(tmp_path, LIMITS) as queue:
        await put(queue, call("lost", queued_at_s=1.0), LARGE)
        for path in (tmp_path / "bodies").iterdir():
            path.unlink()
        await put(queue, call("fine", queued_at_s=2.0), LARGE)
        jobs = await queue.claim([call_lane(ECHO)] * 2, 1e9)
        assert [job.call.id for job in jobs] == ["fine"]
        (letter,) = await queue.dead_letters(0, 10)
        assert letter.call.id == "lost"
        assert "cannot be read" in letter.why


class Unburying(SqliteQueue):
    """Cannot make dead letters."""

    async def bury(self, job: JobNumber, why: str, at_s: float, status: int = 0) -> None:
        raise QueueFailed(f"the disk is full: {job} {why} {at_s} {status}")


async def test_job_that_can_neither_be_read_nor_buried_hinders_no_other_job(tmp_path: Path) -> None:
    queue = Unburying(tmp_path, LIMITS, LOG)
    await queue.open()
    await put(queue, call("lost", queued_at_s=1.0), LARGE)
    for path in (tmp_path / "bodies").iterdir():
        path.unlink()
    await put(queue, call("fine", queued_at_s=2.0), LARGE)
    jobs = await queue.claim([call_lane(ECHO)] * 2, 1e9)
    assert [job.call.id for job in jobs] == ["fine"]
    await queue.close()


async def test_headers_take_room_too_and_are_counted_alike_after_a_start(tmp_path: Path) -> None:
    long = replace(call("long"), headers=((b"x-long", b"x" * 600),))

    limits = QueueLimits(waiting_bytes=2_000)
    async with a_queue(tmp_path, limits) as queue:
        assert await put(queue, long, b"")
        before_bytes = queue.tally.alive_bytes
        assert before_bytes > 600
        with pytest.raises(Busy):
            await put(queue, replace(long, id="one more"), b"")
    async with a_queue(tmp_path, limits) as queue:
        assert queue.tally.alive_bytes == before_bytes


class _Disk(NamedTuple):
    total: int


async def test_disk_that_is_smaller_than_the_limits_bounds_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway_ext.jobs.sqlite.queue.disk_usage", lambda _: _Disk(4_000))

    async with a_queue(tmp_path) as queue:
        with pytest.raises(Busy):
            await put(queue, call(), b"x" * 1_000)
        assert await put(queue, call(), b"x" * 800)


async def test_body_is_kept_when_it_is_asked_again_after_its_folder_could_not_be_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_queue(tmp_path, LIMITS) as queue:
        spool = queue.spool()
        await spool.write(LARGE)
        with monkeypatch.context() as patch:
            patch.setattr("gateway_ext.jobs.sqlite.body_files.sync_folder", _no_files_left)
            with pytest.raises(QueueFailed, match="Too many open files"):
                await queue.put(call(), spool)
        assert await queue.put(call(), spool)
        (job,) = await queue.claim([call_lane(ECHO)], 1e9)
        assert await whole(job.body) == LARGE


def _no_files_left(_: object) -> None:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


async def test_row_that_makes_no_sense_becomes_a_dead_letter_and_hinders_no_other_job(
    tmp_path: Path,
) -> None:
    async with a_queue(tmp_path) as queue:
        await put(queue, call("odd", callback_url="http://there/"))
        await put(queue, call("fine"))
    with closing(sqlite3.connect(tmp_path / "jobs.sqlite")) as db:
        db.execute("UPDATE jobs SET call = x'ff' WHERE call_id = 'odd'")
        db.commit()
    async with a_queue(tmp_path) as queue:
        jobs = await queue.claim([call_lane(ECHO)] * 2, 1e9)
        assert [job.call.id for job in jobs] == ["fine"]
        assert queue.tally.dead == 1

        (letter,) = await queue.dead_letters(0, 10)
        assert (letter.call.id, letter.call.function) == ("odd", ECHO)
        assert letter.why.startswith("it cannot be read: ")
        assert (await queue.dead_letter(letter.number))[0] == letter


async def test_put_that_is_cancelled_is_kept_whole_or_not_at_all(tmp_path: Path) -> None:
    async with a_queue(tmp_path, LIMITS) as queue:
        for at in range(20):
            task = asyncio.create_task(put(queue, call(str(at)), LARGE))
            await asyncio.sleep(at * 0.0003)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await put(queue, call("last"), LARGE)
        jobs = await queue.claim([call_lane(ECHO)] * 30, 1e9)
        assert [await whole(job.body) for job in jobs] == [LARGE] * len(jobs)
        assert queue.tally.calls == {ECHO: len(jobs)}
        assert await queue.dead_letters(0, 10) == []


async def test_works_that_come_together_share_a_commit(tmp_path: Path) -> None:
    commits: list[str] = []

    def note(statement: str) -> None:
        if statement == "COMMIT":
            commits.append(statement)

    def watch(transaction: Transaction) -> None:
        transaction.db.execute("CREATE TABLE rows (value)")
        transaction.db.set_trace_callback(
            lambda answer: commits.append(answer) if answer == "COMMIT" else None
        )

    committer = Committer(tmp_path / "some.sqlite", watch)
    await committer.open()
    commits.clear()
    insert = "INSERT INTO rows VALUES (1)"
    works = [
        committer.run(lambda transaction: transaction.db.execute(insert).rowcount, durable=True)
        for _ in range(200)
    ]
    assert await asyncio.gather(*works) == [1] * 200
    await committer.close()
    assert 1 <= len(commits) <= 20


async def test_work_that_fails_leaves_the_others_of_its_commit(tmp_path: Path) -> None:
    def prepare(transaction: Transaction) -> None:
        transaction.db.execute("CREATE TABLE rows (value UNIQUE)")

    committer = Committer(tmp_path / "some.sqlite", prepare)
    await committer.open()

    def insert(value: int, transaction: Transaction) -> int:
        return transaction.db.execute("INSERT INTO rows VALUES (?)", (value,)).rowcount

    values = (1, 2, 2, 3)
    works = [committer.run(partial(insert, value), durable=True) for value in values]
    done = await asyncio.gather(*works, return_exceptions=True)
    assert [type(one) for one in done] == [int, int, QueueFailed, int]
    await committer.close()


async def test_disk_that_is_full_fails_the_put_and_only_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    committers: list[Committer] = []

    def opened(path: Path, prepare: Callable[[Transaction], None]) -> Committer:
        committers.append(Committer(path, prepare))
        return committers[-1]

    monkeypatch.setattr("gateway_ext.jobs.sqlite.queue.Committer", opened)
    async with a_queue(tmp_path) as queue:
        await put(queue, call("before"))
        await _limit_pages(committers[0], 30)  # as a full disk
        with pytest.raises(QueueFailed, match="full"):
            await put(queue, call("large"), b"x" * 900_000)
        assert queue.tally.calls == {ECHO: 1}
        await _limit_pages(committers[0], 1 << 20)
        assert await put(queue, call("large"), b"x" * 900_000)


async def _limit_pages(committer: Committer, pages: int) -> None:
    def limit(transaction: Transaction) -> None:
        transaction.db.execute(f"PRAGMA max_page_count = {pages}")

    await committer.run(limit, durable=False)
