"""Traces modules in a background thread, so that no call waits for tracing.

Until a graph is traced, calls run locally. Background tracing executes nothing of the module: it
supports whole graphs only, and stops when the traced graph is about to run. A module that breaks
into several graphs cannot be traced without being run; its next call traces in the caller's thread.
"""

import atexit
import contextlib
import contextvars
import logging
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from types import SimpleNamespace
from typing import Any

from torch_shim.capture.roots import Abandoned, pauses
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


@contextmanager
def at_imports() -> Iterator[None]:
    """Let the tracing thread pause at each module that it imports inside the `with` block."""
    finder: Any = SimpleNamespace(find_spec=lambda *_: pauses.step())  # which finds none
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
