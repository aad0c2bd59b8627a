"""A process that serves: malloc and the garbage collector tuned for calls, an end by a signal."""

import asyncio
import ctypes
import gc
import signal
import sys
from collections.abc import Coroutine
from typing import Any

_M_ARENA_MAX = -8  # of glibc's malloc.h


def share_one_arena() -> None:
    """Call before any thread begins: all threads of the process allocate from one arena.

    glibc gives each thread an arena of its own, so that threads do not wait for each other. Here
    they wait for the interpreter anyway, and what one arena has free helps no other thread: the
    free memory of a gateway's arenas grew by 10 MiB in as many minutes. Another libc has no such
    setting, and needs none.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)


# A call makes hundreds of objects: with Python's threshold of 700 the collector runs all the time.
_YOUNG, _MIDDLE, _OLD = 10_000, 10, 10


def freeze_started_objects() -> None:
    """Call after the start: present objects are exempt from collection, which then runs rarely.

    This saves a scheduler and a gateway about a tenth of their CPU time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, _MIDDLE, _OLD)


def stop_event(*signals: signal.Signals) -> asyncio.Event:
    """An event that is set by these signals, else by SIGTERM and SIGINT; later ones do nothing."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in signals or (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop


async def run_until_signal(work: Coroutine[Any, Any, int]) -> int:
    """Run work to its end, or cancel it at the first signal; its result, or 0 if cancelled.

    Further signals have no effect: a second cancellation would interrupt the end of the parts.
    """
    stop = stop_event(signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    working = asyncio.create_task(work)
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if not working.done():
        print("stopping ...", file=sys.stderr, flush=True)
        working.cancel()
        await asyncio.wait({working})
    stopping.cancel()
    return 0 if working.cancelled() else working.result()
