"""A queue that fails for a while, and faults of ours: no job is lost, nobody waits for ever."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from gateway_ext.errors import BodyLost, ClaimLost, QueueFailed
from gateway_ext.jobs.model import Head, Job, JobNumber, Kind, Lane
from gateway_ext.jobs.sqlite.committer import Committer, Turn
from gateway_ext.jobs.sqlite.queue import SqliteQueue
from gateway_ext.jobs.tally import QueueLimits
from gateway_ext.jobs.worker import Worker, WorkerSettings
from tests.job_world import ECHO, LOG, Functions, Said, a_queue, call, put, soon


class Failing(SqliteQueue):
    """Fails so often at each of two things."""

    heads_fail = 0
    done_fails = 0

    async def heads(self, kind: Kind) -> Sequence[Head]:
        if kind == Kind.CALL and self.heads_fail:
            self.heads_fail -= 1
            raise QueueFailed("the disk is gone")
        return await super().heads(kind)

    async def done(self, job: JobNumber) -> None:
        if self.done_fails:
            self.done_fails -= 1
            raise QueueFailed("the disk is full")
        await super().done(job)


@pytest.mark.parametrize(("heads", "done"), [(1, 0), (0, 1)])
def test_job_is_made_and_ended_although_the_queue_failed(
    tmp_path: Path, heads: int, done: int, caplog: pytest.LogCaptureFixture
) -> None:
    functions = Functions(lambda *_: Said())

    async def test() -> None:
        queue = Failing(tmp_path, QueueLimits(), LOG)
        await queue.open()
        queue.heads_fail, queue.done_fails = heads, done
        async with Worker(queue, functions, lambda _: None, WorkerSettings(), LOG):
            await put(queue, call(queued_at_s=time.time()))
            await soon(lambda: not queue.tally.calls)
        await queue.close()

    with caplog.at_level(logging.ERROR):
        asyncio.run(test())
    assert functions.times("c1") == 1
    assert "next try in 0.5 s" in caplog.text


class Losing(SqliteQueue):
    """Another gateway took the job for one of a dead one."""

    async def done(self, job: JobNumber) -> None:
        await super().done(job)
        raise ClaimLost(job)


def test_job_that_is_another_gateways_by_now_is_let_go(tmp_path: Path) -> None:
    async def test() -> None:
        queue = Losing(tmp_path, QueueLimits(), LOG)
        await queue.open()
        functions = Functions(lambda *_: Said())
        async with Worker(queue, functions, lambda _: None, WorkerSettings(), LOG) as worker:
            await put(queue, call(queued_at_s=time.time()))
            await soon(lambda: not queue.tally.calls and not worker.running)
            assert worker.endings() == {(Kind.CALL, "lost"): 1}
        await queue.close()

    asyncio.run(test())


class Torn:
    """A body whose end is gone."""

    size_bytes = 5 << 20

    async def pieces(self) -> AsyncIterator[bytes]:
        yield b"x" * 1000
        raise BodyLost("part 7 of its body is gone")


class Handing(SqliteQueue):
    """Hands jobs out with bodies that are torn."""

    async def claim(self, lanes: Sequence[Lane], now_s: float) -> Sequence[Job]:
        return [replace(job, body=Torn()) for job in await super().claim(lanes, now_s)]


def test_job_whose_body_is_gone_is_dead_at_once(tmp_path: Path) -> None:
    async def test() -> None:
        queue = Handing(tmp_path, QueueLimits(), LOG)
        await queue.open()
        functions = Functions(lambda *_: Said())
        async with Worker(queue, functions, lambda _: None, WorkerSettings(), LOG):
            await put(queue, call(queued_at_s=time.time()))
            await soon(lambda: queue.tally.dead)
        (letter,) = await queue.dead(0, 10)
        assert letter.why == "part 7 of its body is gone"
        await queue.close()

    asyncio.run(test())


def test_fault_that_comes_each_time_makes_a_dead_letter_at_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway_ext.jobs.dispatcher._BUG_S", 0.0)

    def behave(*_: object) -> Said:
        raise ZeroDivisionError

    async def test() -> None:
        functions = Functions(behave)
        async with (
            a_queue(tmp_path) as queue,
            Worker(queue, functions, lambda _: None, WorkerSettings(), LOG),
        ):
            await put(queue, call(queued_at_s=time.time()))
            await soon(lambda: queue.tally.dead)
            (letter,) = await queue.dead(0, 10)
            assert letter.why == "a fault of the gateway: ZeroDivisionError()"
            assert letter.attempts == functions.times("c1") == 11

    asyncio.run(test())


class Odd(SqliteQueue):
    """Has a fault of ours where an end is written down."""

    async def done(self, job: JobNumber) -> None:
        raise ZeroDivisionError(job)


def test_job_whose_end_cannot_be_written_down_by_a_fault_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        queue = Odd(tmp_path, QueueLimits(), LOG)
        await queue.open()
        async with Worker(
            queue, Functions(lambda *_: Said()), lambda _: None, WorkerSettings(), LOG
        ):
            await put(queue, call(queued_at_s=time.time()))
            await soon(lambda: "call c1 stays claimed: ZeroDivisionError(1)" in caplog.text)
        await queue.close()

    with caplog.at_level(logging.ERROR):
        asyncio.run(test())


def _nothing(_: Turn) -> None:
    """No tables are needed."""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_fault_in_the_committers_thread_fails_all_who_wait_and_all_who_come(
    tmp_path: Path,
) -> None:
    def odd(turn: Turn) -> None:
        raise ZeroDivisionError(turn)

    async def test() -> None:
        committer = Committer(tmp_path / "some.sqlite", _nothing)
        await committer.open()
        for _ in range(2):
            with pytest.raises(QueueFailed):
                await asyncio.wait_for(committer.run(odd, durable=False), 5)
        await committer.close()

    asyncio.run(test())


def test_worker_that_is_closed_twice_or_never_started_is_closed(tmp_path: Path) -> None:
    async def test() -> None:
        queue = SqliteQueue(tmp_path, QueueLimits(), LOG)
        await queue.open()
        worker = Worker(queue, Functions(lambda *_: Said()), lambda _: None, WorkerSettings(), LOG)
        await worker.close()
        worker.start()
        await put(queue, call(function=ECHO))
        await worker.close()
        await worker.close()
        await queue.close()
        await queue.close()

    asyncio.run(test())
