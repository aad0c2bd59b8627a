"""Finds a process that keeps an emulated path, which only one process has at a time.

A worker belongs to a tenant and may be hostile. The manager moves a byte now and then: if the byte
does not pass in seconds, who has the path has it for much longer than a block.
"""

import contextlib
import threading
import time

from gpu_manager.transfers.process_gate import kill_path_holder, path_holder
from gpu_manager.transfers.transfer_path import TransferAbandoned, TransferPath
from gpu_manager.transfers.transfer_schedule import TransferRank

_PATIENCE_S = 2.0
_BLOCKS = 200  # that may pass first; more than workers that wait at once


class PathWatch:
    """Watches one path; used by one thread."""

    def __init__(self, path: TransferPath, gate: int, patience_s: float = _PATIENCE_S) -> None:
        self._path = path
        self._gate = gate
        self._patience_s = max(patience_s, _BLOCKS * path.block_s)
        self._probe: threading.Thread | None = None
        self._since_s = 0.0
        self._suspect: int | None = None

    def check(self) -> int | None:
        """Look once; kill who keeps the path since the last look, and return its number."""
        if self._probe is None or not self._probe.is_alive():
            self._suspect = None
            self._begin()
            return None
        if time.monotonic() - self._since_s < self._patience_s:
            return None
        before, self._suspect = self._suspect, path_holder(self._gate)
        if self._suspect is None or self._suspect != before:
            return None
        kill_path_holder(self._gate, self._suspect)
        return self._suspect

    def _begin(self) -> None:
        """Move a byte, if another process has the path or waits for it."""
        self._probe = None
        if path_holder(self._gate) is not None:
            self._since_s = time.monotonic()
            self._probe = threading.Thread(target=self._move, name="watch-path", daemon=True)
            self._probe.start()

    def _move(self) -> None:
        with contextlib.suppress(TransferAbandoned):  # the path is closed
            self._path.transfer("watch", TransferRank.BACKGROUND).move(1)
