"""Child processes that are started in order, kept running, and stopped in reverse."""

import asyncio
import os
import signal
import time
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from logging import Logger
from pathlib import Path
from typing import Self

from common.liveness import Answers, LivenessTimes, signal_name, until_frozen
from common.tasks import until_first
from common.time_limits import time_limit
from gpufaas.child_programs import dies_with_us
from gpufaas.errors import StackFailed
from gpufaas.stack.log_files import keep_short, last_words, log_size

# A process that ran for a while is restarted at once; the others after growing pauses.
_STABLE_S = 10.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 15.0
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Part:
    """One program of the stack; it is up once `ready` is true, and has `stop_s` to end.

    `answers` asks it for a sign of life; None if it has no way to answer. `command_again` starts
    it after it has ended; without one `command` does.
    """

    name: str
    command: tuple[str, ...]
    log: Path
    ready: Callable[[], Awaitable[bool]]
    environment: Mapping[str, str]
    stop_s: float = 10.0
    start_s: float = 60.0
    answers: Answers | None = None
    command_again: tuple[str, ...] = ()


class Supervisor:
    """Runs parts within its context; a part that ends is restarted, a frozen one is killed first.

    Parts that end again and again are restarted after growing pauses.
    """

    def __init__(self, log: Logger, times: LivenessTimes = LivenessTimes()) -> None:  # noqa: B008 - it never changes
        self._log = log
        self._times = times
        self._running: list[tuple[Part, asyncio.Task[None], asyncio.Task[None]]] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *failure: object) -> None:
        while self._running:
            part, keeping, shortening = self._running.pop()
            keeping.cancel()
            results = await asyncio.gather(keeping, return_exceptions=True)
            shortening.cancel()
            await asyncio.gather(shortening, return_exceptions=True)
            if isinstance(results[0], Exception):
                self._log.error("%s: %s", part.name, results[0])

    async def start(self, part: Part) -> None:
        """Start a part and wait until it is up; StackFailed says why it is not."""
        since_bytes = log_size(part.log)
        process = await _spawn(part)
        try:
            await _wait_until_up(part, process, since_bytes)
        except BaseException:
            await stop_process(process, part.stop_s)
            raise
        loop = asyncio.get_running_loop()
        keeping = loop.create_task(self._keep(part, process))
        self._running.append((part, keeping, loop.create_task(keep_short(part.log))))
        await asyncio.sleep(0)  # a task that is cancelled before it began would stop nothing

    async def _keep(self, part: Part, process: Process) -> None:
        pause_s = 0.0
        while True:
            began_s = time.monotonic()
            try:
                kill = partial(_kill_group, process)
                why = await until_ended(process, part.answers, self._times, kill)
            except BaseException:
                await stop_process(process, part.stop_s)
                raise
            if time.monotonic() - began_s > _STABLE_S:
                pause_s = 0.0
            when = f"in {pause_s:g} s" if pause_s else "now"
            text = "%s %s; it is started again %s; its log is %s"
            self._log.warning(text, part.name, why, when, part.log)
            await asyncio.sleep(pause_s)
            pause_s = min(max(2 * pause_s, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)
            process = await self._restart(part)

    async def _restart(self, part: Part) -> Process:
        """A new process; tried until the system has resources for it."""
        part = replace(part, command=part.command_again or part.command)
        while True:
            try:
                return await _spawn(part)
            except OSError as error:
                self._log.error("%s is not started: %s", part.name, error)
                await asyncio.sleep(_LONGEST_PAUSE_S)


async def _spawn(part: Part) -> Process:
    """A process in its own session: a terminal's signals go to the supervisor alone."""
    part.log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with part.log.open("ab") as log:
        return await asyncio.create_subprocess_exec(
            *dies_with_us(part.command),
            stdin=DEVNULL,
            stdout=log,
            stderr=log,
            env=dict(part.environment),
            start_new_session=True,
        )


async def _wait_until_up(part: Part, process: Process, since_bytes: int) -> None:
    words = partial(last_words, part.log, part.name, since_bytes)
    try:
        async with time_limit(part.start_s):
            while True:
                ready = await part.ready()
                if process.returncode is not None:  # whoever answered was another program
                    raise StackFailed(part.name, exit_text(process.returncode), words())
                if ready:
                    return
                await asyncio.sleep(_POLL_S)
    except TimeoutError as error:
        late = f"is not ready after {part.start_s:g} s"
        raise StackFailed(part.name, late, words()) from error


async def stop_process(process: Process, within_s: float) -> None:
    """Terminate a process that leads a group, then kill the whole group."""
    if process.returncode is None:
        process.terminate()
        process.send_signal(signal.SIGCONT)  # a stopped process would not notice
        with suppress(TimeoutError):
            async with time_limit(within_s):
                await process.wait()
    _kill_group(process)
    await process.wait()


def _kill_group(process: Process) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


async def until_ended(
    process: Process, answers: Answers | None, times: LivenessTimes, kill: Callable[[], None]
) -> str:
    """Wait for the end of a process, kill it if it freezes, and return what happened to it."""
    why = ""

    async def kill_if_frozen() -> None:
        nonlocal why
        seems = await until_frozen(process.pid, answers, times)
        if process.returncode is None:  # it may have ended meanwhile, and cannot be killed then
            why = seems
            kill()

    await until_first(process.wait(), kill_if_frozen())
    status = await process.wait()
    return f"{why}, and was killed" if why else exit_text(status)


def exit_text(status: int) -> str:
    if status < 0:
        return f"was ended by {signal_name(-status)}"
    return f"ended with status {status}"
