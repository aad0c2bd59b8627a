"""A path between processes: whether others wait for it, and whose block passes.

The processes of a GPU share a file of kernel locks and no memory. Each announces the ranks of what
it moves by locks that many may have. On an emulated path, which one block has at a time, a process
also takes the place next in line, and then the path itself; on a real one the hardware has a line
of its own.
"""

import fcntl

from gpu_manager.devices.loads import TransferRank
from gpu_manager.kernel_locks import (
    kill_lock_holder,
    lock,
    lock_holder,
    make_lock_file,
    try_lock,
    unlock,
)

# The bytes that are locked: the place next in line, the path, and one for each rank.
_NEXT, _PATH, _RANKS = 0, 1, 2
_LINE_BYTES = 2


def make_gate() -> int:
    """The descriptor of a file of locks for one path, which no process can write to."""
    return make_lock_file("gpufaas-path")


def path_holder(descriptor: int) -> int | None:
    """Another process that has the path, or is next in line."""
    holder = lock_holder(descriptor, _PATH) or lock_holder(descriptor, _NEXT)
    return None if holder is None else holder.pid


def kill_path_holder(descriptor: int, pid: int) -> None:
    """Kill this process, if it has the path or the place next in line still."""
    kill_lock_holder(descriptor, _NEXT, _LINE_BYTES, pid)


class ProcessGate:
    """One process's way to a path. Its path sees to it that one thread at a time uses the gate.

    The descriptor is never closed while the process lives: its locks would go with it.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._announced = dict.fromkeys(TransferRank, 0)

    def announce(self, rank: TransferRank) -> None:
        """Say to other processes that something of this rank waits or moves."""
        self._announced[rank] += 1
        if self._announced[rank] == 1:
            # Nobody is kept waiting by a process that has locked the byte for itself alone.
            try_lock(self._descriptor, _RANKS + rank, fcntl.LOCK_SH)

    def retract(self, rank: TransferRank) -> None:
        self._announced[rank] -= 1
        if not self._announced[rank]:
            unlock(self._descriptor, _RANKS + rank)

    def elsewhere(self, above: TransferRank) -> TransferRank | None:
        """Return the highest rank above this one that other processes have announced."""
        found: TransferRank | None = None
        while above:
            holder = lock_holder(self._descriptor, _RANKS, above)
            if holder is None:
                break
            found = above = TransferRank(max(holder.start - _RANKS, 0))
        return found

    def enter(self) -> bool:
        """Wait for the path, which is this process's then; return whether it had to wait."""
        at_once = try_lock(self._descriptor, _NEXT)
        if not at_once:
            lock(self._descriptor, _NEXT)
        try:
            if not try_lock(self._descriptor, _PATH):
                at_once = False
                lock(self._descriptor, _PATH)
        finally:
            unlock(self._descriptor, _NEXT)
        return not at_once

    def is_wanted(self) -> bool:
        return lock_holder(self._descriptor, _NEXT) is not None

    def leave(self) -> None:
        unlock(self._descriptor, _PATH)


class NoGate:
    """The gate of a path that one process alone uses."""

    def announce(self, rank: TransferRank) -> None:
        """Nobody listens."""

    def retract(self, rank: TransferRank) -> None:
        """Nobody listens."""

    def elsewhere(self, above: TransferRank) -> TransferRank | None:  # noqa: ARG002 - there is none
        return None

    def enter(self) -> bool:
        return False

    def is_wanted(self) -> bool:
        return False

    def leave(self) -> None:
        """Nobody else wants it."""
