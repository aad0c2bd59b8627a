"""For how long somebody has waited, all in all."""

from collections import deque

_MOST_WAITS = 64


class WaitClock:
    """Runs while somebody waits; the difference of two readings is the time between them.

    It remembers the latest waits, so it can be read for a time that is not long ago.
    """

    __slots__ = ("_since_s", "_total_s", "_waits")

    def __init__(self) -> None:
        self._total_s = 0.0
        self._since_s: float | None = None
        self._waits: deque[tuple[float, float]] = deque(maxlen=_MOST_WAITS)

    def note(self, waiting: int, now: float) -> None:
        """So many wait from now on."""
        if waiting and self._since_s is None:
            self._since_s = now
        elif not waiting and self._since_s is not None:
            if now > self._since_s:
                self._total_s += now - self._since_s
                self._waits.append((self._since_s, now))
            self._since_s = None

    def read_s(self, at_s: float) -> float:
        """The time until then; before the waits that it remembers, the least that it was."""
        if self._since_s is not None and at_s > self._since_s:
            return self._total_s + at_s - self._since_s
        read_s, begun_s = self._total_s, at_s
        for begun_s, ended_s in reversed(self._waits):
            if at_s >= ended_s:
                return read_s
            read_s -= ended_s - begun_s
            if at_s >= begun_s:
                return read_s + at_s - begun_s
        return max(0.0, read_s - (begun_s - at_s))
