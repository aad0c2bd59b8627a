"""Which leases are in force in this worker, and how many calls of each are under way."""

import threading
from collections import deque
from collections.abc import Callable

from gpu_manager.worker.call_errors import CallRefused
from torch_shim.wire.protocol import FailureKind

# A call may overtake the order that admits it, for they come over two sockets.
_PATIENCE_S = 0.5
_REMEMBERED = 256  # ended leases, whose calls are refused at once


class AdmittedLeases:
    """The gate that every call passes. Thread-safe."""

    def __init__(self, ended: Callable[[int], None], patience_s: float = _PATIENCE_S) -> None:
        self._tell_ended = ended  # on whatever thread, when an ended lease has no call left
        self._patience_s = patience_s
        self._changed = threading.Condition()
        self._in_force: dict[int, str] = {}  # the session that each lease was admitted for
        self._ended: deque[int] = deque(maxlen=_REMEMBERED)
        self._under_way: dict[int, int] = {}

    def admit(self, lease: int, session: str) -> None:
        """Calls of this session under this lease may run."""
        with self._changed:
            self._in_force[lease] = session
            self._changed.notify_all()

    def end(self, lease: int) -> None:
        """Let no further call in; `ended` is called at once where none is under way."""
        with self._changed:
            self._in_force.pop(lease, None)
            self._ended.append(lease)
            over = lease not in self._under_way
            self._changed.notify_all()
        if over:
            self._tell_ended(lease)

    def check(self, lease: int) -> None:
        """Refuse the call unless its lease is still in force."""
        if lease not in self._in_force:
            raise CallRefused(FailureKind.LEASE, f"lease {lease!r:.40} is not in force here")

    def enter(self, lease: int, session: str) -> None:
        """A call of this session begins; every one that was let in must leave.

        Lease numbers are easy to guess, so a call under another session's lease is refused: it
        would run on GPU time that the other session waited for.
        """
        with self._changed:
            if lease not in self._in_force:
                self._changed.wait_for(lambda: self._is_known(lease), self._patience_s)
            self.check(lease)
            if self._in_force[lease] != session:
                raise CallRefused(FailureKind.LEASE, f"lease {lease} is another session's")
            self._under_way[lease] = self._under_way.get(lease, 0) + 1

    def leave(self, lease: int) -> None:
        """A call has been answered."""
        with self._changed:
            left = self._under_way.pop(lease) - 1
            if left:
                self._under_way[lease] = left
            over = not left and lease not in self._in_force
        if over:
            self._tell_ended(lease)

    def _is_known(self, lease: int) -> bool:
        return lease in self._in_force or lease in self._ended
