"""Limits of time that hold in a task that is being cancelled, too.

There `asyncio.timeout` of Python 3.11.2, which Debian 12 has, raises CancelledError when its time
is up. What a program does at its end is then cut off, such as killing a child that does not end.
"""

import asyncio
from types import TracebackType


class time_limit_at:  # noqa: N801 - read as a function
    """Raise TimeoutError if what is inside takes until then, by the loop's clock."""

    __slots__ = ("_cancelling", "_limit")

    def __init__(self, when_s: float | None) -> None:
        self._limit = asyncio.timeout_at(when_s)  # noqa: TID251 - the one place
        self._cancelling = 0

    async def __aenter__(self) -> asyncio.Timeout:
        task = asyncio.current_task()
        assert task is not None, "a limit is for a task"
        self._cancelling = task.cancelling()
        return await self._limit.__aenter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._limit.__aexit__(kind, error, trace)
        if kind is asyncio.CancelledError and self._limit.expired():
            task = asyncio.current_task()
            if task is not None and task.cancelling() <= self._cancelling:
                raise TimeoutError from error


def time_limit(seconds: float | None) -> time_limit_at:
    """Raise TimeoutError if what is inside takes longer."""
    loop = asyncio.get_running_loop()
    return time_limit_at(None if seconds is None else loop.time() + seconds)
