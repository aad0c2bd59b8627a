"""Memory that processes lend each other: files of the host, and storages of a device."""

import contextlib
import fcntl
import mmap
import os
import threading
from collections.abc import Callable
from typing import NamedTuple

import torch

from gpu_manager.call_errors import CallRefused
from torch_shim.wire.protocol import FailureKind

IDLE_S = 10.0  # that a file waits to be used again before it is given up
# Of memory that is filled at once: a fault for each page takes longer than the copy.
MAPPED_AHEAD = mmap.MAP_SHARED | mmap.MAP_POPULATE
_PIECE_BYTES = 16 << 20
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class IdleTimer:
    """Does some work in a thread, so long after it was asked for. Thread-safe, also in a finalizer.

    Whoever asks meanwhile asks for the same work.
    """

    def __init__(self, after_s: float, work: Callable[[], None]) -> None:
        self._after_s = after_s
        self._work = work
        self._lock = threading.RLock()
        self.is_due = False  # it was asked for, and has not begun

    def ask(self) -> None:
        with self._lock:
            if self.is_due:
                return
            later = threading.Timer(self._after_s, self._run)
            later.daemon = True
            with contextlib.suppress(RuntimeError):  # no room for a thread: the next one tries
                later.start()
                self.is_due = True

    def _run(self) -> None:
        with self._lock:
            self.is_due = False
        self._work()


def make_file(size_bytes: int) -> int:
    """Make a file of this size in memory, whose size nobody can change; return its descriptor."""
    descriptor = os.memfd_create("gpufaas-result", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


class MappedFile:
    """Such a file, mapped in this process; it is used again where it is free, `free_since_s`."""

    def __init__(self, size_bytes: int, how: int = mmap.MAP_SHARED) -> None:
        self.size_bytes = size_bytes
        self.descriptor = make_file(size_bytes)
        self.free_since_s = 0.0
        try:
            self.memory = memoryview(mmap.mmap(self.descriptor, size_bytes, flags=how))
        except BaseException:
            os.close(self.descriptor)
            raise

    def close(self) -> None:
        """Let go of it; who maps it keeps the pages."""
        os.close(self.descriptor)
        self.memory = memoryview(b"")


def read_file(descriptor: int, start: int, size_bytes: int) -> tuple[memoryview, bool]:
    """Return the bytes and whether they are mapped: then they begin at `start`.

    A file that could shrink is copied: who reads a mapping behind its end is killed. CallRefused
    for one that is too short.
    """
    try:
        end = start + size_bytes
        if os.fstat(descriptor).st_size < end:
            raise CallRefused(FailureKind.BAD_FRAME, "data is longer than its file")
        if _is_sealed(descriptor):
            return memoryview(mmap.mmap(descriptor, end, flags=mmap.MAP_PRIVATE)), True
        content = bytearray(size_bytes)
        with memoryview(content) as room:
            done = 0
            while done < size_bytes:
                count = os.preadv(descriptor, [room[done : done + _PIECE_BYTES]], start + done)
                if not count:
                    raise CallRefused(FailureKind.BAD_FRAME, "data is longer than its file")
                done += count
        return memoryview(content), False
    except (OSError, ValueError, OverflowError) as error:
        raise CallRefused(FailureKind.BAD_FRAME, f"data in a file: {error}") from error


def _is_sealed(descriptor: int) -> bool:
    try:
        return bool(fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:  # a file on disk
        return False


def map_room(descriptor: int, size_bytes: int) -> memoryview:
    """Map memory that the manager gave to be filled; OSError or ValueError if that cannot be."""
    return memoryview(mmap.mmap(descriptor, size_bytes, flags=MAPPED_AHEAD))


class LentStorage(NamedTuple):
    """A storage as another process of the node opens it.

    It begins at `offset` in the memory of a descriptor, or, where that is -1, in the allocation of
    which the driver's `token` is the name.
    """

    size_bytes: int
    offset: int
    token: bytes
    descriptor: int


class Loan(NamedTuple):
    """A storage that is lent until it is closed: `storage` is what its owner uses meanwhile.

    `close` takes how many others may have it open still.
    """

    lent: LentStorage
    storage: torch.UntypedStorage
    close: Callable[[int], None]


class Borrowed(NamedTuple):
    """A storage that was opened; `in_place` if it is the lender's memory itself."""

    storage: torch.UntypedStorage
    in_place: bool
