"""Turns on a GPU whose slot holds several leases: locks that its workers share.

A worker first takes the place next in line, and releases that place when it has the turn: so a
worker that has just had a turn, and needs another one, stands behind a waiting one.
"""

import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

from gpu_manager.kernel_locks import kill_lock_holder, lock, lock_holder, make_lock_file, unlock

# The bytes that are locked, of each slot.
_NEXT, _TURN, _BYTES = 0, 1, 2
_FREE = nullcontext()


def make_turns() -> int:
    """The descriptor of a file for one GPU, which no process can write to."""
    return make_lock_file("gpufaas-turns")


def turn_holder(descriptor: int, slot: int = 0) -> int | None:
    """The process that has the turn on a slot, or is next in line; None where there is none."""
    holder = lock_holder(descriptor, slot * _BYTES, _BYTES)
    return None if holder is None else holder.pid


def kill_turn_holder(descriptor: int, pid: int, slot: int = 0) -> None:
    """Kill this process, if it has the turn still: its number may be another's by now."""
    kill_lock_holder(descriptor, slot * _BYTES, _BYTES, pid)


class GpuTurns:
    """One worker's way to its turns: `with turns:` waits for one and ends it.

    One thread of the process at a time. A process that closes the descriptor, or a copy of it,
    loses its turn. The turns are those of one slot, where a GPU has several.
    """

    def __init__(self, descriptor: int, slot: int = 0) -> None:
        self._descriptor = descriptor
        self._next, self._turn = slot * _BYTES + _NEXT, slot * _BYTES + _TURN

    def __enter__(self) -> None:
        descriptor = self._descriptor
        lock(descriptor, self._next)
        try:
            lock(descriptor, self._turn)
        finally:
            unlock(descriptor, self._next)

    def __exit__(self, *_: object) -> None:
        unlock(self._descriptor, self._turn)


class SlotTurns:
    """One worker's way to the turns on its leases' slots. Thread-safe.

    A lease of several slots takes them in their order, so that no two wait for each other. Where
    leases have the whole GPU there is no descriptor, and nothing to wait for.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        self._descriptor = descriptor
        # The kernel's locks are a process's: they do not keep its own threads apart.
        self._threads: defaultdict[int, threading.Lock] = defaultdict(threading.Lock)

    def turn(self, slots: Sequence[int]) -> AbstractContextManager[None]:
        """Wait until all of these are free, have them, and leave them."""
        return _FREE if self._descriptor is None else self._all(slots, self._descriptor)

    @contextmanager
    def _all(self, slots: Sequence[int], descriptor: int) -> Iterator[None]:
        with ExitStack() as held:
            for slot in sorted(slots):
                held.enter_context(self._threads[slot])
                held.enter_context(GpuTurns(descriptor, slot))
            yield
