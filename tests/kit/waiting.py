"""The one way to wait in tests: until a condition holds, with a deadline that names it."""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable

PATIENCE_S = 120.0  # on a machine that does much else at the same time

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.05

Condition = Callable[[], object]
AsyncCondition = Callable[[], object | Awaitable[object]]


class StillWaiting(AssertionError):
    """A condition did not hold in time; the text names the condition and the state instead."""


def wait_until(
    holds: Condition,
    what: str,
    *,
    within_s: float = PATIENCE_S,
    instead: Callable[[], str] = str,
) -> float:
    """Block until the condition holds; the seconds that it took. `instead` describes a failure."""
    began_s, pause_s = time.monotonic(), _FIRST_PAUSE_S
    is_late = False
    while not holds():
        if is_late:
            raise StillWaiting(_text(what, within_s, instead))
        time.sleep(pause_s)
        # Who was not let run in time looks once more: it may have come to hold meanwhile.
        is_late = time.monotonic() - began_s > within_s
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    return time.monotonic() - began_s


async def eventually(
    holds: AsyncCondition,
    what: str = "the condition",
    *,
    within_s: float = PATIENCE_S,
    instead: Callable[[], str] = str,
) -> float:
    """Wait, with the event loop running, until the condition holds; the seconds that it took."""
    loop = asyncio.get_running_loop()
    began_s, pause_s = loop.time(), _FIRST_PAUSE_S
    is_late = False
    while not await _value(holds):
        if is_late:
            raise StillWaiting(_text(what, within_s, instead))
        await asyncio.sleep(pause_s)
        is_late = loop.time() - began_s > within_s
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    return loop.time() - began_s


async def _value(holds: AsyncCondition) -> object:
    found = holds()
    return await found if inspect.isawaitable(found) else found


def _text(what: str, within_s: float, instead: Callable[[], str]) -> str:
    return f"not within {within_s:g} s: {what} {instead()}".rstrip()
