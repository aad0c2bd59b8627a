"""The threads that run handlers, and the steps that they leave for the loop's thread."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any


class LoopMailbox:
    """Steps for the loop, in the order in which they came."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._steps: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._woken = False

    def post(self, step: Callable[..., object], *values: Any) -> None:
        """Have the loop take this step soon; any thread may call this."""
        self._steps.append((step, values))
        self.wake()

    def leave(self, step: Callable[..., object], *values: Any) -> None:
        """Have the loop take this step when it next catches up; any thread may call this."""
        self._steps.append((step, values))

    def wake(self) -> None:
        """Have the loop catch up soon; any thread may call this."""
        # The loop resets the mark before it looks: what came before this line is not missed.
        if not self._woken and not self._loop.is_closed():
            self._woken = True
            self._loop.call_soon_threadsafe(self._catch_up_when_woken)

    def catch_up(self) -> None:
        """Take the steps that wait now, in the loop; later ones have a wake-up of their own."""
        for _ in range(len(self._steps)):
            step, values = self._steps.popleft()
            try:
                step(*values)
            except Exception as error:  # noqa: BLE001 - it is not the error of whoever catches up
                context = {"message": f"{step!r} failed", "exception": error}
                self._loop.call_exception_handler(context)

    def _catch_up_when_woken(self) -> None:
        self._woken = False
        self.catch_up()


Work = Callable[[], object]


class HandlerThreads:
    """At most so many threads, begun as calls need them; only one loop's thread uses this."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._work: SimpleQueue[Work | None] = SimpleQueue()
        self._begun = 0
        self._calls = 0

    def run(self, work: Work) -> None:
        """Run this in a thread, after what came before it; it must not raise."""
        self._calls += 1
        if self._calls > self._begun and self._begun < self._most:
            name = f"handler_{self._begun}"
            self._begun += 1
            threading.Thread(target=self._serve, name=name, daemon=True).start()
        self._work.put(work)

    def left(self) -> None:
        self._calls -= 1

    def close(self) -> None:
        """Let the threads end, each after the call that it runs and those that wait."""
        for _ in range(self._begun):
            self._work.put(None)

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            work()
            del work  # what it holds is not kept until the next call
