"""What a worker's transfers pass on their way to its GPU and back; the manager tells it once.

On an emulated PCIe every byte takes its time. On a real GPU the hardware moves them; large inputs
and results are announced, so that loads make way, and loads have their turns block by block.
"""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from gpu_manager.transfers.loads import LoadUrgency
from gpu_manager.transfers.path import Moved, MovedSums, PathSpeed, TransferPath
from gpu_manager.transfers.process_gate import ProcessGate
from gpu_manager.transfers.schedule import TransferRank

_NOTHING = nullcontext()
_REPORT_S = 0.2  # between two reports of what was moved

# Sends the sums of both directions.
SendSums = Callable[[list[Moved], list[Moved]], None]


class DeviceLink:
    """Both directions of a process; all its models share them. Thread-safe."""

    def __init__(self) -> None:
        self.is_limited = False  # whether bytes take the time of an emulated path
        self.to_gpu = TransferPath()
        self.to_host = TransferPath()
        self._is_connected = False
        self._sums = (MovedSums(), MovedSums())
        self._told_s = 0.0

    def connect(self, gates: Sequence[int], speed: PathSpeed) -> None:
        """Use these gates from now on; takes ownership of the descriptors."""
        self.to_gpu, self.to_host = (TransferPath(speed, ProcessGate(gate)) for gate in gates)
        self._is_connected = True
        self.is_limited = speed.bytes_per_s > 0.0

    def pass_input(self, owner: str, size_bytes: int) -> None:
        """Return when so many bytes of a call's input have passed an emulated path."""
        self.to_gpu.transfer(owner, TransferRank.CALL, self._sums[0]).move(size_bytes)

    def pass_output(
        self, owner: str, size_bytes: int, rank: TransferRank = TransferRank.CALL
    ) -> None:
        self.to_host.transfer(owner, rank, self._sums[1]).move(size_bytes)

    def copying_input(
        self, size_bytes: int, wait: Callable[[], None]
    ) -> AbstractContextManager[None]:
        """A real GPU is given a call's input meanwhile.

        Loads make way for one that is longer than a block, and it is waited for.
        """
        self._sums[0].add(TransferRank.CALL, size_bytes)
        if not self.to_gpu.has_turns or size_bytes <= self.to_gpu.block_bytes:
            return _NOTHING  # it is over before a load could make way
        return _announced(self.to_gpu, TransferRank.CALL, wait)

    def copying_output(
        self, size_bytes: int, rank: TransferRank = TransferRank.CALL
    ) -> AbstractContextManager[None]:
        """A real GPU gives so many bytes back meanwhile, until they are there."""
        self._sums[1].add(rank, size_bytes)
        if not self.to_host.has_turns or size_bytes <= self.to_host.block_bytes:
            return _NOTHING
        return self.to_host.present(rank)

    def load_blocks(
        self, owner: str, size_bytes: int, urgency: LoadUrgency
    ) -> Generator[int, None, None]:
        """Yield the size of each block of a part of a model, when it may be copied."""
        return self.to_gpu.transfer(owner, urgency.rank, self._sums[0]).blocks(size_bytes)

    def report(self, send: SendSums, *, at_once: bool = False) -> None:
        """Send what was moved since the last report, if that was a while ago."""
        if not self._is_connected:
            return
        now_s = time.monotonic()
        if not at_once and now_s - self._told_s < _REPORT_S:
            return
        self._told_s = now_s
        to_gpu, to_host = (sums.take() for sums in self._sums)
        if to_gpu or to_host:
            send(to_gpu, to_host)


@contextmanager
def _announced(path: TransferPath, rank: TransferRank, wait: Callable[[], None]) -> Iterator[None]:
    with path.present(rank):
        yield
        wait()
