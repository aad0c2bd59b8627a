"""Code that runs without the collector of cycles, and what that leaves."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_OURS = frozenset({"common", "gateway_ext", "gpu_manager", "scheduler", "torch_shim"})


@contextmanager
def without_collector() -> Iterator[Callable[[], int]]:
    """Yields what counts the objects that only the collector frees."""
    gc.collect()
    gc.disable()
    try:
        yield gc.collect
    finally:
        gc.enable()


def garbage_of_ours() -> int:
    """How many objects of our own types only the collector frees; others' code leaves some too."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    gc.set_debug(0)
    found = sum(type(each).__module__.partition(".")[0] in _OURS for each in gc.garbage)
    gc.garbage.clear()
    gc.collect()
    return found
