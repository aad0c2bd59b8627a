"""Which leases are in force in this worker, and how many calls of each are under way."""

import threading
from collections.abc import Callable

from gpu_manager.worker.errors import Refused
from torch_shim.protocol import Failure


class Leases:
    """The gate that every call passes. Thread-safe."""

    def __init__(self, ended: Callable[[int], None]) -> None:
        self._ended = ended  # told, on whatever thread, when an ended lease has no call left
        self._lock = threading.Lock()
        self._in_force: set[int] = set()
        self._under_way: dict[int, int] = {}

    def admit(self, lease: int) -> None:
        """Calls of this lease may run."""
        with self._lock:
            self._in_force.add(lease)

    def end(self, lease: int) -> None:
        """Let no further call in; `ended` is told at once where none is under way."""
        with self._lock:
            self._in_force.discard(lease)
            over = lease not in self._under_way
        if over:
            self._ended(lease)

    def check(self, lease: int) -> None:
        """Refuse the call unless its lease is still in force."""
        if lease not in self._in_force:
            raise Refused(Failure.LEASE, f"lease {lease!r:.40} is not in force here")

    def enter(self, lease: int) -> None:
        """A call begins; every one that was let in must leave."""
        with self._lock:
            self.check(lease)
            self._under_way[lease] = self._under_way.get(lease, 0) + 1

    def leave(self, lease: int) -> None:
        """A call has been answered."""
        with self._lock:
            left = self._under_way.pop(lease) - 1
            if left:
                self._under_way[lease] = left
            over = not left and lease not in self._in_force
        if over:
            self._ended(lease)
