"""How long a lease of a function waits for its session while others wait. Pure.

A function that has no thread for its calls claims none of the leases that are granted for them. If
each of these waited for its whole time, the calls that have the threads, and wait for leases
themselves behind them, would not end in time either. So each lease in vain halves the time of
the function's next ones, and each that is claimed doubles it again.
"""

from collections import OrderedDict

from scheduler.api import LeaseId

MOST_HALVINGS = 4
_MOST_FUNCTIONS = _MOST_ENDED = 1_024


class ClaimPatience:
    """The functions whose last leases nobody claimed."""

    __slots__ = ("_ended", "_halvings")

    def __init__(self) -> None:
        self._halvings: OrderedDict[str, int] = OrderedDict()
        # Leases that ended so, and until when the usual time would have lasted.
        self._ended: OrderedDict[LeaseId, tuple[str, float]] = OrderedDict()

    def of(self, function: str, usual_s: float) -> float:
        """The time that the function's sessions have; `usual_s` for most."""
        return usual_s / (1 << self._halvings.get(function, 0))

    def in_vain(self, function: str, lease: LeaseId, now_s: float, usual_s: float) -> None:
        """Nobody has claimed this lease in time."""
        self._ended[lease] = function, now_s + usual_s - self.of(function, usual_s)
        if len(self._ended) > _MOST_ENDED:
            self._ended.popitem(last=False)
        halvings = self._halvings.pop(function, 0)
        self._halvings[function] = min(halvings + 1, MOST_HALVINGS)
        if len(self._halvings) > _MOST_FUNCTIONS:
            self._halvings.popitem(last=False)

    def claimed(self, function: str, times: int = 1) -> None:
        """A lease of the function was claimed in its time."""
        halvings = self._halvings.get(function, 0) - times
        if halvings > 0:
            self._halvings[function] = halvings
        else:
            self._halvings.pop(function, None)

    def asked_for(self, lease: LeaseId, now_s: float) -> None:
        """A session shows the token of a lease that is over: did it only lack the usual time?

        Then the lease ended too early, and the next one shall have more time than this one had.
        """
        ended = self._ended.pop(lease, None)
        if ended is not None and now_s <= ended[1]:
            self.claimed(ended[0], times=2)
