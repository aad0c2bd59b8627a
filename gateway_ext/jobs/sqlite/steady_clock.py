"""The wall clock of one process, which does not jump when the machine's clock is set."""

import time


class SteadyClock:
    """The wall clock as it was at first, going on at the pace of a clock that nobody sets.

    What waits until a moment is neither put off nor hurried by a correction of the time.
    """

    def __init__(self) -> None:
        self._boot_s = time.time() - _since_boot_s()

    def now_s(self) -> float:
        """Seconds since 1970."""
        return self._boot_s + _since_boot_s()


def _since_boot_s() -> float:
    """Unlike the monotonic clock it goes on while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
