"""Numbers of jobs, from the clock, so that they grow and none is assigned twice; pure.

Sequence numbers of a stream would not do: a nats-server that is killed may assign them again. The
numbers are below 2**53, as some readers of JSON take them for floats.
"""

from collections.abc import Callable
from random import Random

from gateway_ext.jobs.queue.job_values import JobNumber

_FIRST_MS = 1_735_689_600_000  # the year 2025 began
_CHANCE_BITS = 12


class JobNumbers:
    """Draws growing numbers; two gateways may draw the same one in one millisecond."""

    def __init__(self, now_s: Callable[[], float], chance: Random) -> None:
        self._now_s = now_s
        self._chance = chance
        self._last = 0

    def next(self) -> JobNumber:
        """The next number."""
        since_ms = max(0, int(self._now_s() * 1000) - _FIRST_MS)
        drawn = since_ms << _CHANCE_BITS | self._chance.getrandbits(_CHANCE_BITS)
        self._last = max(self._last + 1, drawn)
        return JobNumber(self._last)
