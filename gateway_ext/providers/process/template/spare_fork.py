"""A fork of a template that is made in advance, and becomes the next instance.

A fork copies the tables of all its pages, twice until it has the right parent. That is most of the
time from the order of an instance to its first call, and need not be spent while somebody waits.
"""

import asyncio
from collections.abc import Awaitable, Callable

from common.tasks import BackgroundTasks
from gateway_ext.providers.process.instance_process import KeptProcess
from gateway_ext.providers.process.processes import ProcessUsage
from gateway_ext.providers.process.template.template_run import TemplateRun

# Instances that have just been started have the processors to themselves for so long.
_QUIET_S = 1.0
_NOTICE_S = 1.0  # between the end of a process and the report of its keeper


# Forks the spare, or returns None.
Make = Callable[[], Awaitable[TemplateRun | None]]


class SpareFork:
    """The spare of one template, if there is one now."""

    def __init__(self, tasks: BackgroundTasks) -> None:
        self.run: TemplateRun | None = None
        self._tasks = tasks
        self._making: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None

    def make_soon(self, make: Make) -> None:
        """Have a spare a moment after the last call of this method."""
        if self.run is None:
            self._stop_making()
            self._making = self._tasks.start(self._made(make))

    async def become(self, name: str, listener: int) -> KeptProcess | None:
        """An instance of this name that serves this socket; None without a spare.

        OSError if the spare lives and does not do as ordered.
        """
        run = self._taken()
        if run is None:
            return None
        process = None
        try:
            process = await run.fork(name, listener)
        except OSError:
            ended, _ = await asyncio.wait({run.process.exited}, timeout=_NOTICE_S)
            if not ended:
                raise
        finally:
            if process is run.process:
                run.release()
            else:
                self._tasks.start(run.end())
        return process

    def enforce(self, limit_bytes: int | None, most_cpu_s: float, usage: ProcessUsage) -> None:
        """End a spare that has grown beyond an instance's limit, or computes instead of waiting."""
        if usage.cpu_s > most_cpu_s or (limit_bytes is not None and usage.own_bytes > limit_bytes):
            self.drop()

    def drop(self) -> None:
        """End the spare, and make none."""
        self._stop_making()
        run = self._taken()
        if run is not None:
            self._tasks.start(run.end())

    def _taken(self) -> TemplateRun | None:
        run, self.run = self.run, None
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None
        return run

    def _stop_making(self) -> None:
        if self._making is not None and self._making is not asyncio.current_task():
            self._making.cancel()
        self._making = None

    async def _made(self, make: Make) -> None:
        await asyncio.sleep(_QUIET_S)
        self.run = await make()
        if self.run is not None:
            self._watching = self._tasks.start(self._drop_when_it_ends(self.run))

    async def _drop_when_it_ends(self, run: TemplateRun) -> None:
        await run.unasked_end()
        if self.run is run:
            self._watching = None  # this task
            self.drop()
