"""An event loop on virtual time for several programs, each of which can be frozen and killed.

The context of whatever is scheduled names its program, so that the code of the programs needs to
know nothing of this. Every program has a monotonic clock of its own, as every machine has.
"""

import asyncio
import heapq
import logging
import sys
import warnings
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import Context, ContextVar, copy_context
from itertools import count
from typing import Any, TypeVarTuple

from tests.kit.virtual_time import Stuck, VirtualLoop

# So many callbacks in one moment of virtual time are a loop that never waits.
_MOST_IN_A_MOMENT = 200_000
_FEW_TASKS = 64
_BURIALS = 8


_Arguments = TypeVarTuple("_Arguments")


class SimulatedProgram:
    """One run of a program on a host; what it scheduled runs only while the program does.

    `skew_s` is by how much its host's wall clock is wrong, `offset_s` what its monotonic clock
    showed when the simulation began. `at_death` is called once, by a kill and by an end.
    """

    def __init__(self, loop: "SimulatedLoop", host: str, name: str, offset_s: float = 0.0) -> None:
        self.host = host
        self.name = name
        self.offset_s = offset_s
        self.skew_s = 0.0
        self.alive = True
        self.frozen = False
        self.runs = True  # alive, and not frozen
        self.at_death: list[Callable[[], None]] = []
        self._loop = loop
        self._held: list[asyncio.Handle] = []
        self._tasks: set[asyncio.Future[Any]] = set()
        self._kept_tasks = 0
        self._main: asyncio.Task[None] | None = None
        self._context = copy_context()
        self._context.run(PROGRAM.set, self)

    @property
    def context(self) -> Context:
        """A fresh context in which callbacks of this program run."""
        return self._context.copy()

    def start(self, work: Coroutine[Any, Any, None], name: str = "") -> asyncio.Task[None]:
        """Run this as a task of the program; its failure is one of the loop's `unhandled`."""
        context = self.context
        task = context.run(self._loop.create_task, work, name=name or self.name)
        task.add_done_callback(self._ended)
        self._main = self._main or task
        return task

    def end(self) -> None:
        """Ask the first task to end, as SIGTERM does."""
        if self._main is not None:
            self._loop.call_soon(self._main.cancel, context=self.context)

    def freeze(self) -> None:
        """Stop running, as by SIGSTOP: what falls due waits."""
        self.frozen, self.runs = True, False

    def thaw(self) -> None:
        """Run again, all that fell due first."""
        self.frozen, self.runs = False, self.alive
        held, self._held = self._held, []
        self._loop.run_soon(held)

    def kill(self) -> None:
        """End at once, as by SIGKILL: nothing of the program runs any more."""
        if not self.alive:
            return
        self.alive = self.runs = False
        self._held.clear()
        for callback in self.at_death:
            callback()

    def admits(self, handle: asyncio.Handle) -> bool:
        """Whether this callback may run now; a frozen program keeps it for later."""
        if self.alive and self.frozen:
            self._held.append(handle)
        return self.alive and not self.frozen

    def note(self, task: asyncio.Future[Any]) -> None:
        """Keep a task: what was killed must not clean up when it is forgotten."""
        self._tasks.add(task)
        if len(self._tasks) > 2 * self._kept_tasks + _FEW_TASKS:
            self._tasks = {each for each in self._tasks if not each.done()}
            self._kept_tasks = len(self._tasks)

    def forget(self) -> None:
        """Let go of the tasks; who would have asked for their failures was killed."""
        for task in self._tasks:
            if task.done() and not task.cancelled():
                task.exception()
        self._tasks.clear()

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            what = {"message": f"{self.name} ended", "exception": error}
            self._loop.call_exception_handler(what)


PROGRAM: ContextVar[SimulatedProgram | None] = ContextVar("PROGRAM", default=None)


# When, and behind which other timers of that moment. Tuples are compared without Python's help.
_Scheduled = tuple[float, int, asyncio.TimerHandle]


