"""When jobs begin: by the wall clock, which somebody may set, and after those of others."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import pytest

from gateway_ext.errors import ClaimLost
from gateway_ext.jobs.attempts import JobDead, JobDone, JobEnding, TryAgain
from gateway_ext.jobs.queue import JobQueue
from gateway_ext.jobs.sqlite import queue
from gateway_ext.jobs.values import Job, JobKind, JobLane
from gateway_ext.jobs.worker import JobDispatcher, LaneLimits
from tests.kit.simulation.job_disk import JobDisk, SimulatedCommitter
from tests.kit.virtual_time import virtually
from tests.kit.worlds.job_world import LOG, a_queue, call, put


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[JobDisk]:
    found = JobDisk(Random(1))
    monkeypatch.setattr(queue, "Committer", lambda _, prepare: SimulatedCommitter(found, prepare))
    yield found
    found.close()


@asynccontextmanager
async def dispatching(queue: JobQueue, now_s: Callable[[], float]) -> AsyncIterator[list[str]]:
    """The ids of the calls that were begun."""
    begun: list[str] = []

    async def handle(job: Job) -> JobEnding:
        begun.append(job.call.id)
        return JobDone()

    dispatcher = JobDispatcher(
        *(queue, JobKind.CALL, LaneLimits(), handle),
        now_s=now_s,
        log=LOG,
    )
    dispatcher.start()
    yield begun
    await dispatcher.close()


@pytest.mark.usefixtures("disk")
@virtually
async def test_job_begins_soon_when_the_clock_that_was_behind_is_set_right(tmp_path: Path) -> None:
    clock_s = 1000.0 - 3600.0
    async with a_queue(tmp_path) as queue, dispatching(queue, lambda: clock_s) as begun:
        await put(queue, call("c1", queued_at_s=1000.0))
        await asyncio.sleep(60.0)
        assert begun == []
        clock_s = 1000.0
        await asyncio.sleep(11.0)
        assert begun == ["c1"]


@pytest.mark.usefixtures("disk")
@virtually
async def test_later_job_of_a_lane_begins_when_another_gateway_has_taken_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    async with a_queue(tmp_path) as queue:
        claim = queue.claim

        async def of_another(lanes: Sequence[JobLane], now_s: float) -> Sequence[Job]:
            monkeypatch.setattr(queue, "claim", claim)
            await claim(lanes, now_s)
            return ()

        await put(queue, call("c1", queued_at_s=loop.time()))
        await put(queue, call("c2", queued_at_s=loop.time() + 5.0))
        monkeypatch.setattr(queue, "claim", of_another)
        async with dispatching(queue, loop.time) as begun:
            await asyncio.sleep(6.0)
            assert begun == ["c2"]


@pytest.mark.usefixtures("disk")
@virtually
async def test_jobs_go_on_when_a_claim_is_lost_while_it_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    async with a_queue(tmp_path) as queue:
        claim = queue.claim

        async def lost(lanes: Sequence[JobLane], now_s: float) -> Sequence[Job]:
            del lanes, now_s
            monkeypatch.setattr(queue, "claim", claim)
            raise ClaimLost(1)

        await put(queue, call("c1", queued_at_s=loop.time()))
        monkeypatch.setattr(queue, "claim", lost)
        async with dispatching(queue, loop.time) as begun:
            await asyncio.sleep(60.0)
            assert begun == ["c1"]


@pytest.mark.usefixtures("disk")
@pytest.mark.parametrize("ending", [TryAgain(3600.0, "nobody listens"), JobDead("nobody listens")])
@virtually
async def test_jobs_of_strangers_fill_no_log_when_all_of_them_fail(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, ending: JobEnding
) -> None:
    ended: list[str] = []

    async def fail(job: Job) -> JobEnding:
        ended.append(job.call.id)
        return ending

    now_s = asyncio.get_running_loop().time
    async with a_queue(tmp_path) as queue:
        dispatcher = JobDispatcher(queue, JobKind.CALL, LaneLimits(), fail, now_s=now_s, log=LOG)
        with caplog.at_level(logging.INFO, LOG.name):
            dispatcher.start()
            for number in range(20):
                await put(queue, call(f"c{number}", queued_at_s=now_s()))
            await asyncio.sleep(30.0)
            await dispatcher.close()
    assert len(ended) == 20
    assert len([line for line in caplog.messages if "nobody listens" in line]) == 1
