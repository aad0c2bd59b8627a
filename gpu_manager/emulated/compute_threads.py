"""An emulated GPU's threads: one does the long work of many, and each model has a share of them.

torch computes with several threads by OpenMP, which gives every thread that calls it a team. Where
the teams of a process have more threads than there are cores, even idle ones, OpenMP has each
thread sleep between two loops: two cores did 160 runs of mobilenet a second for one thread, 47
where another thread had computed once. So all other threads compute alone (`compute_alone`).
"""

import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

Result = TypeVar("Result")


class ComputeThread:
    """Does the work of whoever asks, one after the other; one thread asks at a time."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None  # once it runs

    def run(self, work: Callable[[], Result], adopt: Callable[[], None]) -> Result:
        """Do the work there, after `adopt`; here, where the system gives no further thread."""

        def adopted() -> Result:
            adopt()
            return work()

        if self._thread is None:
            # Gradients are a setting of each thread, as in those of channels.
            self._thread = ThreadPoolExecutor(1, "compute", torch.set_grad_enabled, (False,))
        try:
            job = self._thread.submit(adopted)
        except RuntimeError:
            self._thread = None
            return work()
        return job.result()

    def end(self) -> None:
        """Let the thread go; the next work has a new one."""
        if self._thread is not None:
            self._thread.shutdown(wait=False)
            self._thread = None


# A share of an emulated GPU: of the threads that torch computes with, and of their time.


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


# Shorter work gains little by helpers, and they look for more of it for some milliseconds, on cores
# that the functions use.
LONG_S = 0.005
_QUICK_BEFORE_TRIAL = 64
_NEWEST = 0.25  # the weight of the newest time


class WorkLength:
    """Knows how long one thread takes lately; long at first, so that a first call is not slow."""

    def __init__(self) -> None:
        self._alone_s = math.inf
        self._quick = _QUICK_BEFORE_TRIAL - 1

    @property
    def is_long(self) -> bool:
        """Whether the next call has helpers; now and then one has none, to learn what it takes."""
        return self._alone_s > LONG_S and self._quick < _QUICK_BEFORE_TRIAL

    def note(self, took_s: float, *, helped: bool) -> None:
        """Learn from a call; what takes long even with helpers needs no trial."""
        if helped:
            self._quick = self._quick + 1 if took_s <= LONG_S else 0
            return
        self._quick = 0
        if math.isinf(self._alone_s):
            self._alone_s = took_s
        else:  # a call that something else held up counts as twice as long at most
            newest_s = min(took_s, 2 * self._alone_s)
            self._alone_s += _NEWEST * (newest_s - self._alone_s)
