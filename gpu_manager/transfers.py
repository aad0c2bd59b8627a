"""The two directions of a GPU's PCIe: the gates that workers get, and the manager's own paths."""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence

from cache_manager.model.ids import GpuId
from common.telemetry.metrics import MetricFamily, Values
from gpu_manager import metrics
from gpu_manager.devices.gpu_device import GpuDevice
from gpu_manager.devices.loads import LoadUrgency, TransferRank
from gpu_manager.devices.paths import (
    DiskPath,
    GpuPaths,
    PassedBytes,
    TransferAbandoned,
)
from gpu_manager.server.requests import ManagerFeature, ManagerSpace
from gpu_manager.worker.transfers.path import (
    Moved,
    MovedSums,
    PathSpeed,
    PathTransfer,
    TransferPath,
    disk_speed,
)
from gpu_manager.worker.transfers.process_gate import (
    ProcessGate,
    kill_path_holder,
    make_gate,
    path_holder,
)

log = logging.getLogger(__name__)


class GpuTransfers(ManagerFeature):
    """Has bytes take turns on their ways from disk, to GPUs and back, and counts them."""

    def __init__(self, manager: ManagerSpace) -> None:
        super().__init__(manager)
        self._paths: dict[GpuId, CountedPaths] = {}

    def paths(self, device: GpuDevice) -> GpuPaths | None:
        """Return a GPU's paths; None where nothing is to be had of them.

        An emulated PCIe is all GPUs' unless each is to have its own, as real ones do.
        """
        emulation = self.manager.settings.emulation
        if device.kind == "cuda":
            gates = SharedGates(PathSpeed())
        elif not emulation.pcie_bytes_per_s:
            return None
        elif self._paths and not emulation.pcie_per_gpu:
            gates = next(iter(self._paths.values())).gates
        else:
            gates = SharedGates(PathSpeed(emulation.pcie_bytes_per_s))
        paths = self._paths[device.id] = CountedPaths(gates)
        return paths

    def disk(self) -> DiskPath:
        return TransferPath(disk_speed(self.manager.settings.emulation.disk_bytes_per_s))

    def look(self) -> None:
        """Kill workers that keep an emulated PCIe for much longer than a transfer's turn."""
        for gates in {paths.gates for paths in self._paths.values()}:
            for watch in gates.watches:
                if (pid := watch.check()) is not None:
                    log.error("process %d kept a path between host and GPUs: it was killed", pid)

    def families(self) -> Iterator[MetricFamily]:
        moved, waited = Values(metrics.TRANSFERRED), Values(metrics.TRANSFER_WAIT)
        for gpu, paths in self._paths.items():
            for passed in paths.passed():
                labels = (gpu, passed.direction, passed.kind)
                moved.put(labels, passed.size_bytes)
                waited.put(labels, passed.waited_s)
        yield from (moved, waited)


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
        self.watches = [
            PathWatch(path, gate)
            for path, gate in zip(self.paths, self.gates, strict=True)
            if path.is_limited
        ]
        self._is_open = True

    def close(self) -> None:
        """Let no further block pass; nothing at the second call."""
        if self._is_open:
            self._is_open = False
            for path, gate in zip(self.paths, self.gates, strict=True):
                if path.close():
                    os.close(gate)


class CountedPaths(GpuPaths):
    """One GPU's paths; GPUs may share the gates, and each has sums of its own."""

    def __init__(self, gates: SharedGates) -> None:
        self.gates = gates
        self._sums = (MovedSums(), MovedSums())
        self._to_gpu = gates.paths[0]
        self.is_limited = self._to_gpu.is_limited
        self.numbers = float(gates.speed.bytes_per_s), float(gates.speed.block)
        self.descriptors = gates.gates

    def load(self, owner: str, urgency: LoadUrgency) -> PathTransfer:
        """Begin the transfer of a model, which is promoted with its load.

        The manager counts what it lets pass; the workers of real GPUs count.
        """
        sums = self._sums[0] if self.is_limited else None
        transfer = self._to_gpu.transfer(owner, urgency.rank, sums)
        urgency.listen(transfer.promote)
        transfer.promote(urgency.rank)  # it may have changed before
        return transfer

    def passed(self) -> Iterator[PassedBytes]:
        for direction, sums in zip(("to_gpu", "to_host"), self._sums, strict=True):
            for rank in TransferRank:
                yield PassedBytes(direction, rank.name.lower(), *sums.of(rank))

    def close(self) -> None:
        self.gates.close()

    def note_moved(self, *by_direction: Sequence[Sequence[float]]) -> None:
        for sums, told in zip(self._sums, by_direction, strict=True):
            for rank, moved in zip(TransferRank, told, strict=False):
                if len(moved) == len(Moved._fields):
                    sums.add(rank, *moved)


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
