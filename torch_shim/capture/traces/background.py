"""Traces modules in a background thread, so that no call waits for tracing.

Until a graph is traced, calls run locally. Background tracing executes nothing of the module: it
supports whole graphs only, and stops when the traced graph is about to run. A module that breaks
into several graphs cannot be traced without being run; its next call traces in the caller's thread.
"""

import atexit
import contextlib
import contextvars
import importlib.abc
import logging
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from torch_shim.errors import GpuQueueFull, GpuUnavailable, QuotaUsedUp, RemoteFailure, WireError

log = logging.getLogger("gpufaas")

# With Python's default of 5 ms each of the caller's operators would wait for the tracing thread.
SWITCH_INTERVAL_S = 0.0002
_NO_GPU_NOW = (RemoteFailure, WireError, QuotaUsedUp, GpuQueueFull, GpuUnavailable)


class Stage(Enum):
    """The progress of tracing one root module."""

    NEW = "new"
    TRACING = "tracing"
    TRACED = "traced"
    BROKEN = "several graphs"
    SKIPPED = "no graph"


class Abandoned(Exception):
    """A traced graph was about to run in the tracing thread."""


class ReadsChanged(Exception):
    """Another thread changed what a trace in the background had read."""


Job = Callable[[], None]


class BackgroundTracer:
    """Runs jobs one by one in a thread that starts with the first job."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopping = False

    def submit(self, job: Job) -> None:
        """Queue a job; it runs in the caller's context, as part of the caller's request."""
        context = contextvars.copy_context()
        self._jobs.put(lambda: context.run(job))
        with self._lock:
            if self._thread is None and not self._stopping:
                self._thread = threading.Thread(
                    target=self._work, name="gpufaas-tracer", daemon=True
                )
                self._thread.start()
                atexit.register(self._stop)

    def after_fork(self) -> None:
        """Reset the state in a forked child, which has neither the parent's thread nor its jobs."""
        self._jobs = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread = None
        pauses.after_fork()

    def _stop(self) -> None:
        """Stop at process exit: a thread that is still in C++ code would abort the process."""
        with self._lock:
            thread, self._stopping = self._thread, True
        self._jobs.put(lambda: None)
        if thread is not None:
            thread.join()

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            if self._stopping:
                return
            with frequent_switches(), pauses.tracing():
                try:
                    job()
                except _NO_GPU_NOW as error:
                    log.info("cannot prepare a graph in advance: %s", error)
                except Exception:
                    # The thread goes on: without it no model of the process would be traced.
                    log.exception("a trace in the background failed")


def trace(compiled: Callable[..., Any], args: Any, kwargs: Any) -> Stage:
    """Trace one call without running it; return NEW if the trace has to be made again."""
    try:
        compiled(*args, **kwargs)
    except Abandoned:
        return Stage.TRACED
    except ReadsChanged:
        return Stage.NEW
    except Exception as error:  # noqa: BLE001 - Dynamo's own, or whatever the traced code raises
        log.info("tracing must run in the caller's thread: %s", str(error).partition("\n")[0])
    return Stage.BROKEN


@contextlib.contextmanager
def frequent_switches() -> Iterator[None]:
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(min(before_s, SWITCH_INTERVAL_S))
    try:
        yield
    finally:
        sys.setswitchinterval(before_s)


# A model's call and the tracing thread both need the interpreter's lock, which goes from one to the
# other at every operator. The tracing thread asks at each of its steps whether to pause. It goes on
# when no call is under way, when those under way wait for something (a worker, or what this thread
# holds), and in any case for a share of the time.

# Of the time in which calls are under way without a gap, the tracing thread runs a tenth.
RUN_S = 0.004
PAUSE_S = 0.036
_LOOK_S = 0.004  # between two looks at what the callers do
_RUNNING = "RD"  # the states of a thread that has work: running or ready, and at the disk


class Pauses:
    """The threads inside a model's call, and the tracing thread that makes way for them."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        is_running: "Callable[[int], bool] | None" = None,
    ) -> None:
        self._clock = clock
        self._is_running = is_running or _is_running
        self._none_left = threading.Condition()
        self._callers: dict[int, int] = {}  # by the system's number of a thread, how deep it is
        self._thread: int | None = None  # that traces, if one does
        self._runs_until_s = 0.0
        self._due_s = 0.0  # when the tracing thread runs again, whatever the others do

    def begin_call(self) -> None:
        number = threading.get_native_id()
        self._callers[number] = self._callers.get(number, 0) + 1  # its own entry: without a lock

    def end_call(self) -> None:
        number = threading.get_native_id()
        depth = self._callers.pop(number, 1) - 1
        if depth:
            self._callers[number] = depth
        if self._thread is not None and not self._callers:
            with self._none_left:
                self._none_left.notify_all()

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Let this thread pause at its steps inside the `with` block."""
        self._thread = threading.get_ident()
        try:
            yield
        finally:
            self._thread = None

    def step(self) -> None:
        """Pause if this is the tracing thread, and others shall run now."""
        if not self._callers or self._thread != threading.get_ident():
            return
        if self._clock() >= self._runs_until_s and self._wait():
            self._runs_until_s = self._clock() + RUN_S
            self._due_s = self._runs_until_s + PAUSE_S

    def _wait(self) -> bool:
        """Wait while callers have work; return whether to run beside those that are left."""
        idle_looks = 0
        while self._clock() < self._due_s and idle_looks < 2:  # noqa: PLR2004 - one may be chance
            with self._none_left:
                if self._none_left.wait_for(lambda: not self._callers, _LOOK_S):
                    return False
            running = any(map(self._is_running, list(self._callers)))
            idle_looks = 0 if running else idle_looks + 1
        return True

    def after_fork(self) -> None:
        """Forget calls and threads of the parent, of which a forked child has none."""
        self._none_left = threading.Condition()
        self._callers = {}
        self._thread = None


def _is_running(number: int) -> bool:
    """Whether a thread of this process has work, and does not wait for something."""
    try:
        with open(f"/proc/self/task/{number}/stat", "rb") as file:  # noqa: PTH123 - at every look
            found = file.read()
    except OSError:  # it has ended
        return False
    return found.rpartition(b")")[2].split()[0].decode() in _RUNNING


pauses = Pauses()


class _PausingFinder(importlib.abc.MetaPathFinder):
    """Finds no module, but lets the tracing thread pause before each module that it imports."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return None, after a pause perhaps."""
        del fullname, path, target
        pauses.step()
        return None


@contextmanager
def at_imports() -> Iterator[None]:
    """Let the tracing thread pause at each module that it imports inside the `with` block."""
    finder = _PausingFinder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
