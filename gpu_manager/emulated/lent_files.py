"""Memory into which an emulated GPU moves what it lends, and that is used again afterwards.

To clear new pages takes several times what a copy to used ones does. A file is free when nobody has
borrowed it any more, and no tensor of this process lies in it.
"""

import ctypes
import threading
import time
import weakref

import torch

from gpu_manager.devices.lent_memory import IDLE_S, MAPPED_AHEAD, IdleTimer, MappedFile

_MOST_FREE_BYTES = 1 << 28
_ROUNDED_TO = 1 << 21


class LentFile:
    """One file, while it is lent or one of our tensors lies in it."""

    def __init__(self, files: "LentFiles", place: MappedFile) -> None:
        self.descriptor = place.descriptor
        self._place = place
        self._files = files
        self._lock = threading.RLock()  # a finalizer may come at any time
        self._holders = 2  # the loan, and our tensors
        self._is_spoilt = False  # others may map it for ever

    def moved(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        pages = (ctypes.c_char * storage.nbytes()).from_buffer(self._place.memory)
        weakref.finalize(pages, self.leave)
        there = torch.frombuffer(pages, dtype=torch.uint8).untyped_storage()
        return there.copy_(storage, non_blocking=False)

    def end_loan(self, uses: int) -> None:
        """The loan is over; if others may still read what is there, nothing else ever is."""
        self._is_spoilt = uses > 0
        self.leave()

    def leave(self) -> None:
        """The loan is over, or our tensors are gone."""
        with self._lock:
            self._holders -= 1
            if self._holders:
                return
        if self._is_spoilt:
            self._place.close()
        else:
            self._files.give(self._place)


class LentFiles:
    """The files of one device. Thread-safe, also in a finalizer."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._free: list[MappedFile] = []
        self._trimming = IdleTimer(IDLE_S, self.trim)

    def take(self, size_bytes: int) -> LentFile:
        """Return a file at least as large: one that is free, or a new one."""
        wanted = -(-size_bytes // _ROUNDED_TO) * _ROUNDED_TO
        with self._lock:
            for place in self._free:
                if place.size_bytes == wanted:
                    self._free.remove(place)
                    place.memory[size_bytes:] = bytes(wanted - size_bytes)  # of earlier data
                    return LentFile(self, place)
        return LentFile(self, MappedFile(wanted, MAPPED_AHEAD))

    def give(self, place: MappedFile) -> None:
        """Keep a file for a later loan, unless there are enough."""
        with self._lock:
            free_bytes = sum(free.size_bytes for free in self._free)
            if free_bytes + place.size_bytes <= _MOST_FREE_BYTES:
                place.free_since_s = time.monotonic()
                self._free.append(place)
                self._trimming.ask()
                return
        place.close()

    def trim(self, idle_s: float = IDLE_S) -> None:
        with self._lock:
            before_s = time.monotonic() - idle_s
            for place in [place for place in self._free if place.free_since_s <= before_s]:
                self._free.remove(place)
                place.close()
            if self._free:
                self._trimming.ask()
