"""The real clock: an event loop's own time, or the machine's monotonic time."""

from asyncio import AbstractEventLoop
from collections.abc import Callable
from time import monotonic

from common.clock import Cancellable


class LoopClock:
    """The time of one event loop; callbacks run on that loop."""

    def __init__(self, loop: AbstractEventLoop) -> None:
        self._loop = loop

    def now_s(self) -> float:
        return self._loop.time()

    def call_at(self, when_s: float, callback: Callable[[], None]) -> Cancellable:
        return self._loop.call_at(when_s, callback)


class MonotonicClock:
    """The machine's monotonic time, for loops whose own is coarse (uvloop counts milliseconds)."""

    def __init__(self, loop: AbstractEventLoop) -> None:
        self._loop = loop

    def now_s(self) -> float:
        return monotonic()

    def call_at(self, when_s: float, callback: Callable[[], None]) -> Cancellable:
        return self._loop.call_later(max(0.0, when_s - monotonic()), callback)
