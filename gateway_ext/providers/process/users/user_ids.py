"""User ids for functions and builds, each held by one gateway of this machine at a time."""

import contextlib
import fcntl
import os
import pwd
import struct
import threading
from pathlib import Path
from secrets import randbelow

from gateway_ext.errors import ProviderFailed
from gateway_ext.providers.process import process_table

_FLOCK = "hhqqi4x"  # struct flock of the kernel, on 64 bits


class UserIds:
    """Ids of one range, which are locked in a file: one byte of it for each id.

    The locks belong to the open file, so that the system releases them when the gateway dies. An id
    that is given back is given again only after all others: files that its processes left outside
    of their folders do not become another's at once.
    """

    def __init__(self, locks: Path, first: int, count: int) -> None:
        """OSError if the file cannot be made."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._file = os.open(locks, flags, 0o600)
        self._first, self._count = first, count
        self._next = randbelow(count)
        self._held: set[int] = set()
        self._one_at_a_time = threading.Lock()  # the file's locks do not tell threads apart

    @property
    def held(self) -> frozenset[int]:
        """The ids that this gateway holds."""
        return frozenset(self._held)

    def take(self) -> int:
        """An id that is nobody's and has no process; ProviderFailed if there is none."""
        busy = process_table.users()
        with self._one_at_a_time:
            first = self._next
            self._next = (first + 1) % self._count
        # Each call goes round the whole range: what other threads try meanwhile is no reason to
        # pass an id over, as they may find it in use and leave it.
        for step in range(self._count):
            place = (first + step) % self._count
            uid = self._first + place
            if uid not in busy and self.keep(uid):
                if step:
                    self._next = (place + 1) % self._count
                return uid
        last = self._first + self._count - 1
        raise ProviderFailed(f"all user ids from {self._first} to {last} are in use")

    def keep(self, uid: int) -> bool:
        """Take this id, which may have processes; False if it is another's or out of the range."""
        if uid not in range(self._first, self._first + self._count) or _has_a_name(uid):
            return False
        with self._one_at_a_time:
            if uid in self._held or not self._lock(fcntl.F_WRLCK, uid):
                return False
            self._held.add(uid)
        return True

    def give_back(self, uid: int) -> None:
        """Let others have an id that no process has any more; `close` has done so for all."""
        with self._one_at_a_time:
            self._held.discard(uid)
            if self._file >= 0:
                self._lock(fcntl.F_UNLCK, uid)

    def close(self) -> None:
        """Give all ids back."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1
        self._held.clear()

    def _lock(self, kind: int, uid: int) -> bool:
        asked = struct.pack(_FLOCK, kind, os.SEEK_SET, uid, 1, 0)
        with contextlib.suppress(BlockingIOError, PermissionError):
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, asked)
            return True
        return False


def _has_a_name(uid: int) -> bool:
    """Whether this machine knows a user of this id, who may log in at any time."""
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True
