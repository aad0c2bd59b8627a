"""Numbers of jobs: by the clock, so that they grow, and none is given again; pure.

They are no sequence numbers of a stream: a nats-server that is killed may give those again. Below
2**53 as JSON's readers may take them for floats.
"""

from collections.abc import Callable
from random import Random

from gateway_ext.jobs.model import JobNumber

_FIRST_MS = 1_735_689_600_000  # the year 2025 began
_CHANCE_BITS = 12


class Numbers:
    """Each is higher than the one before; two gateways may draw the same in one millisecond."""

    def __init__(self, now_s: Callable[[], float], chance: Random) -> None:
        self._now_s = now_s
        self._chance = chance
        self._last = 0

    def next(self) -> JobNumber:
        """The next one."""
        since_ms = max(0, int(self._now_s() * 1000) - _FIRST_MS)
        drawn = since_ms << _CHANCE_BITS | self._chance.getrandbits(_CHANCE_BITS)
        self._last = max(self._last + 1, drawn)
        return JobNumber(self._last)
