"""A pool of processes, one for each core, that starts with nothing of its caller's threads."""

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context


def core_pool(most: int | None = None) -> ProcessPoolExecutor:
    """A pool of at most so many processes.

    A fork of the caller would have its objects without its threads: gRPC's, once freed there, wait
    for a thread for ever.
    """
    return ProcessPoolExecutor(most, mp_context=get_context("forkserver"))
