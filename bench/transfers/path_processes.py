"""A process that makes small transfers again and again, beside a load of this process, on one path.

The small ones are those of a call (`bench.transfers.calling_process`), the load is the manager's.
"""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

from gpu_manager.transfers.process_gate import ProcessGate, make_gate
from gpu_manager.transfers.transfer_path import PathSpeed, TransferAbandoned, TransferPath
from gpu_manager.transfers.transfer_schedule import TransferRank


@dataclass(frozen=True, slots=True)
class Tail:
    """Seconds of many transfers of one size."""

    seconds: tuple[float, ...]

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


class SharedLink:
    """A path whose calls are another process's, and whose loads are this one's."""

    def __init__(self, bytes_per_s: float, block_bytes: int) -> None:
        self._speed = PathSpeed(bytes_per_s, block_bytes)
        self._gate = make_gate()
        self._path = TransferPath(self._speed, ProcessGate(self._gate))

    def calls(self, size_bytes: int, times: int) -> Tail:
        """So many transfers of a call, one after the other, in a process of their own."""
        numbers = (self._gate, self._speed.bytes_per_s, self._speed.block_bytes, size_bytes, times)
        command = [sys.executable, "-m", "bench.transfers.calling_process", *map(str, numbers)]
        done = subprocess.run(
            command, pass_fds=(self._gate,), stdout=subprocess.PIPE, check=True, text=True
        )
        return Tail(tuple(float(line) for line in done.stdout.split()))

    def load_s(self, size_bytes: int) -> float:
        """The time of a load alone."""
        begin_s = time.monotonic()
        self._path.transfer("load").move(size_bytes)
        return time.monotonic() - begin_s

    @contextmanager
    def loading(self, rank: TransferRank = TransferRank.AWAITED) -> Iterator[list[int]]:
        """Load meanwhile, without an end; the list has the bytes that have passed."""
        over = threading.Event()
        passed = [0]

        def load() -> None:
            try:
                self._path.transfer("load", rank).move(
                    1 << 50,
                    lambda size: passed.__setitem__(0, passed[0] + size),
                    lambda: not over.is_set(),
                )
            except TransferAbandoned:
                return

        thread = threading.Thread(target=load, name="load")
        thread.start()
        try:
            yield passed
        finally:
            over.set()
            thread.join()
