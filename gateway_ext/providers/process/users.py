"""Users of functions and builds: ids that one gateway holds at a time, emptied of processes."""

import contextlib
import fcntl
import logging
import os
import pwd
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Collection
from pathlib import Path
from secrets import randbelow
from typing import Self

from gateway_ext.errors import ProviderFailed
from gateway_ext.providers.process import processes
from gateway_ext.providers.process.settings import ProcessBounds

log = logging.getLogger(__name__)

_LOCKS = "users.lock"  # in the state folder


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
        return frozenset(self._held)

    def take(self) -> int:
        """An id that is nobody's and has no process; ProviderFailed if there is none."""
        busy = processes.users()
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


class MachineUsers:
    """Ids of both kinds, and the way to end all processes of one."""

    def __init__(self, functions: UserIds, builds: UserIds) -> None:
        self.functions = functions
        self.builds = builds
        self._own_uid = builds.take()
        self._one_at_a_time = threading.Lock()

    @classmethod
    def of(cls, bounds: ProcessBounds, state: Path) -> Self:
        """Open the locks of this machine; without a place for them those of the state folder."""
        locks = bounds.user_locks
        try:
            functions = UserIds(locks, bounds.first_uid, bounds.uids)
        except OSError as error:
            text = "other gateways of this machine may use the same user ids: %s"
            log.warning(text, error)
            locks = state / _LOCKS
            functions = UserIds(locks, bounds.first_uid, bounds.uids)
        return cls(functions, UserIds(locks, bounds.first_build_uid, bounds.build_uids))

    def end(self, uids: Collection[int]) -> None:
        """Kill all processes of users that this gateway holds; ProviderFailed if one is left."""
        if uids:
            with self._one_at_a_time:
                kill_all_of(uids, self._own_uid)
            _wait_until_gone(frozenset(uids))

    def close(self) -> None:
        """End all processes of all users, then give their ids back."""
        try:
            self.end((self.functions.held | self.builds.held) - {self._own_uid})
        finally:
            self.functions.close()
            self.builds.close()


_PROGRAM = Path(__file__).with_name("end_program.py")
_WITHIN_S = 10.0  # a killed process may first have to give a lot of memory back
_POLL_S = 0.05


def kill_all_of(uids: Collection[int], own_uid: int) -> None:
    """Kill all processes of these users by means of an id that has no process but this one's.

    Sessions, marks and namespaces do not matter, and no process escapes by forking. The ids must
    be held by this gateway (`UserIds`): whatever has them is killed.
    """
    command = [sys.executable, "-I", "-S", str(_PROGRAM), str(own_uid), *map(str, uids)]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ProviderFailed(f"processes of users {_shown(uids)} cannot be ended: {done.stderr}")


def _wait_until_gone(uids: frozenset[int]) -> None:
    deadline_s = time.monotonic() + _WITHIN_S
    while left := uids & processes.users():
        if time.monotonic() > deadline_s:
            raise ProviderFailed(f"processes of users {_shown(left)} do not end")
        time.sleep(_POLL_S)


def _shown(uids: Collection[int]) -> str:
    return ", ".join(map(str, sorted(uids)))
