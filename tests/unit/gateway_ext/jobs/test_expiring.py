"""Dead letters are looked at again and again, whatever the queue says."""

import asyncio
import logging
from pathlib import Path

import pytest

from gateway_ext.errors import QueueAway
from gateway_ext.jobs.expiring import expiring
from gateway_ext.jobs.sqlite.queue import SqliteQueue
from gateway_ext.jobs.tally import QueueLimits
from tests.job_world import LOG, call, claimed, put, soon


class Sometimes(SqliteQueue):
    """Is away the first time."""

    looks = 0

    async def expire(self, now_s: float) -> int:
        self.looks += 1
        if self.looks == 1:
            raise QueueAway("the connection was lost")
        return await super().expire(now_s)


def test_letters_go_although_the_queue_was_away(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        queue = Sometimes(tmp_path, QueueLimits(dead_age_s=10.0), LOG)
        await queue.open()
        await put(queue, call())
        await queue.bury(await claimed(queue), "why", 1.0)
        async with expiring(queue, LOG, every_s=0.01) as looking:
            await soon(lambda: not queue.tally.dead)
        assert looking.cancelled()
        await queue.close()

    with caplog.at_level(logging.INFO):
        asyncio.run(test())
    assert "not looked at: the job queue cannot be reached" in caplog.text
    assert "1 dead letters were too old" in caplog.text
