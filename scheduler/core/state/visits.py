"""How often each waiting request was passed over, without touching the requests."""

from heapq import heappush, heappushpop, nlargest


class Visits:
    """Counts up to a limit.

    A policy passes over everything before a boundary. Requests keep their order, so a request's
    visits are the boundaries behind it, and it has reached the limit L if the L-th largest boundary
    is behind it: only L numbers must be kept. A request that comes back to its old place counts as
    if it had been there all along, which can only end its waiting sooner.
    """

    __slots__ = ("_boundaries",)

    def __init__(self) -> None:
        self._boundaries: list[int] = []

    def skip(self, boundary: int, limit: int) -> None:
        """Count one visit for everything before `boundary`."""
        if limit <= 0:
            return
        boundaries = self._boundaries
        if len(boundaries) < limit:
            heappush(boundaries, boundary)
            return
        self._trim(limit)
        heappushpop(boundaries, boundary)

    def clear(self) -> None:
        """Forget all visits: requests have another order from now on."""
        self._boundaries.clear()

    def reached(self, seq: int, limit: int) -> bool:
        """Whether the request at `seq` was passed over `limit` times or more."""
        if limit <= 0:
            return True
        self._trim(limit)
        boundaries = self._boundaries
        return len(boundaries) >= limit and boundaries[0] > seq

    def count(self, seq: int) -> int:
        """How often the request at `seq` was passed over, up to the limit in force."""
        return sum(1 for boundary in self._boundaries if boundary > seq)

    def _trim(self, limit: int) -> None:
        if len(self._boundaries) > limit:  # the limit was lowered
            self._boundaries[:] = sorted(nlargest(limit, self._boundaries))
