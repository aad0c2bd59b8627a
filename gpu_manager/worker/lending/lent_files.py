"""Memory into which an emulated GPU moves what it lends, and that is used again afterwards.

To clear new pages takes several times what a copy to used ones does. A file is free when nobody has
borrowed it any more, and no tensor of this process lies in it.
"""

import contextlib
import mmap
import os
import threading
import time
import weakref

import torch

from gpu_manager.worker.lending.lent_memory import IDLE_S, make_file, map_room

_MOST_FREE_BYTES = 1 << 28
_ROUNDED_TO = 1 << 21


class _LentPages(mmap.mmap):
    """Private pages of a file, in which this process's own tensors lie."""


class LentFile:
    """One file, while it is lent or one of our tensors lies in it."""

    def __init__(self, files: "LentFiles", descriptor: int, size_bytes: int) -> None:
        self.descriptor = descriptor
        self.size_bytes = size_bytes
        self._files = files
        self._lock = threading.RLock()  # a finalizer may come at any time
        self._holders = 2  # the loan, and our tensors

    def moved(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """Copy a storage to the file; return the storage that lies there."""
        size_bytes = storage.nbytes()
        with map_room(self.descriptor, size_bytes) as room:
            target = torch.frombuffer(room, dtype=torch.uint8)
            target.copy_(torch.empty(0, dtype=torch.uint8).set_(storage))
            del target
        pages = _LentPages(self.descriptor, size_bytes, flags=mmap.MAP_PRIVATE)
        weakref.finalize(pages, self.leave)
        return torch.frombuffer(pages, dtype=torch.uint8).untyped_storage()

    def leave(self) -> None:
        """The loan is over, or our tensors are gone."""
        with self._lock:
            self._holders -= 1
            if self._holders:
                return
        self._files.give(self)


class LentFiles:
    """The files of one device. Thread-safe, also in a finalizer."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._free: list[tuple[int, int, float]] = []  # descriptor, size, since when
        self._trimming: threading.Timer | None = None

    def take(self, size_bytes: int) -> LentFile:
        """Return a file at least as large: one that is free, or a new one."""
        wanted = -(-size_bytes // _ROUNDED_TO) * _ROUNDED_TO
        with self._lock:
            for place in self._free:
                if place[1] == wanted:
                    self._free.remove(place)
                    os.pwrite(place[0], bytes(wanted - size_bytes), size_bytes)  # of earlier data
                    return LentFile(self, place[0], wanted)
        return LentFile(self, make_file(wanted), wanted)

    def give(self, file: LentFile) -> None:
        """Keep a file for a later loan, unless there are enough."""
        with self._lock:
            free_bytes = sum(size_bytes for _, size_bytes, _ in self._free)
            if free_bytes + file.size_bytes <= _MOST_FREE_BYTES:
                self._free.append((file.descriptor, file.size_bytes, time.monotonic()))
                self._trim_later()
                return
        os.close(file.descriptor)

    def trim(self, idle_s: float = IDLE_S) -> None:
        """Give up the files that have been free for so long."""
        with self._lock:
            self._trimming = None
            before_s = time.monotonic() - idle_s
            for place in [place for place in self._free if place[2] <= before_s]:
                self._free.remove(place)
                os.close(place[0])
            if self._free:
                self._trim_later()

    def _trim_later(self) -> None:
        if self._trimming is None:
            later = threading.Timer(IDLE_S, self.trim)
            later.daemon = True
            with contextlib.suppress(RuntimeError):  # no room for a thread: the next one tries
                later.start()
                self._trimming = later
