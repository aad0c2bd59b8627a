"""The port of time, so that tests and simulations can run on virtual time."""

from collections.abc import Callable
from typing import Protocol


class Cancellable(Protocol):
    """A callback that is scheduled."""

    def cancel(self) -> None: ...


class Clock(Protocol):
    """Monotonic time, with an arbitrary zero and no negative values."""

    def now_s(self) -> float: ...

    def call_at(self, when_s: float, callback: Callable[[], None]) -> Cancellable:
        """Call back at that time, or as soon as possible if that time has passed; never at once."""
