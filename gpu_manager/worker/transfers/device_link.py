"""What a worker's transfers pass on their way to its GPU and back; the manager tells it once.

On an emulated PCIe every byte takes its time. On a real GPU the hardware moves them; large inputs
and results are announced, so that loads make way, and loads have their turns block by block.
"""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from gpu_manager.devices.loads import LoadUrgency, TransferRank
from gpu_manager.devices.paths import DeviceLink
from gpu_manager.worker.features import (
    ModelFeature,
    ModelSpace,
    TellManager,
    WorkerFeature,
    WorkerSpace,
)
from gpu_manager.worker.orders import BytesMoved, LoadImage
from gpu_manager.worker.transfers.path import Moved, MovedSums, PathSpeed, TransferPath
from gpu_manager.worker.transfers.process_gate import ProcessGate

_NOTHING = nullcontext()
_REPORT_S = 0.2  # between two reports of what was moved
_GATES = 2  # to the GPU and from it


class WorkerTransfers(WorkerFeature):
    """Has a worker's bytes take turns, and tells the manager how many have passed."""

    def __init__(self, worker: WorkerSpace) -> None:
        super().__init__(worker)
        self.link = self._link = PathLink()

    def begin(self, model: ModelSpace) -> ModelFeature:
        del model
        return _MovedReports(self._link, self.worker.tell)


class _MovedReports(ModelFeature):
    """Reports what all models have moved, where one has reason to report."""

    def __init__(self, link: "PathLink", tell: TellManager) -> None:
        self._link = link
        self._tell = tell

    def loaded(self, order: LoadImage) -> None:
        del order
        self.report(at_once=True)

    def report(self, *, at_once: bool = False) -> None:
        to_gpu, to_host = self._link.take_moved(at_once=at_once)
        if to_gpu or to_host:
            self._tell(BytesMoved([*map(list, to_gpu)], [*map(list, to_host)]))


class PathLink(DeviceLink):
    """A link by two paths; before it is connected everything passes at once."""

    def __init__(self) -> None:
        self.to_gpu = TransferPath()
        self.to_host = TransferPath()
        self._is_connected = False
        self._sums = (MovedSums(), MovedSums())
        self._told_s = 0.0

    def connect(self, numbers: Sequence[float], descriptors: Sequence[int]) -> Sequence[int]:
        """Take ownership of the gates' descriptors, which come first."""
        if not numbers:
            return descriptors
        bytes_per_s, block_bytes = numbers
        speed = PathSpeed(bytes_per_s, int(block_bytes))
        self.to_gpu, self.to_host = (
            TransferPath(speed, ProcessGate(gate)) for gate in descriptors[:_GATES]
        )
        self._is_connected = True
        return descriptors[_GATES:]

    def copying_input(
        self, size_bytes: int, wait: Callable[[], None] = lambda: None, owner: str = ""
    ) -> AbstractContextManager[None]:
        """Real loads make way for an input that is longer than a block, and it is waited for."""
        path, rank = self.to_gpu, TransferRank.CALL
        passes = self._passes_now(path, owner, rank, self._sums[0], size_bytes)
        return _NOTHING if passes else _announced(path, rank, wait)

    def copying_output(
        self, size_bytes: int, rank: TransferRank = TransferRank.CALL, owner: str = ""
    ) -> AbstractContextManager[None]:
        passes = self._passes_now(self.to_host, owner, rank, self._sums[1], size_bytes)
        return _NOTHING if passes else self.to_host.present(rank)

    def load_blocks(
        self, owner: str, size_bytes: int, urgency: LoadUrgency
    ) -> Generator[int, None, None]:
        return self.to_gpu.transfer(owner, urgency.rank, self._sums[0]).blocks(size_bytes)

    def take_moved(self, *, at_once: bool = False) -> tuple[list[Moved], list[Moved]]:
        """Return what was moved since the last time, if that was a while ago."""
        now_s = time.monotonic()
        if not self._is_connected or (not at_once and now_s - self._told_s < _REPORT_S):
            return [], []
        self._told_s = now_s
        to_gpu, to_host = self._sums
        return to_gpu.take(), to_host.take()

    def _passes_now(
        self, path: TransferPath, owner: str, rank: TransferRank, sums: MovedSums, size_bytes: int
    ) -> bool:
        """Count bytes, and let them pass an emulated path; False if others have to make way."""
        if path.is_limited:
            path.transfer(owner, rank, sums).move(size_bytes)
            return True
        sums.add(rank, size_bytes)
        # What is no longer than a block is over before a load could make way.
        return not path.has_turns or size_bytes <= path.block_bytes


@contextmanager
def _announced(path: TransferPath, rank: TransferRank, wait: Callable[[], None]) -> Iterator[None]:
    with path.present(rank):
        yield
        wait()
