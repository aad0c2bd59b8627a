"""The end of a process: what its program has registered for it runs, and nothing is taken apart."""

import atexit
import os
import sys
import threading
from contextlib import suppress
from typing import NoReturn


def end_process(code: int) -> NoReturn:
    """End as Python does, but leave all modules to the system, as children of multiprocessing do.

    Taking them apart takes a fork with torch two seconds of a processor. A file that is still open
    is not flushed by it.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001 - waits for threads
    atexit._run_exitfuncs()  # noqa: SLF001 - Python has no public name for it
    end_at_once(code)


def end_at_once(code: int) -> NoReturn:
    """End without a wait for threads, and without what is registered with `atexit`."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # nobody reads it, or it is closed
            stream.flush()
    os._exit(code)
