"""Waits until an instance can be called: polls it, quickly at first."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from common.time_limits import time_limit

_ANSWER_S = 5.0
_REQUEST = b"GET /_/%b HTTP/1.1\r\nHost: function\r\nConnection: close\r\n\r\n"

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class PollIntervals(NamedTuple):
    """Seconds between two polls: `first_s` during the first `first_phase_s`, `later_s` after it."""

    first_s: float
    first_phase_s: float
    later_s: float = 0.2


async def wait_until_ready(
    is_ready: Callable[[], Awaitable[bool]],
    exited: asyncio.Future[str],
    within_s: float,
    intervals: PollIntervals,
) -> bool:
    """True once the instance is ready; False if it exits first or `within_s` passes."""
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    while not exited.done() and loop.time() < started_s + within_s:
        if await is_ready():
            return not exited.done()
        in_first_phase = loop.time() < started_s + intervals.first_phase_s
        await asyncio.sleep(intervals.first_s if in_first_phase else intervals.later_s)
    return False


async def answers_ready(connecting: Awaitable[Connection], *, has_our_runtime: bool) -> bool:
    """Whether an instance accepts calls.

    Our runtime answers the readiness route; of another image an open port is enough.
    """
    return await _answers_fine(connecting, b"ready" if has_our_runtime else b"")


async def answers_health(connecting: Awaitable[Connection]) -> bool:
    """Whether an instance of our runtime answers, whatever its calls do."""
    return await _answers_fine(connecting, b"health")


async def _answers_fine(connecting: Awaitable[Connection], route: bytes) -> bool:
    try:
        async with time_limit(_ANSWER_S):
            reader, writer = await connecting
            try:
                if not route:
                    return True
                writer.write(_REQUEST % route)
                return b" 200 " in await reader.readline()
            finally:
                writer.close()
    except (OSError, TimeoutError, ValueError):  # ValueError: the line exceeds the reader's limit
        return False
