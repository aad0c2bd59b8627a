"""Until when the call is waited for that the current code serves: no longer may it wait itself."""

from collections.abc import Callable
from contextvars import ContextVar

SecondsLeft = Callable[[], float | None]

# Set by whoever knows the call; below, nothing of calls is known.
CURRENT: ContextVar[SecondsLeft | None] = ContextVar("gpufaas_deadline", default=None)


def seconds_left() -> float | None:
    """The seconds that are left to the current call; None without a deadline."""
    left_s = CURRENT.get()
    return None if left_s is None else left_s()
