"""A process that makes small transfers again and again, beside a load of this process, on one path.

The small ones are those of a call (`bench.transfers.calling_process`), the load is the manager's.
"""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

from gpu_manager.devices.loads import TransferRank
from gpu_manager.devices.paths import TransferAbandoned
from gpu_manager.worker.transfers.path import PathSpeed, TransferPath
from gpu_manager.worker.transfers.process_gate import ProcessGate, make_gate


@dataclass(frozen=True, slots=True)
class Tail:
    """Seconds of many transfers of one size."""

    seconds: tuple[float, ...]

    def __add__(self, other: "Tail") -> "Tail":
        return Tail(self.seconds + other.seconds)

    @property
    def median_s(self) -> float:
        """The median."""
        return median(self.seconds)

    @property
    def p99_s(self) -> float:
        """The 99th percentile."""
        return sorted(self.seconds)[len(self.seconds) * 99 // 100]

    @property
    def most_s(self) -> float:
        """The longest."""
        return max(self.seconds)


class EndlessLoad:
    """What has passed of a load."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Count from now on."""
        self._begin_s = time.monotonic()
        self._bytes = 0

    def passed(self, size_bytes: int) -> None:
        """Count a block."""
        self._bytes += size_bytes

    def share_of(self, bytes_per_s: float) -> float:
        """The share of a path that it had since its beginning."""
        return self._bytes / (time.monotonic() - self._begin_s) / bytes_per_s


class SharedLink:
    """A path whose calls are another process's, and whose loads are this one's."""

    def __init__(self, bytes_per_s: float, block_bytes: int) -> None:
        self._speed = PathSpeed(bytes_per_s, block_bytes)
        self._gate = make_gate()
        self._path = TransferPath(self._speed, ProcessGate(self._gate))

    def calls(
        self, size_bytes: int, times: int, begin: Callable[[], object] = lambda: None
    ) -> Tail:
        """So many transfers of a call, one after the other, in a process of their own.

        `begin` is called when the process is ready for the first one.
        """
        numbers = (self._gate, self._speed.bytes_per_s, self._speed.block_bytes, size_bytes, times)
        command = [sys.executable, "-m", "bench.transfers.calling_process", *map(str, numbers)]
        with subprocess.Popen(
            command, pass_fds=(self._gate,), stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            process.stdout.readline()
            begin()
            found = Tail(tuple(float(line) for line in process.stdout))
        assert len(found.seconds) == times, "the process has failed"
        return found

    def load_s(self, size_bytes: int) -> float:
        """The time of a load alone."""
        begin_s = time.monotonic()
        self._path.transfer("load").move(size_bytes)
        return time.monotonic() - begin_s

    @contextmanager
    def loading(self, rank: TransferRank = TransferRank.AWAITED) -> Iterator[EndlessLoad]:
        """Load meanwhile, without an end."""
        over = threading.Event()
        found = EndlessLoad()

        def load() -> None:
            try:
                transfer = self._path.transfer("load", rank)
                transfer.move(1 << 50, found.passed, lambda: not over.is_set())
            except TransferAbandoned:
                return

        thread = threading.Thread(target=load, name="load")
        thread.start()
        try:
            yield found
        finally:
            over.set()
            thread.join()
