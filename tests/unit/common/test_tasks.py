"""Background tasks: their errors, and their end."""

import asyncio
import logging

import pytest

from common.tasks import BackgroundTasks, until_first
from tests.kit.waiting import eventually
from tests.kit.without_collector import without_collector

log = logging.getLogger(__name__)

TIMES = 20

pytestmark = pytest.mark.timeout(180, func_only=True)


async def fail() -> None:
    raise OSError("broken")


async def test_error_is_logged_at_once_with_the_name_of_the_work(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tasks = BackgroundTasks(log, "a letter")
    tasks.start(fail())
    await tasks.wait()
    assert "a letter failed" in caplog.text
    assert "broken" in caplog.text
    assert len(tasks) == 0


async def test_error_goes_to_the_owner_that_takes_it(caplog: pytest.LogCaptureFixture) -> None:
    errors: list[BaseException] = []
    tasks = BackgroundTasks(log, "a letter")
    tasks.start(fail(), failed=errors.append)
    await tasks.wait()
    assert [str(error) for error in errors] == ["broken"]
    assert caplog.text == ""


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_nothing_is_left_of_a_task_that_its_owner_keeps(*, is_cancelled: bool) -> None:
    """Without `error_of` a cancelled one refers to its frames, and these to the owner."""

    class Owner:
        def __init__(self) -> None:
            self.tasks = BackgroundTasks(log, "a letter")
            self.task = self.tasks.start(self.work())

        async def work(self) -> None:
            await asyncio.sleep(60 if is_cancelled else 0)

    with without_collector() as garbage:
        for _ in range(TIMES):
            owner = Owner()
            await asyncio.sleep(0)
            if is_cancelled:
                owner.tasks.cancel()
            await owner.tasks.wait()
            del owner
        assert garbage() < TIMES


async def test_close_cancels_and_awaits_every_task_in_the_order_of_their_starts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ended: list[int] = []

    async def work(number: int) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            ended.append(number)

    tasks = BackgroundTasks(log, "a letter")
    for number in range(24):
        tasks.start(work(number))
    await asyncio.sleep(0)
    await tasks.close()
    assert ended == list(range(24))
    assert len(tasks) == 0
    assert caplog.text == ""


async def test_wait_leaves_what_takes_longer_running() -> None:
    tasks = BackgroundTasks(log, "a letter")
    long = tasks.start(asyncio.sleep(60, "done"))
    tasks.start(asyncio.sleep(0))
    await tasks.wait(0.05)
    await eventually(lambda: len(tasks) == 1, "the short one is forgotten")
    assert not long.done()
    await tasks.close()
    assert long.cancelled()


async def test_until_first_cancels_the_others_and_raises_the_error_of_the_first() -> None:
    other = asyncio.Event()

    async def wait() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            other.set()

    await until_first(asyncio.sleep(0.01), wait())
    assert other.is_set()
    with pytest.raises(OSError, match="broken"):
        await until_first(fail(), wait())
