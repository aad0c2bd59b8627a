"""Limits of time, above all in tasks that are being cancelled."""

import asyncio

import pytest

from common.time_limits import time_limit, time_limit_at
from tests.kit.virtual_time import virtually


@virtually
async def test_limit_raises_when_its_time_is_up_and_not_before() -> None:
    async with time_limit(2.0), time_limit(None):
        await asyncio.sleep(1.9)
    with pytest.raises(TimeoutError):
        async with time_limit(2.0):
            await asyncio.sleep(2.1)
    with pytest.raises(TimeoutError):
        async with time_limit_at(asyncio.get_running_loop().time() + 1.0):
            await asyncio.sleep(1.1)


@virtually
async def test_limit_holds_in_a_task_that_is_being_cancelled() -> None:
    ended = []

    async def work() -> None:
        try:
            await asyncio.sleep(1_000.0)
        finally:
            try:
                async with time_limit(1.0):
                    await asyncio.sleep(1_000.0)
            except TimeoutError:
                ended.append("it was not waited for any longer")

    task = asyncio.ensure_future(work())
    await asyncio.sleep(0.5)
    task.cancel()
    await asyncio.wait({task})
    assert ended
    assert task.cancelled()


@virtually
async def test_work_that_is_cancelled_within_its_limit_is_cancelled() -> None:
    async def work() -> None:
        async with time_limit(1.0) as limit:
            limit.reschedule(asyncio.get_running_loop().time() + 10.0)
            await asyncio.sleep(1_000.0)

    task = asyncio.ensure_future(work())
    await asyncio.sleep(2.0)
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()


@virtually
async def test_work_that_is_cancelled_as_its_time_is_up_is_cancelled() -> None:
    async def work() -> None:
        async with time_limit(1.0):
            await asyncio.sleep(1_000.0)

    task = asyncio.ensure_future(work())
    asyncio.get_running_loop().call_later(1.0, task.cancel)
    await asyncio.wait({task})
    assert task.cancelled()
