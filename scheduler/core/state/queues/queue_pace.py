"""How fast the queue moves, measured while requests wait."""

# Older placements count less: half as much after this much time with requests waiting.
_MEMORY_S = 10.0


class QueuePace:
    """The seconds from one placement to the next, while requests wait.

    Times without a waiting request are left out: they would show what is asked of the GPUs, not
    what the GPUs can do. So are times without a GPU, which say nothing of the GPUs that come back.
    The result includes everything that holds a GPU: loads, runs, the time that functions take
    between their runs.
    """

    __slots__ = ("_placed", "_since_s", "_took_s")

    def __init__(self) -> None:
        self._placed = 0.0
        self._took_s = 0.0
        # The last placement that left others waiting.
        self._since_s: float | None = None

    def placed(self, count: int, now: float) -> None:
        """Requests were placed, and others still wait."""
        if self._since_s is not None:
            step_s = now - self._since_s
            # Not an exponential, whose last digit depends on the machine: recordings must replay.
            kept = _MEMORY_S / (_MEMORY_S + step_s)
            self._placed = self._placed * kept + count
            self._took_s = self._took_s * kept + step_s
        self._since_s = now

    def pause(self) -> None:
        """Leave out the time until the next placement: no request waits, or no GPU is offered."""
        self._since_s = None

    def wait_s(self, ahead: int) -> float:
        """The expected wait behind this many requests; 0 while nothing has been measured."""
        return ahead * self._took_s / self._placed if self._placed else 0.0
