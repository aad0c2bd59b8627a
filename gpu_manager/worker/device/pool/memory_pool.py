"""The pool of an emulated GPU, as Python sees it: installed once in a process, used by models."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Address space, of which only what is used counts.
_MOST_BYTES, _LEAST_BYTES = 1 << 38, 1 << 32


class MemoryPool:
    """Where this process's tensors come from, once it is installed. Thread-safe.

    A model is a number from 1; what no model asked for is number 0's.
    """

    def __init__(self, library: Path) -> None:
        """Load the library, which changes nothing yet."""
        self._calls = ctypes.CDLL(str(library))
        for name in ("used_by", "peak_of", "forget", "used", "take_peak", "trim"):
            getattr(self._calls, f"gpufaas_pool_{name}").restype = ctypes.c_size_t
        self._installed = False

    def install(self) -> None:
        """Have torch take every tensor from the pool from now on; without effect if it does."""
        size_bytes = _MOST_BYTES
        while not self._installed:
            if self._calls.gpufaas_pool_install(ctypes.c_size_t(size_bytes)):
                self._installed = True
            elif size_bytes <= _LEAST_BYTES:
                raise MemoryError(f"no address space for a pool of {size_bytes} bytes")
            size_bytes //= 2

    @contextmanager
    def of(self, model: int) -> Iterator[None]:
        """What this thread allocates meanwhile is the model's."""
        before = self._calls.gpufaas_pool_enter(model)
        try:
            yield
        finally:
            self._calls.gpufaas_pool_leave(model, before)

    def adopt_thread(self, model: int) -> None:
        """What this thread allocates from now on is the model's."""
        self._calls.gpufaas_pool_adopt_thread(model)

    def limit(self, model: int, limit_bytes: int) -> None:
        """Refuse the model more than this from now on, as torch refuses what is not there."""
        self._calls.gpufaas_pool_limit(model, ctypes.c_size_t(limit_bytes))

    def limit_together(self, most_bytes: int) -> None:
        """Refuse all models more than this at once from now on, as memory that others have."""
        self._calls.gpufaas_pool_limit_together(ctypes.c_size_t(most_bytes))

    def used_by(self, model: int) -> int:
        """The bytes that the model has now."""
        return int(self._calls.gpufaas_pool_used_by(model))

    def watch(self, model: int) -> None:
        """Begin to look for the most bytes that the model has."""
        self._calls.gpufaas_pool_watch(model)

    def peak_of(self, model: int) -> int:
        """The most bytes that the model had since it has been watched."""
        return int(self._calls.gpufaas_pool_peak_of(model))

    def forget(self, model: int) -> int:
        """Close the account of a model that has left; return the bytes that it still has."""
        return int(self._calls.gpufaas_pool_forget(model))

    @property
    def used_bytes(self) -> int:
        """The bytes of all blocks in use, each in whole pages if it is large."""
        return int(self._calls.gpufaas_pool_used())

    def take_peak(self) -> int:
        """The most bytes in use since this was last asked."""
        return int(self._calls.gpufaas_pool_take_peak())

    def trim(self, keep_bytes: int) -> int:
        """Give free pages back to the system until at most `keep_bytes` are kept; return how many.

        Blocks that are smaller than a page cannot be given back alone.
        """
        return int(self._calls.gpufaas_pool_trim(ctypes.c_size_t(keep_bytes)))
