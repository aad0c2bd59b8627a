"""A queue that fails for a while, and our own defects: no job is lost, no caller waits for ever."""

import logging
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from gateway_ext.errors import BodyLost, ClaimLost, QueueDiskFull, QueueFailed
from gateway_ext.jobs import worker
from gateway_ext.jobs.attempts import BackOff, RetryPolicy
from gateway_ext.jobs.queue import QueueLimits
from gateway_ext.jobs.sqlite import queue as sqlite_queue
from gateway_ext.jobs.sqlite.body_files import FileSpool
from gateway_ext.jobs.sqlite.committer import Committer, Transaction
from gateway_ext.jobs.sqlite.queue import SqliteQueue
from gateway_ext.jobs.values import Job, JobKind, JobLane, JobNumber, LaneHead
from gateway_ext.jobs.worker import JobWorker, JobWorkerSettings
from tests.kit.waiting import eventually
from tests.kit.worlds.job_world import ECHO, LOG, Functions, ScriptedAnswer, a_queue, call, put


@pytest.fixture(autouse=True)
def _time_to_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that closes waits for what has ended, also on a machine that stands still."""
    monkeypatch.setattr(worker, "_RECORDED_S", 60.0)


class Failing(SqliteQueue):
    """Fails so often at each of two things."""

    heads_fail = 0
    done_fails = 0

    async def heads(self, kind: JobKind) -> Sequence[LaneHead]:
        if kind == JobKind.CALL and self.heads_fail:
            self.heads_fail -= 1
            raise QueueFailed("the disk is gone")
        return await super().heads(kind)

    async def finish(self, job: JobNumber) -> None:
        if self.done_fails:
            self.done_fails -= 1
            raise QueueFailed("the disk is full")
        await super().finish(job)


@pytest.mark.parametrize(("heads", "done"), [(1, 0), (0, 1)])
async def test_job_is_made_and_ended_although_the_queue_failed(
    tmp_path: Path, heads: int, done: int, caplog: pytest.LogCaptureFixture
) -> None:
    functions = Functions(lambda *_: ScriptedAnswer())

    with caplog.at_level(logging.ERROR):
        queue = Failing(tmp_path, QueueLimits(), LOG)
        await queue.open()
        queue.heads_fail, queue.done_fails = heads, done
        async with JobWorker(queue, functions, lambda _: None, JobWorkerSettings(), LOG):
            await put(queue, call(queued_at_s=time.time()))
            await eventually(lambda: not queue.tally.calls)
        await queue.close()
    assert functions.times("c1") == 1
    assert "next try in 0.5 s" in caplog.text


class FullDisk(FileSpool):
    """A spool that takes small bodies only."""

    async def write(self, chunk: bytes) -> None:
        if len(chunk) > 1000:
            raise QueueDiskFull(OSError("no space left"))
        await super().write(chunk)


async def test_call_whose_answer_the_disk_does_not_take_was_an_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_queue, "FileSpool", FullDisk)
    functions = Functions(lambda *_: ScriptedAnswer(body=b"x" * 2000))
    patience = RetryPolicy(attempts=3, back_off=BackOff(first_s=0.01, most_s=0.02))
    settings = JobWorkerSettings(patience=patience)
    async with (
        a_queue(tmp_path) as queue,
        JobWorker(queue, functions, lambda _: None, settings, LOG),
    ):
        url = "http://127.0.0.1:9/not-allowed"
        await put(queue, call(queued_at_s=time.time(), callback_url=url))
        await eventually(lambda: queue.tally.dead)
        assert functions.times("c1") == 3
        (letter,) = await queue.dead_letters(0, 10)
        assert letter.result is not None
        assert letter.result.status == 507
        assert "3 attempts failed" in letter.result.failure
        assert "its answer is lost: the disk of the job queue is full" in letter.result.failure


async def test_end_of_a_call_is_recorded_when_the_worker_closes_meanwhile(tmp_path: Path) -> None:
    functions = Functions(lambda *_: ScriptedAnswer())
    queue = Failing(tmp_path, QueueLimits(), LOG)
    await queue.open()
    queue.done_fails = 1
    async with JobWorker(queue, functions, lambda _: None, JobWorkerSettings(), LOG):
        await put(queue, call(queued_at_s=time.time()))
        await eventually(lambda: not queue.done_fails)
        assert queue.tally.calls  # not recorded yet: it is tried again in half a second
    assert not queue.tally.calls
    await queue.close()
    assert functions.times("c1") == 1


async def test_call_under_way_goes_back_to_the_queue_when_the_worker_closes(
    tmp_path: Path,
) -> None:
    functions = Functions(lambda *_: ScriptedAnswer(after_s=60.0))
    async with a_queue(tmp_path) as queue:
        began_s = time.monotonic()
        async with JobWorker(queue, functions, lambda _: None, JobWorkerSettings(), LOG):
            await put(queue, call(queued_at_s=time.time()))
            await eventually(lambda: functions.now)
        assert time.monotonic() - began_s < 30.0
        assert functions.now == 0
        assert len(await queue.heads(JobKind.CALL)) == 1, "it waits again"


class Losing(SqliteQueue):
    """Another gateway took the job for one of a dead one."""

    async def finish(self, job: JobNumber) -> None:
        await super().finish(job)
        raise ClaimLost(job)


async def test_job_that_is_another_gateways_by_now_is_let_go(tmp_path: Path) -> None:
    queue = Losing(tmp_path, QueueLimits(), LOG)
    await queue.open()
    functions = Functions(lambda *_: ScriptedAnswer())
    async with JobWorker(queue, functions, lambda _: None, JobWorkerSettings(), LOG) as worker:
        await put(queue, call(queued_at_s=time.time()))
        await eventually(lambda: not queue.tally.calls and not worker.running)
        assert worker.endings() == {(JobKind.CALL, "lost"): 1}
    await queue.close()


class Torn:
    """A body whose end is gone."""

    size_bytes = 5 << 20

    async def pieces(self) -> AsyncIterator[bytes]:
        yield b"x" * 1000
        raise BodyLost("part 7 of its body is gone")


class Handing(SqliteQueue):
    """Hands jobs out with bodies that are torn."""

    async def claim(self, lanes: Sequence[JobLane], now_s: float) -> Sequence[Job]:
        return [replace(job, body=Torn()) for job in await super().claim(lanes, now_s)]


async def test_job_whose_body_is_gone_is_dead_at_once(tmp_path: Path) -> None:
    queue = Handing(tmp_path, QueueLimits(), LOG)
    await queue.open()
    functions = Functions(lambda *_: ScriptedAnswer())
    async with JobWorker(queue, functions, lambda _: None, JobWorkerSettings(), LOG):
        await put(queue, call(queued_at_s=time.time()))
        await eventually(lambda: queue.tally.dead)
    (letter,) = await queue.dead_letters(0, 10)
    assert letter.why == "part 7 of its body is gone"
    await queue.close()


async def test_fault_that_comes_each_time_makes_a_dead_letter_at_last(tmp_path: Path) -> None:
    def behave(*_: object) -> ScriptedAnswer:
        raise ZeroDivisionError

    functions = Functions(behave)
    async with (
        a_queue(tmp_path) as queue,
        JobWorker(queue, functions, lambda _: None, JobWorkerSettings(defect_s=0.0), LOG),
    ):
        await put(queue, call(queued_at_s=time.time()))
        await eventually(lambda: queue.tally.dead)
        (letter,) = await queue.dead_letters(0, 10)
        assert letter.why == "a fault of the gateway: ZeroDivisionError()"
        assert letter.attempts == functions.times("c1") == 11


class Odd(SqliteQueue):
    """Has a fault of ours where an end is written down."""

    async def finish(self, job: JobNumber) -> None:
        raise ZeroDivisionError(job)


async def test_job_whose_end_cannot_be_recorded_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        queue = Odd(tmp_path, QueueLimits(), LOG)
        await queue.open()
        async with JobWorker(
            queue, Functions(lambda *_: ScriptedAnswer()), lambda _: None, JobWorkerSettings(), LOG
        ):
            await put(queue, call(queued_at_s=time.time()))
            await eventually(lambda: "call c1 stays claimed: ZeroDivisionError(1)" in caplog.text)
        await queue.close()


def _nothing(_: Transaction) -> None:
    """No tables are needed."""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_fault_in_the_committers_thread_fails_all_who_wait_and_all_who_come(
    tmp_path: Path,
) -> None:
    def odd(turn: Transaction) -> None:
        raise ZeroDivisionError(turn)

    committer = Committer(tmp_path / "some.sqlite", _nothing)
    await committer.open()
    for _ in range(2):
        with pytest.raises(QueueFailed):
            await committer.run(odd, durable=False)
    await committer.close()


async def test_queue_that_is_closed_twice_is_closed(tmp_path: Path) -> None:
    queue = SqliteQueue(tmp_path, QueueLimits(), LOG)
    await queue.open()
    functions = Functions(lambda *_: ScriptedAnswer())
    async with JobWorker(queue, functions, lambda _: None, JobWorkerSettings(), LOG):
        await put(queue, call(function=ECHO))
    await queue.close()
    await queue.close()
