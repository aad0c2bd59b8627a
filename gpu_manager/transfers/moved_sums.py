"""What has passed one direction of a GPU's PCIe, and how long it waited for others, by rank."""

import threading
from typing import NamedTuple

from gpu_manager.transfers.transfer_schedule import TransferRank


class Moved(NamedTuple):
    """Bytes that have passed, and the seconds for which they waited for their turns."""

    size_bytes: float = 0
    waited_s: float = 0.0


class MovedSums:
    """Sums of one direction of one GPU; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes: list[float] = [0.0] * len(TransferRank)
        self._waited_s = [0.0] * len(TransferRank)

    def add(self, rank: int, size_bytes: float, waited_s: float = 0.0) -> None:
        """Add a transfer, or a part of one."""
        with self._lock:
            self._bytes[rank] += size_bytes
            self._waited_s[rank] += waited_s

    def of(self, rank: TransferRank) -> Moved:
        """Return the sums of a rank."""
        with self._lock:
            return Moved(self._bytes[rank], self._waited_s[rank])

    def take(self) -> list[Moved]:
        """Return the sums of all ranks since the last call; empty if nothing has moved."""
        with self._lock:
            if not any(self._bytes):
                return []
            found = [Moved(*each) for each in zip(self._bytes, self._waited_s, strict=True)]
            self._bytes = [0.0] * len(TransferRank)
            self._waited_s = [0.0] * len(TransferRank)
            return found
