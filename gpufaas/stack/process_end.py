"""Waits for the end of a process, whose frozen life is ended first."""

import asyncio
from asyncio.subprocess import Process
from collections.abc import Callable

from common.liveness import Answers, LivenessTimes, signal_name, until_frozen


async def until_ended(
    process: Process, answers: Answers | None, times: LivenessTimes, kill: Callable[[], None]
) -> str:
    """Wait for the end of a process, kill it if it freezes, and return what happened to it."""
    ended = asyncio.create_task(process.wait())
    frozen = asyncio.create_task(until_frozen(process.pid, answers, times))
    try:
        await asyncio.wait({ended, frozen}, return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            return exit_text(ended.result())
        why = frozen.result()
        kill()
        await ended
        return f"{why}, and was killed"
    finally:
        for task in (ended, frozen):
            task.cancel()
        await asyncio.gather(ended, frozen, return_exceptions=True)


def exit_text(status: int) -> str:
    """How a process ended, by its exit status."""
    if status < 0:
        return f"was ended by {signal_name(-status)}"
    return f"ended with status {status}"
