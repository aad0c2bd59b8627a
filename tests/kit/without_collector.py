"""Code that runs without the collector of cycles, and what that leaves."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def without_collector() -> Iterator[Callable[[], int]]:
    """Yields what counts the objects that only the collector frees."""
    gc.collect()
    gc.disable()
    try:
        yield gc.collect
    finally:
        gc.enable()
