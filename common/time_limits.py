"""Limits of time that hold in a task that is being cancelled, too.

There `asyncio.timeout` of Python 3.11.2, which Debian 12 has, raises CancelledError when its time
is up. What a program does at its end is then cut off, such as killing a child that does not end.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager


def time_limit(seconds: float | None) -> AbstractAsyncContextManager[asyncio.Timeout]:
    """Raise TimeoutError if what is inside takes longer."""
    loop = asyncio.get_running_loop()
    return time_limit_at(None if seconds is None else loop.time() + seconds)


@asynccontextmanager
async def time_limit_at(when_s: float | None) -> AsyncIterator[asyncio.Timeout]:
    """Raise TimeoutError if what is inside takes until then, by the loop's clock."""
    task = asyncio.current_task()
    assert task is not None, "a limit is for a task"
    cancelling = task.cancelling()
    limit = asyncio.timeout_at(when_s)  # noqa: TID251 - the one place
    try:
        async with limit:
            yield limit
    except asyncio.CancelledError as error:
        if limit.expired() and task.cancelling() <= cancelling:
            raise TimeoutError from error
        raise
