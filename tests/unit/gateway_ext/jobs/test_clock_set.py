"""Jobs are due by the wall clock, which somebody may set."""

import asyncio
from pathlib import Path
from random import Random

import pytest

from gateway_ext.jobs.execution.job_dispatcher import JobDispatcher
from gateway_ext.jobs.execution.job_endings import JobDone, JobEnding
from gateway_ext.jobs.execution.lane_fairness import LaneLimits
from gateway_ext.jobs.queue.job_values import Job, JobKind, call_lane
from gateway_ext.jobs.sqlite import sqlite_queue
from testbed.virtual_time import virtually
from tests.kit.simulation.job_disk import JobDisk, SimulatedCommitter
from tests.kit.worlds.job_world import LOG, a_queue, call, put


@virtually
async def test_job_begins_soon_when_the_clock_that_was_behind_is_set_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, clock_s = JobDisk(Random(1)), 1000.0 - 3600.0
    monkeypatch.setattr(
        sqlite_queue, "Committer", lambda _, prepare: SimulatedCommitter(disk, prepare)
    )
    begun: list[str] = []

    async def handle(job: Job) -> JobEnding:
        begun.append(job.call.id)
        return JobDone()

    async with a_queue(tmp_path) as queue:
        dispatcher = JobDispatcher(
            *(queue, JobKind.CALL, LaneLimits(), handle),
            lane_of=lambda job: call_lane(job.call.function),
            now_s=lambda: clock_s,
            log=LOG,
        )
        dispatcher.start()
        await put(queue, call("c1", queued_at_s=1000.0))
        await asyncio.sleep(60.0)
        assert begun == []
        clock_s = 1000.0
        await asyncio.sleep(11.0)
        assert begun == ["c1"]
        await dispatcher.close()
    disk.close()
