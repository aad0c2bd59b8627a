"""Traces in a thread of its own, so that no call waits for it: meanwhile calls run locally.

Tracing executes nothing of the module: it is for whole graphs only, and the first one that is about
to run is abandoned. A module that breaks into several graphs cannot be traced without running it;
its next call traces in the caller's thread.
"""

import atexit
import contextlib
import contextvars
import logging
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

from torch_shim.errors import RemoteFailure, WireError

log = logging.getLogger("gpufaas")

# With Python's 5 ms the caller's operators would wait for the tracing thread one by one.
SWITCH_INTERVAL_S = 0.0002


class Stage(Enum):
    """How far the tracing of a root module has come."""

    NEW = "new"
    TRACING = "tracing"
    TRACED = "traced"
    BROKEN = "several graphs"
    SKIPPED = "no graph"


class Abandoned(Exception):
    """A traced graph was about to run in the tracing thread."""


Job = Callable[[], None]


class BackgroundTracer:
    """One thread that works off jobs; it starts with the first."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopping = False

    def submit(self, job: Job) -> None:
        """Have this done soon, as a part of the request that the caller serves."""
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
        """A child has no thread of its parent's, and does not do its jobs."""
        self._jobs = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread = None

    def _stop(self) -> None:
        """At the end of the process: a thread that is in C++ then would abort it."""
        with self._lock:
            thread, self._stopping = self._thread, True
        self._jobs.put(lambda: None)
        if thread is not None:
            thread.join()

    def _stopped(self) -> bool:
        return self._stopping

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            if self._stopped():
                return
            with frequent_switches():
                try:
                    job()
                except (RemoteFailure, WireError) as error:
                    log.info("preparing a graph ahead: %s", error)


def trace(compiled: Callable[..., Any], args: Any, kwargs: Any, cannot: type[Exception]) -> Stage:
    """Trace one call without running it; `cannot` is what Dynamo raises if that is impossible."""
    try:
        compiled(*args, **kwargs)
    except Abandoned:
        return Stage.TRACED
    except cannot as error:
        log.info("tracing needs the caller's thread: %s", str(error).partition("\n")[0])
    return Stage.BROKEN


@contextlib.contextmanager
def frequent_switches() -> Iterator[None]:
    """Let other threads have the interpreter more often."""
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(min(before_s, SWITCH_INTERVAL_S))
    try:
        yield
    finally:
        sys.setswitchinterval(before_s)
