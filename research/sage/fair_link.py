"""A path that several transfers share evenly: the database's, PCIe, or the GPU's cores."""

from heapq import heappop, heappush
from math import inf
from typing import Generic, TypeVar

_Owner = TypeVar("_Owner")


class FairLink(Generic[_Owner]):
    """Work in seconds that it would take alone; n pieces at once each take n times as long.

    With `contention`, the n of them together are slower than one alone by the factor
    1 + contention * (n - 1), as a disk is whose head moves between files.
    """

    __slots__ = ("_contention", "_waiting", "_served_s", "_at_s", "_order", "ends_s")

    def __init__(self, contention: float = 0.0) -> None:
        self._contention = contention
        # How much service ends each piece of work, counted as what every piece got so far.
        self._waiting: list[tuple[float, int, _Owner]] = []
        self._served_s = 0.0
        self._at_s = 0.0
        self._order = 0
        self.ends_s = inf

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, work_s: float, owner: _Owner, now: float) -> None:
        """Begin a piece of work."""
        self._serve_until(now)
        self._order += 1
        heappush(self._waiting, (self._served_s + work_s, self._order, owner))
        self._plan(now)

    def take(self, now: float) -> _Owner:
        """The owner of the work that ends now, at `ends_s`."""
        due_s, _, owner = heappop(self._waiting)
        # What was due, not what the clock says: rounding must not grow over a day.
        self._served_s, self._at_s = due_s, now
        self._plan(now)
        return owner

    def _serve_until(self, now: float) -> None:
        if self._waiting:
            self._served_s += (now - self._at_s) / self._slowness()
        self._at_s = now

    def _plan(self, now: float) -> None:
        if not self._waiting:
            self.ends_s = inf
            return
        left_s = max(0.0, self._waiting[0][0] - self._served_s)
        self.ends_s = now + left_s * self._slowness()

    def _slowness(self) -> float:
        many = len(self._waiting)
        return many * (1.0 + self._contention * (many - 1))
