"""Dead letters are checked again and again, whatever the queue reports."""

import logging
from pathlib import Path

import pytest

from gateway_ext.errors import QueueAway
from gateway_ext.jobs.queue import QueueLimits
from gateway_ext.jobs.sqlite.queue import SqliteQueue
from gateway_ext.jobs.worker import JobWorker, JobWorkerSettings
from tests.kit.waiting import eventually
from tests.kit.worlds.job_world import LOG, Functions, ScriptedAnswer, call, claimed, put


class Sometimes(SqliteQueue):
    """Is away the first time."""

    looks = 0

    async def expire(self, now_s: float) -> int:
        self.looks += 1
        if self.looks == 1:
            raise QueueAway("the connection was lost")
        return await super().expire(now_s)


async def test_letters_go_although_the_queue_was_away(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        queue = Sometimes(tmp_path, QueueLimits(dead_age_s=10.0), LOG)
        await queue.open()
        await put(queue, call())
        await queue.bury(await claimed(queue), "why", 1.0)
        functions, settings = (
            Functions(lambda *_: ScriptedAnswer()),
            JobWorkerSettings(expire_s=0.01),
        )
        async with JobWorker(queue, functions, lambda _: None, settings, LOG):
            await eventually(lambda: not queue.tally.dead)
        await queue.close()
    assert "not removed: the job queue cannot be reached" in caplog.text
    assert "1 expired dead letters were removed" in caplog.text
