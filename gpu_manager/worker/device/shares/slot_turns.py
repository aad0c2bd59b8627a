"""Turns on the slots of a GPU: calls on other slots run at the same time, those on one do not.

As `device/gpu_turns.py`, once for each slot. A lease of several slots takes them in their order,
so that no two wait for each other.
"""

import os
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from gpu_manager.worker.device.gpu_turns import GpuTurns


class SlotTurns:
    """One worker's way to the turns on its leases' slots. Thread-safe."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        # The kernel's locks are a process's: they do not keep its own threads apart.
        self._threads: defaultdict[int, threading.Lock] = defaultdict(threading.Lock)

    def close(self) -> None:
        """Close the descriptor; no call may have a turn."""
        os.close(self._descriptor)

    @contextmanager
    def turn(self, slots: Sequence[int]) -> Iterator[None]:
        """Wait until all of these are free, have them, and leave them."""
        with ExitStack() as held:
            for slot in sorted(slots):
                held.enter_context(self._threads[slot])
                held.enter_context(GpuTurns(self._descriptor, slot))
            yield


class NoSlotTurns:
    """Where leases have the whole GPU: there is nothing to wait for."""

    @contextmanager
    def turn(self, slots: Sequence[int]) -> Iterator[None]:
        """Wait for nothing."""
        del slots
        yield
