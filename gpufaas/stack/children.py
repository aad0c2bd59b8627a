"""Child processes that are started in order, kept running, and stopped in reverse."""

import asyncio
import os
import signal
import time
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from logging import Logger
from pathlib import Path
from types import TracebackType
from typing import Self

from gpufaas.errors import StackFailed
from gpufaas.processes import dies_with_us

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 15.0
_SETTLED_S = 30.0  # who has run so long begins anew with short pauses
_ASK_S = 0.05
_LOG_BYTES = 16 << 20
_LAST_LINES = 5


@dataclass(frozen=True, slots=True)
class Part:
    """One program of the stack; it is up once `ready` says so, and has `stop_s` to end."""

    name: str
    command: tuple[str, ...]
    log: Path
    ready: Callable[[], Awaitable[bool]]
    environment: Mapping[str, str]
    stop_s: float = 10.0
    start_s: float = 60.0


class Children:
    """Runs parts; use as a context. What dies is started again, after pauses that grow."""

    def __init__(self, log: Logger) -> None:
        self._log = log
        self._running: list[tuple[Part, asyncio.Task[None]]] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        while self._running:
            part, keeping = self._running.pop()
            keeping.cancel()
            results = await asyncio.gather(keeping, return_exceptions=True)
            if isinstance(results[0], Exception):
                self._log.error("%s: %s", part.name, results[0])

    async def start(self, part: Part) -> None:
        """Have it up; StackFailed says why it is not."""
        process = await _spawned(part)
        try:
            await _up(part, process)
        except BaseException:
            await _stop(part, process)
            raise
        keeping = asyncio.get_running_loop().create_task(self._keep(part, process))
        self._running.append((part, keeping))

    async def _keep(self, part: Part, process: Process) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            began_s = time.monotonic()
            try:
                status = await process.wait()
            except asyncio.CancelledError:
                await _stop(part, process)
                raise
            if time.monotonic() - began_s > _SETTLED_S:
                pause_s = _FIRST_PAUSE_S
            self._log.warning(
                "%s %s; it is started again in %g s; its log is %s",
                part.name,
                _in_words(status),
                pause_s,
                part.log,
            )
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            process = await self._again(part)

    async def _again(self, part: Part) -> Process:
        """Started again; tried until the system has room for it."""
        while True:
            try:
                return await _spawned(part)
            except OSError as error:
                self._log.error("%s is not started: %s", part.name, error)
                await asyncio.sleep(_LONGEST_PAUSE_S)


async def _spawned(part: Part) -> Process:
    """In a session of its own: what a terminal sends is for the one who supervises."""
    part.log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if part.log.exists() and part.log.stat().st_size > _LOG_BYTES:
        part.log.replace(part.log.with_suffix(".log.1"))
    with part.log.open("ab") as log:
        return await asyncio.create_subprocess_exec(
            *dies_with_us(part.command),
            stdin=DEVNULL,
            stdout=log,
            stderr=log,
            env=dict(part.environment),
            start_new_session=True,
        )


async def _up(part: Part, process: Process) -> None:
    try:
        async with asyncio.timeout(part.start_s):
            while not await part.ready():
                if process.returncode is not None:
                    raise StackFailed(part.name, _in_words(process.returncode), _last_words(part))
                await asyncio.sleep(_ASK_S)
    except TimeoutError as error:
        late = f"is not ready after {part.start_s:g} s"
        raise StackFailed(part.name, late, _last_words(part)) from error


async def _stop(part: Part, process: Process) -> None:
    """Ask it to end, and see to it, together with what it started."""
    if process.returncode is None:
        process.terminate()
        with suppress(TimeoutError):
            async with asyncio.timeout(part.stop_s):
                await process.wait()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


def _in_words(status: int) -> str:
    if status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return f"ended with status {status}"


def _last_words(part: Part) -> str:
    with suppress(OSError):
        return "\n".join(part.log.read_text(errors="replace").splitlines()[-_LAST_LINES:])
    return ""
