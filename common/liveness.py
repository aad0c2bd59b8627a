"""Tells a frozen process from a busy one, by its answers, its state and its processor time.

And names the signal that has ended one.

A machine under load starves processes, but a starved process is runnable, and uses some processor
time; a stopped one is not, and a blocked one uses none.
"""

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import NamedTuple

# A debugger also stops a process, but as "t": that one is left alone.
_STOPPED = "T"
_SLEEPING = frozenset({"S", "I"})
_STATE, _UTIME, _STIME = 0, 11, 12  # positions in /proc/PID/stat after the name

# Whether a process answers a health request; no answer is False.
Answers = Callable[[], Awaitable[bool]]


@dataclass(frozen=True, slots=True)
class LivenessTimes:
    """When a process counts as frozen.

    It is looked at every `look_s`, and asked for an answer every `ask_s`. A stopped process is
    frozen `stopped_s` after the first look that showed it; one that answered before, and then
    neither answers nor uses the processor, after `blocked_s`; one that never answers after its
    start, after `start_s`. If a look comes `late_s` too late, the watching process was held up
    itself: all waits begin again.
    """

    look_s: float = 0.5
    ask_s: float = 4.0
    stopped_s: float = 1.0
    blocked_s: float = 9.0
    start_s: float = 90.0
    late_s: float = 1.0


class ProcessLook(NamedTuple):
    """A process's state, as /proc names it, and the clock ticks that it has computed."""

    state: str
    ticks: int


class LivenessRecord:
    """What the looks at one process have shown; pure, all times are passed in."""

    def __init__(self, times: LivenessTimes, now_s: float) -> None:
        self._times = times
        self._began_s = self._looked_s = self._blocked_s = now_s
        self._stopped_s = inf  # when a look first showed it stopped
        self._answered = False
        self._ticks = -1

    def answered(self, now_s: float) -> None:
        self._answered = True
        self._blocked_s = now_s

    def look(self, look: ProcessLook, now_s: float) -> str:
        """Why the process counts as frozen; empty if it does not."""
        times = self._times
        if now_s - self._looked_s > times.look_s + times.late_s:
            self._began_s = self._blocked_s = now_s
            self._stopped_s = inf
        if look.state != _STOPPED:
            self._stopped_s = inf
        elif self._stopped_s == inf:
            self._stopped_s = now_s
        if look.ticks != self._ticks or look.state not in _SLEEPING:
            self._blocked_s = now_s
        self._looked_s, self._ticks = now_s, look.ticks
        if now_s - self._stopped_s >= times.stopped_s:
            return f"was stopped by a signal {now_s - self._stopped_s:.1f} s ago"
        if self._answered and now_s - self._blocked_s >= times.blocked_s:
            return f"has neither answered nor computed for {now_s - self._blocked_s:.1f} s"
        if not self._answered and now_s - self._began_s >= times.start_s:
            return f"did not answer within {times.start_s:g} s of its start"
        return ""


async def until_frozen(pid: int, answers: Answers | None, times: LivenessTimes) -> str:
    """Wait until the process is frozen, and return why; for ever if it ends or stays alive.

    Without health requests only a stopped process counts as frozen.
    """
    if answers is None:
        times = replace(times, start_s=inf)
    record = LivenessRecord(times, time.monotonic())
    asking = asyncio.create_task(_ask(record, answers or _never, times.ask_s))
    try:
        while True:
            await asyncio.sleep(times.look_s)
            if asking.done():
                asking.result()
            look, now_s = process_look(Path("/proc", str(pid))), time.monotonic()
            if look is None or not (why := record.look(look, now_s)):
                continue
            if look.state == _STOPPED or not _has_busy_thread(pid):
                return why
            record.answered(now_s)
    finally:
        asking.cancel()
        with suppress(asyncio.CancelledError):
            await asking


def process_look(folder: Path) -> ProcessLook | None:
    """A look at the process or thread of a folder in /proc; None if it has ended."""
    try:
        # A process chooses its name, which need not be text.
        text = (folder / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return ProcessLook(fields[_STATE], int(fields[_UTIME]) + int(fields[_STIME]))


def _has_busy_thread(pid: int) -> bool:
    """Whether a thread of the process computes, or waits for a disk, while the first one sleeps.

    A process that has just ended is not frozen either.
    """
    try:
        looks = [process_look(folder) for folder in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return True
    return any(look is not None and look.state not in _SLEEPING for look in looks)


async def _never() -> bool:
    return False


async def _ask(record: LivenessRecord, answers: Answers, every_s: float) -> None:
    while True:
        if await answers():
            record.answered(time.monotonic())
        await asyncio.sleep(every_s)


def signal_name(number: int) -> str:
    """The signal's name, such as SIGSEGV; Python has none for most real-time signals."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
