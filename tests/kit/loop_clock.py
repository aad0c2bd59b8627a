"""A clock that tells the time of an event loop, which may be virtual."""

from asyncio import AbstractEventLoop
from collections.abc import Callable

from common.clock import Cancellable


class LoopClock:
    """The time of one event loop; callbacks run on that loop."""

    def __init__(self, loop: AbstractEventLoop) -> None:
        self._loop = loop

    def now_s(self) -> float:
        return self._loop.time()

    def call_at(self, when_s: float, callback: Callable[[], None]) -> Cancellable:
        return self._loop.call_at(when_s, callback)
