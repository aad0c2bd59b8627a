"""What this process has open: a test compares before and after."""

import contextlib
import gc
from pathlib import Path

OpenFiles = frozenset[tuple[str, str]]


def open_files() -> OpenFiles:
    """Each descriptor with what it leads to."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one that lists them
            found.add((entry.name, str(entry.readlink())))
    return frozenset(found)


def opened_since(before: OpenFiles) -> OpenFiles:
    """What is open now and was not then.

    What is closed meanwhile may be another test's: a socket that nobody refers to, a thread's end.
    What is garbage is closed first: a test that only waits does not set off a collection.
    """
    gc.collect()
    return open_files() - before
