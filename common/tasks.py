"""Background tasks whose errors are logged and whose owner ends them."""

import asyncio
from collections.abc import Callable, Coroutine
from logging import Logger
from typing import Any, TypeVar

Result = TypeVar("Result")


class BackgroundTasks:
    """The tasks that one object runs beside its callers.

    The event loop itself keeps only weak references to tasks. A task that fails is logged at once
    under the name of the group, unless `failed` takes its error; a cancelled one is no failure.
    """

    __slots__ = ("_failed", "_log", "_tasks", "_what")

    def __init__(
        self, log: Logger, what: str, failed: Callable[[BaseException], None] | None = None
    ) -> None:
        self._log = log
        self._what = what
        self._failed = failed or self._log_error
        self._tasks: dict[asyncio.Task[Any], None] = {}  # in the order of their starts

    def __len__(self) -> int:
        return len(self._tasks)

    def start(
        self, work: Coroutine[Any, Any, Result], *, name: str | None = None
    ) -> asyncio.Task[Result]:
        """Run this in a task, which is forgotten at its end."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks[task] = None
        task.add_done_callback(self._ended)
        return task

    def cancel(self) -> None:
        """Ask every task to end, without waiting for it."""
        for task in tuple(self._tasks):
            task.cancel()

    async def wait(self, within_s: float | None = None) -> None:
        """Wait until all present tasks have ended, or until the time is up."""
        if self._tasks:
            await asyncio.wait(tuple(self._tasks), timeout=within_s)

    async def close(self) -> None:
        """Cancel every task, and wait until all have ended."""
        self.cancel()
        await self.wait()

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task, None)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._failed(error)

    def _log_error(self, error: BaseException) -> None:
        self._log.error("%s failed", self._what, exc_info=error)


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
