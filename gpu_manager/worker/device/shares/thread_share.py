"""A share of an emulated GPU: of the threads that torch computes with, and of their time."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def compute_alone() -> None:
    """Have no helpers in calls of this thread.

    torch keeps the number for each thread that calls it. A thread's first call would set the number
    that any thread set last, so that call comes before.
    """
    torch.get_num_threads()
    torch.set_num_threads(1)


class ThreadShare:
    """Some of the threads that a process computes with; a part of one is one that pauses."""

    def __init__(self, share: float, all_threads: int, most_threads: int = 0) -> None:
        """No more than `most_threads` compute, unless that is 0."""
        exact = min(share * all_threads, most_threads or all_threads)
        self.threads = max(1, math.ceil(exact - 1e-9))
        self._pause = self.threads / exact - 1.0  # seconds for each second of computing

    def adopt_thread(self) -> None:
        """Compute with so many threads in calls of this one."""
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Compute, and then pause for as long as the threads had more than their share."""
        begun_s = time.perf_counter()
        try:
            yield
        finally:
            pause_s = self._pause * (time.perf_counter() - begun_s)
            if pause_s > 0:
                time.sleep(pause_s)
