"""Broken connections of one call: a call has no side effects, and may be repeated once."""

import time
from collections import Counter

from torch_shim.errors import ManagerUnreachable, OtherVersion, RemoteFailure, WireError
from torch_shim.process_report import report
from torch_shim.raised_failures import CRASHES
from torch_shim.wire.protocol import FailureKind

_MOST_CRASHES = 2
_MOST_LOST_MANAGERS = 2
# A worker's end is one crash, however many connections its manager still makes to it.
_MOST_TO_DEAD_WORKERS, _PAUSE_S = 20, 0.025
# Workers that end within this time of each other: a host without memory ends several at once.
_TOGETHER_S, _AFTERWARDS_S = 1.0, 0.5


class BrokenConnections:
    """Counts what broke under one call, and raises an error when that was too much."""

    def __init__(self) -> None:
        self.crashes = 0
        self._crashed_s = 0.0
        self._excused = False
        self._managers = 0
        self._by_worker: Counter[str] = Counter()

    def of_worker(self, worker: str, error: WireError) -> None:
        """Count a broken channel; wait, where the manager has not seen the worker's end yet.

        RemoteFailure if the call has lost as many workers as a call may.
        """
        self._by_worker[worker] += 1
        if 1 < self._by_worker[worker] <= _MOST_TO_DEAD_WORKERS:
            time.sleep(_PAUSE_S)
        else:
            self._crashed(error)

    def of_manager(self, error: WireError) -> None:
        """Count a GPU manager that was lost, or cannot be reached: no call is to blame for that.

        ManagerUnreachable or RemoteFailure if it happened as often as a call may bear, and
        OtherVersion at once: it speaks the same version next time.
        """
        if isinstance(error, OtherVersion):
            raise error
        report.add("repeated_calls", 1)
        self._managers += 1
        if self._managers < _MOST_LOST_MANAGERS:
            return
        if isinstance(error, ManagerUnreachable):
            raise error
        message = f"the GPU manager was lost {self._managers} times in this call ({error})"
        raise RemoteFailure(FailureKind.LOST, message) from error

    def _crashed(self, error: WireError) -> None:
        report.add("repeated_calls", 1)
        now_s = time.monotonic()
        if self.crashes and not self._excused and now_s < self._crashed_s + _TOGETHER_S:
            self._excused = True
            time.sleep(_AFTERWARDS_S)
            return
        self.crashes, self._crashed_s = self.crashes + 1, now_s
        if self.crashes >= _MOST_CRASHES:
            message = f"connections broke {self.crashes} times in this call ({error})"
            facts = {CRASHES: self.crashes}
            raise RemoteFailure(FailureKind.LOST, message, facts) from error
