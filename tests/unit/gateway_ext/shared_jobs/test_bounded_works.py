"""Jobs that run a few at a time: all are tried, and a cancellation stops them cleanly."""

import asyncio
import gc
from functools import partial

import pytest

from gateway_ext.shared_jobs.requests import bounded
from tests.kit.waiting import eventually


async def test_works_are_all_tried_and_the_first_error_is_raised() -> None:
    tried: list[int] = []

    async def work(at: int) -> None:
        tried.append(at)
        if at in {1, 3}:
            raise ValueError(at)

    with pytest.raises(ValueError, match="1"):
        await bounded((partial(work, at) for at in range(5)), 2)
    assert sorted(tried) == [0, 1, 2, 3, 4]


async def test_works_that_wait_are_not_begun_when_they_are_cancelled() -> None:
    begun: list[int] = []

    async def work(at: int) -> None:
        begun.append(at)
        await asyncio.Event().wait()

    running = asyncio.create_task(bounded((partial(work, at) for at in range(5)), 2))
    await eventually(lambda: len(begun) == 2)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await asyncio.sleep(0)
    gc.collect()  # a coroutine that was never awaited would warn now, which is an error
    assert begun == [0, 1]
