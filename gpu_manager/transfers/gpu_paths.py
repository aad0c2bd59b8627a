"""The two directions of a GPU's PCIe: the gates that workers get, and the manager's own paths."""

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple

from gpu_manager.transfers.path import Moved, MovedSums, PathSpeed, TransferAbandoned, TransferPath
from gpu_manager.transfers.process_gate import ProcessGate, kill_path_holder, make_gate, path_holder
from gpu_manager.transfers.schedule import TransferRank


class Direction(StrEnum):
    """Where bytes go."""

    TO_GPU = "to_gpu"
    TO_HOST = "to_host"


class WorkerLink(NamedTuple):
    """What the workers of a GPU get of its paths, and where their sums are added up.

    A gate's descriptor is that of a file of locks (`process_gate.py`).
    """

    gates: tuple[int, int]  # in the order of Direction
    speed: PathSpeed
    sums: tuple[MovedSums, MovedSums]


class SharedGates:
    """The gates and the manager's own paths of one GPU, or of all GPUs that share one link."""

    def __init__(self, speed: PathSpeed) -> None:
        self.speed = speed
        self.gates = (make_gate(), make_gate())
        # Only on emulated paths does the manager move bytes itself.
        self.paths = tuple(
            TransferPath(speed, ProcessGate(gate)) if speed.bytes_per_s else TransferPath()
            for gate in self.gates
        )
        self._watches = [
            PathWatch(path, gate)
            for path, gate in zip(self.paths, self.gates, strict=True)
            if path.is_limited
        ]

    def kill_who_keeps_them(self) -> list[int]:
        """Kill processes that keep a path from all others; return their numbers."""
        return [pid for watch in self._watches if (pid := watch.check()) is not None]

    def close(self) -> None:
        for path, gate in zip(self.paths, self.gates, strict=True):
            if path.close():
                os.close(gate)


class GpuPaths:
    """One GPU's paths; GPUs may share the gates, and each has sums of its own.

    Without gates, on an emulated GPU whose PCIe is not, nothing is moved and nothing is counted.
    """

    def __init__(self, gates: SharedGates | None = None) -> None:
        self.gates = gates
        self.sums = (MovedSums(), MovedSums())
        self.to_gpu = TransferPath() if gates is None else gates.paths[0]

    @property
    def link(self) -> WorkerLink | None:
        gates = self.gates
        return None if gates is None else WorkerLink(gates.gates, gates.speed, self.sums)

    def moved(self) -> Iterator[tuple[Direction, TransferRank, Moved]]:
        for direction, sums in zip(Direction, self.sums, strict=True):
            for rank in TransferRank:
                yield direction, rank, sums.of(rank)


# Finds a process that keeps an emulated path, which only one process has at a time.
#
# A worker belongs to a tenant and may be hostile. The manager moves a byte now and then: if the
# byte does not pass in seconds, who has the path has it for much longer than a block.

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
        self._probe = None
        if path_holder(self._gate) is not None:
            self._since_s = time.monotonic()
            self._probe = threading.Thread(target=self._move, name="watch-path", daemon=True)
            self._probe.start()

    def _move(self) -> None:
        with contextlib.suppress(TransferAbandoned):  # the path is closed
            self._path.transfer("watch", TransferRank.BACKGROUND).move(1)
