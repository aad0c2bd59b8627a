"""A data path of an emulated node, its disk's or PCIe's, which all loads of the node share.

Bytes move in small pieces that take turns: loads that move at the same time have equal shares.
"""

import threading
import time
from collections.abc import Callable

_PIECE_S = 0.002  # that a piece takes, so that others wait briefly for their turns
_LEAST_PIECE_BYTES = 64 << 10
_MOST_PIECE_BYTES = 4 << 20
# A transfer that asks for its next piece this much later than it could, loses no time by that.
_LATE_S = 0.05

Clock = Callable[[], float]


class PathSchedule:
    """The times at which pieces have passed a path of so many bytes a second; pure."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_s = float("-inf")

    def pass_s(self, size_bytes: int, ready_s: float) -> float:
        """Take the next turn for a piece that is ready at this time; return when it has passed."""
        begin_s = max(self._free_s, ready_s)
        self._free_s = begin_s + size_bytes / self._bytes_per_s
        return self._free_s


class SharedPath:
    """One path; without a speed (0) bytes pass at once. Transfers may run in any thread."""

    def __init__(
        self,
        bytes_per_s: float = 0.0,
        now_s: Clock = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.is_limited = bytes_per_s > 0.0
        self.piece_bytes = _piece_bytes(bytes_per_s)
        self._schedule = PathSchedule(bytes_per_s)
        self._turns = threading.Lock()
        self._now_s = now_s
        self._sleep = sleep

    def transfer(self) -> "PathTransfer":
        """Begin a transfer."""
        return PathTransfer(self, self._now_s)

    def move(self, size_bytes: int, ready_s: float) -> float:
        """Move a piece that was ready at this time, and return when it had passed."""
        with self._turns:
            passed_s = self._schedule.pass_s(size_bytes, ready_s)
        self._sleep(max(0.0, passed_s - self._now_s()))
        return passed_s


class PathTransfer:
    """One load's bytes on a path; used by one thread."""

    def __init__(self, path: SharedPath, now_s: Clock) -> None:
        self._path = path
        self._now_s = now_s
        self._ready_s = now_s()

    def move(self, size_bytes: int) -> None:
        """Return when this many bytes more have passed.

        Waking late from one piece does not delay the next one.
        """
        if not self._path.is_limited:
            return
        while size_bytes > 0:
            count = min(size_bytes, self._path.piece_bytes)
            self._ready_s = max(self._ready_s, self._now_s() - _LATE_S)
            self._ready_s = self._path.move(count, self._ready_s)
            size_bytes -= count

    def resume(self) -> None:
        """Go on after a wait for something else: what comes next was not ready before."""
        self._ready_s = max(self._ready_s, self._now_s())


def _piece_bytes(bytes_per_s: float) -> int:
    if not bytes_per_s:
        return _MOST_PIECE_BYTES
    return min(_MOST_PIECE_BYTES, max(_LEAST_PIECE_BYTES, int(bytes_per_s * _PIECE_S)))
