"""The two directions of a GPU's PCIe: the gates that workers get, and the manager's own paths."""

import os
from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple

from gpu_manager.transfers.moved_sums import Moved, MovedSums
from gpu_manager.transfers.path_watch import PathWatch
from gpu_manager.transfers.process_gate import ProcessGate, make_gate
from gpu_manager.transfers.transfer_path import PathSpeed, TransferPath
from gpu_manager.transfers.transfer_schedule import TransferRank


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
        """Let nothing pass any more, and close the files of locks."""
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
        """What a worker of this GPU gets."""
        gates = self.gates
        return None if gates is None else WorkerLink(gates.gates, gates.speed, self.sums)

    def moved(self) -> Iterator[tuple[Direction, TransferRank, Moved]]:
        """Yield the sums of each direction and rank."""
        for direction, sums in zip(Direction, self.sums, strict=True):
            for rank in TransferRank:
                yield direction, rank, sums.of(rank)
