"""For how long somebody has waited, all in all."""


class WaitClock:
    """Runs while somebody waits; the difference of two readings is the time between them."""

    __slots__ = ("_since_s", "_total_s")

    def __init__(self) -> None:
        self._total_s = 0.0
        self._since_s: float | None = None

    def note(self, waiting: int, now: float) -> None:
        """So many wait from now on."""
        if waiting and self._since_s is None:
            self._since_s = now
        elif not waiting and self._since_s is not None:
            self._total_s = self.read_s(now)
            self._since_s = None

    def read_s(self, now: float) -> float:
        """The time until now."""
        waits_s = 0.0 if self._since_s is None else max(0.0, now - self._since_s)
        return self._total_s + waits_s
