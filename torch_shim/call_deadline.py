"""Until when the call is waited for that the current code serves: no longer may it wait itself."""

import time
from contextvars import ContextVar


class CallDeadline:
    """The end of one call's time, if it has one; `over` once the call is answered."""

    def __init__(self, within_s: float | None) -> None:
        self._ends_s = None if within_s is None else time.monotonic() + within_s

    def over(self) -> None:
        """Work that goes on after the answer has no deadline."""
        self._ends_s = None

    @property
    def left_s(self) -> float | None:
        """The seconds that are left; None without a deadline."""
        ends_s = self._ends_s
        return None if ends_s is None else max(0.0, ends_s - time.monotonic())


CURRENT: ContextVar[CallDeadline | None] = ContextVar("gpufaas_deadline", default=None)


def seconds_left() -> float | None:
    """The seconds that are left to the current call; None without a deadline."""
    found = CURRENT.get()
    return None if found is None else found.left_s
