"""Steps that other threads leave for the loop's thread: one wake-up serves all that wait."""

import asyncio
from collections import deque
from collections.abc import Callable
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
