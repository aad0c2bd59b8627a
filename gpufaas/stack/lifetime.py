"""The lifetime of a stack: it ends with its work, or when a signal comes."""

import asyncio
import signal
import sys
from collections.abc import Coroutine
from typing import Any

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


async def run_until_signal(work: Coroutine[Any, Any, int]) -> int:
    """Run work to its end, or cancel it at the first signal; its result, or 0 if cancelled.

    Further signals have no effect: a second cancellation would interrupt the end of the parts.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        loop.add_signal_handler(number, stop.set)
    working = loop.create_task(work)
    stopping = loop.create_task(stop.wait())
    await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if not working.done():
        print("stopping ...", file=sys.stderr, flush=True)
        working.cancel()
        await asyncio.wait({working})
    stopping.cancel()
    return 0 if working.cancelled() else working.result()
