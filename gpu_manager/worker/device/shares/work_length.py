"""Whether a model's work is long enough for several threads, by what it takes one thread."""

import math

# Shorter work gains little by helpers, and they look for more of it for some milliseconds, on cores
# that the functions use.
LONG_S = 0.005
_QUICK_BEFORE_TRIAL = 64
_NEWEST = 0.25  # the weight of the newest time


class WorkLength:
    """Knows how long one thread takes lately; long at first, so that a first call is not slow."""

    def __init__(self) -> None:
        self._alone_s = math.inf
        self._quick = _QUICK_BEFORE_TRIAL - 1

    @property
    def is_long(self) -> bool:
        """Whether the next call has helpers; now and then one has none, to learn what it takes."""
        return self._alone_s > LONG_S and self._quick < _QUICK_BEFORE_TRIAL

    def note(self, took_s: float, *, helped: bool) -> None:
        """Learn from a call; what takes long even with helpers needs no trial."""
        if helped:
            self._quick = self._quick + 1 if took_s <= LONG_S else 0
            return
        self._quick = 0
        if math.isinf(self._alone_s):
            self._alone_s = took_s
        else:  # a call that something else held up counts as twice as long at most
            newest_s = min(took_s, 2 * self._alone_s)
            self._alone_s += _NEWEST * (newest_s - self._alone_s)
