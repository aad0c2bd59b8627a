"""Background tasks whose errors are logged and whose owner ends them."""

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from logging import Logger
from typing import Any, TypeVar

Result = TypeVar("Result")


class BackgroundTasks:
    """The tasks that one object runs beside its callers.

    The event loop itself keeps only weak references to tasks. A task that fails is logged at once
    under the name of the group, unless `failed` takes its error; a cancelled one is no failure.
    """

    __slots__ = ("_log", "_tasks", "_what")

    def __init__(self, log: Logger, what: str) -> None:
        self._log = log
        self._what = what
        self._tasks: dict[asyncio.Task[Any], None] = {}  # in the order of their starts

    def __len__(self) -> int:
        return len(self._tasks)

    def start(
        self,
        work: Coroutine[Any, Any, Result],
        *,
        name: str | None = None,
        failed: Callable[[BaseException], None] | None = None,
    ) -> asyncio.Task[Result]:
        """Run this in a task, which is forgotten at its end."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks[task] = None
        task.add_done_callback(partial(self._ended, failed or self._log_error))
        return task

    def cancel(self) -> None:
        """Ask every task to end, without waiting for it."""
        for task in tuple(self._tasks):
            task.cancel()

    async def wait(self, within_s: float | None = None) -> None:
        if self._tasks:
            await asyncio.wait(tuple(self._tasks), timeout=within_s)

    async def close(self) -> None:
        """Cancel every task, and wait until all have ended."""
        self.cancel()
        await self.wait()

    def _ended(self, failed: Callable[[BaseException], None], task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task, None)
        error = error_of(task)
        if error is not None:
            failed(error)

    def _log_error(self, error: BaseException) -> None:
        self._log.error("%s failed", self._what, exc_info=error)


def error_of(task: asyncio.Future[Any]) -> BaseException | None:
    """The error of a task, or a future, that has ended; None if it was cancelled.

    A cancelled task keeps an error too until it is asked for, and by it all that the frames of the
    task refer to: often the task itself, which only the collector of cycles would then free.
    """
    try:
        return task.exception()
    except asyncio.CancelledError:
        return None


async def until_first(*works: Coroutine[Any, Any, object]) -> None:
    """Run these coroutines until one ends, then cancel the others; raise the error of the first."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in tasks:
        if task in done:
            task.result()
