"""For how long calls have run under each lease in this process, whichever models they use."""

import threading
import time
from collections import defaultdict
from collections.abc import Callable


class LeaseClocks:
    """A lease's clock runs while calls are under way; those at once count once. Thread-safe."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._lock = threading.Lock()
        self._under_way: defaultdict[int, int] = defaultdict(int)
        self._since_s: dict[int, float] = {}  # of leases with calls under way: what is not counted
        self._computed_s: defaultdict[int, float] = defaultdict(float)  # and what nobody has taken

    def begin(self, lease: int) -> None:
        """A call under this lease begins."""
        with self._lock:
            self._under_way[lease] += 1
            self._since_s.setdefault(lease, self._now_s())

    def end(self, lease: int) -> None:
        """A call that has begun is over."""
        with self._lock:
            self._count(lease)
            self._under_way[lease] -= 1
            if not self._under_way[lease]:
                del self._under_way[lease], self._since_s[lease]

    def take(self, lease: int) -> float:
        """For how long calls have run under a lease since this was last asked."""
        with self._lock:
            if lease in self._since_s:
                self._count(lease)
            return self._computed_s.pop(lease, 0.0)

    def _count(self, lease: int) -> None:
        since_s, self._since_s[lease] = self._since_s[lease], self._now_s()
        self._computed_s[lease] += self._since_s[lease] - since_s
