"""Broken connections of one call: a call has no side effects, and may be repeated once."""

import time
from collections import Counter

from torch_shim.errors import RemoteFailure, WireError
from torch_shim.process_report import report
from torch_shim.wire.protocol import FailureKind

_MOST_CRASHES = 2
# A worker's end is one crash, however many connections its manager still makes to it.
_MOST_TO_DEAD_WORKERS, _PAUSE_S = 20, 0.025


class BrokenConnections:
    """Counts crashes, and raises RemoteFailure when there are too many for one call."""

    def __init__(self) -> None:
        self.crashes = 0
        self._by_worker: Counter[str] = Counter()

    def of_worker(self, worker: str, error: WireError) -> None:
        """Count a broken channel; wait, where the manager has not seen the worker's end yet."""
        self._by_worker[worker] += 1
        if 1 < self._by_worker[worker] <= _MOST_TO_DEAD_WORKERS:
            time.sleep(_PAUSE_S)
        else:
            self.crashed(error)

    def crashed(self, error: WireError) -> None:
        """Count a crash."""
        report.add("repeated_calls", 1)
        self.crashes += 1
        if self.crashes >= _MOST_CRASHES:
            message = f"connections broke {self.crashes} times in this call ({error})"
            raise RemoteFailure(FailureKind.LOST, message, {}) from error