class SimulatedLoop(VirtualLoop):
    """Runs callbacks of programs that run; time jumps when nothing is left to do in a moment.

    What asyncio's loop does for each callback, with checks for threads and debuggers, it does with
    fewer calls: a seed is mostly this.
    """

    def __init__(self) -> None:
        super().__init__()
        self._ready: deque[asyncio.Handle] = deque()
        self._scheduled: list[_Scheduled] = []
        self._numbers = count()
        self._in_this_moment = 0
        self._cancelled_timers = 0  # that wait still, at most
        self.set_task_factory(_noted)  # type: ignore[arg-type] # which takes all that asyncio passes

    def time(self) -> float:
        """The monotonic clock of the program that asks."""
        program = PROGRAM.get()
        return self.passed_s if program is None else self.passed_s + program.offset_s

    def call_at(
        self,
        when: float,
        callback: Callable[[*_Arguments], object],
        *args: *_Arguments,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """See asyncio; `when` is by the clock of the program that asks."""
        asking = PROGRAM.get()
        at_s = when if asking is None else when - asking.offset_s
        return self._schedule(max(at_s, self.passed_s), callback, args, context)

    def call_later(
        self,
        delay: float,
        callback: Callable[[*_Arguments], object],
        *args: *_Arguments,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """See asyncio."""
        return self._schedule(self.passed_s + max(0.0, delay), callback, args, context)

    def call_soon(
        self,
        callback: Callable[[*_Arguments], object],
        *args: *_Arguments,
        context: Context | None = None,
    ) -> asyncio.Handle:
        """See asyncio."""
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def run_soon(self, handles: list[asyncio.Handle]) -> None:
        """Run these, behind what is ready."""
        self._ready.extend(handles)

    def _schedule(
        self,
        at_s: float,
        callback: Callable[..., object],
        args: Sequence[Any],
        context: Context | None,
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(at_s, callback, args, self, context)
        heapq.heappush(self._scheduled, (at_s, next(self._numbers), timer))
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        del handle
        self._cancelled_timers += 1

    def _run_once(self) -> None:
        ready = self._ready
        if not ready:
            self._jump()
        self._in_this_moment += len(ready)
        if self._in_this_moment > _MOST_IN_A_MOMENT:
            raise Stuck(f"something never waits: {ready[0]}")
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle.cancelled():
                continue
            context: Context = handle._context  # type: ignore[attr-defined] # noqa: SLF001
            program = context.get(PROGRAM)
            if program is None or program.runs or program.admits(handle):
                handle._run()  # noqa: SLF001 - as asyncio's own loop does

    def _jump(self) -> None:
        """Let time pass until the next timer, and take all that are due then."""
        scheduled = self._scheduled
        if self._cancelled_timers > _FEW_TASKS and 2 * self._cancelled_timers > len(scheduled):
            scheduled[:] = [each for each in scheduled if not each[2].cancelled()]
            heapq.heapify(scheduled)
            self._cancelled_timers = 0
        while scheduled and scheduled[0][2].cancelled():
            heapq.heappop(scheduled)
        if not scheduled:
            raise Stuck("nothing is left to happen")
        self.passed_s = max(self.passed_s, scheduled[0][0])
        self._in_this_moment = 0
        while scheduled and scheduled[0][0] <= self.passed_s:
            self._ready.append(heapq.heappop(scheduled)[2])


def bury(loop: SimulatedLoop, programs: Iterable[SimulatedProgram]) -> None:
    """The simulation is over: close all coroutines, which never end by themselves now."""

    async def close() -> None:
        for program in programs:
            program.kill()
        closed = {asyncio.current_task()}
        while left := asyncio.all_tasks() - closed:  # which closing others may have begun
            for task in left:
                _close(task)
            closed |= left
        for program in programs:
            program.forget()
        for _ in range(_BURIALS):  # generators that were forgotten are closed by tasks
            await asyncio.sleep(0)

    with last_words_ignored(), warnings.catch_warnings():
        # Of a task that never had its first step, what it was to await is begun by nobody.
        warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
        loop.run_until_complete(close())
        loop.close()


@contextmanager
def last_words_ignored() -> Iterator[None]:
    """What killed programs do when their coroutines are closed or forgotten is no failure."""
    hook, level = sys.unraisablehook, logging.root.manager.disable
    sys.unraisablehook = _ignored
    logging.disable()
    try:
        yield
    finally:
        sys.unraisablehook = hook
        logging.disable(level)


def _ignored(_: object) -> None:
    """The last words of a killed program."""


def _close(task: asyncio.Task[Any]) -> None:
    task._log_destroy_pending = False  # type: ignore[attr-defined] # noqa: SLF001 - killed
    work = task.get_coro()
    for _ in range(_BURIALS):
        with suppress(Exception, GeneratorExit, asyncio.CancelledError):  # it waits before it ends
            work.close()
            return


def _noted(
    loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], **more: Any
) -> asyncio.Future[Any]:
    task = asyncio.Task(work, loop=loop, **more)
    context = more.get("context")
    program = PROGRAM.get() if context is None else context.get(PROGRAM)
    if program is not None:
        program.note(task)
    return task
