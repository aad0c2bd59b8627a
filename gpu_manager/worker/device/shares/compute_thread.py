"""One thread that does the long work of many, since each thread has helpers of its own.

torch computes with several threads by OpenMP, which gives every thread that calls it a team. Where
the teams of a process have more threads than there are cores, even idle ones, OpenMP has each
thread sleep between two loops: two cores did 160 runs of mobilenet a second for one thread, 47
where another thread had computed once. So all other threads compute alone (`compute_alone`).
"""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")


class ComputeThread:
    """Does the work of whoever asks, one after the other; one thread asks at a time."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[_Job | None] | None = None  # of the thread, once it runs

    def run(self, work: Callable[[], Result], adopt: Callable[[], None]) -> Result:
        """Do the work there, after `adopt`; here, where the system gives no further thread."""
        if self._jobs is None and not self._start():
            return work()
        assert self._jobs is not None
        job = _Job(work, adopt)
        self._jobs.put(job)
        job.done.acquire()
        if job.error is not None:
            raise job.error
        result: Result = job.result
        return result

    def end(self) -> None:
        """Let the thread go; the next work has a new one."""
        if self._jobs is not None:
            self._jobs.put(None)
            self._jobs = None

    def _start(self) -> bool:
        jobs: SimpleQueue[_Job | None] = SimpleQueue()
        thread = threading.Thread(target=_serve, args=(jobs,), name="compute", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            return False
        self._jobs = jobs
        return True


class _Job:
    """One piece of work, and what became of it once `done` can be acquired."""

    __slots__ = ("adopt", "done", "error", "result", "work")

    def __init__(self, work: Callable[[], Any], adopt: Callable[[], None]) -> None:
        self.work = work
        self.adopt = adopt
        self.result: Any = None
        self.error: BaseException | None = None
        self.done = threading.Lock()
        self.done.acquire()

    def do(self) -> None:
        try:
            self.adopt()
            self.result = self.work()
        except BaseException as error:  # noqa: BLE001 - raised in the thread that asked
            self.error = error
        finally:
            self.done.release()


def _serve(jobs: "SimpleQueue[_Job | None]") -> None:
    torch.set_grad_enabled(False)  # a setting of each thread, as in those of channels
    while (job := jobs.get()) is not None:
        job.do()
        del job  # what it gave belongs to who asked
