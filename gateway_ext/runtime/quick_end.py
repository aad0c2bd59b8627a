"""How a process ends: with what its program has registered for it, at once, or with its parent."""

import atexit
import ctypes
import os
import signal
import sys
import threading
from contextlib import suppress
from typing import NoReturn

_SET_DEATH_SIGNAL = 1


def end_process(code: int) -> NoReturn:
    """End as Python does, but leave all modules to the system, as children of multiprocessing do.

    Taking them apart takes a fork with torch two seconds of a processor. A file that is still open
    is not flushed by it.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001 - waits for threads
    atexit._run_exitfuncs()  # noqa: SLF001 - Python has no public name for it
    end_at_once(code)


def die_with(parent: int) -> None:
    """End by SIGKILL when the parent ends; at once if it has ended already."""
    ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def end_at_once(code: int) -> NoReturn:
    """End without a wait for threads, and without what is registered with `atexit`."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # nobody reads it, or it is closed
            stream.flush()
    os._exit(code)
