"""Locks that processes share without memory: those of POSIX, on bytes of an empty memory file.

The kernel keeps them by process, so that a lock is released when its process is killed, and taking
one costs microseconds. A process that closes a descriptor of the file loses all its locks there.
"""

import contextlib
import errno
import fcntl
import os
import signal
import struct
import time
from typing import NamedTuple

# As the kernel has it on 64 bits: kind, whence, start, length, process.
_LOCK = struct.Struct("hhqqi4x")
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
# Of a wait that the kernel takes for a deadlock: it does not see that other threads go on.
_RETRY_S = 0.0005


class LockHolder(NamedTuple):
    """A process that has a lock, and the first byte that it has locked."""

    pid: int
    start: int


def make_lock_file(name: str) -> int:
    """The descriptor of a file whose bytes can be locked, and to which no process can write."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    return descriptor


def lock(descriptor: int, byte: int) -> None:
    """Lock a byte for this process alone; wait until no other one has it."""
    while True:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX, 1, byte)
        except OSError as error:
            if error.errno != errno.EDEADLK:
                raise
            time.sleep(_RETRY_S)
        else:
            return


def try_lock(descriptor: int, byte: int, kind: int = fcntl.LOCK_EX) -> bool:
    """Lock a byte for this process alone, or (LOCK_SH) as others may, too, at the same time.

    Return whether that was done: False if another one has it, or has it for itself alone.
    """
    try:
        fcntl.lockf(descriptor, kind | fcntl.LOCK_NB, 1, byte)
    except BlockingIOError:
        return False
    return True


def unlock(descriptor: int, byte: int) -> None:
    fcntl.lockf(descriptor, fcntl.LOCK_UN, 1, byte)


def lock_holder(descriptor: int, byte: int, length: int = 1) -> LockHolder | None:
    """Another process that has locked one of these bytes, alone or as others do."""
    wanted = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, length, 0)
    kind, _, start, _, pid = _LOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_GETLK, wanted))
    return None if kind == fcntl.F_UNLCK else LockHolder(int(pid), int(start))


def kill_lock_holder(descriptor: int, byte: int, length: int, pid: int) -> None:
    """Kill this process, if it has locked one of the bytes still.

    Its number may be another's by now.
    """
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        holder = lock_holder(descriptor, byte, length)
        if holder is not None and holder.pid == pid:
            with contextlib.suppress(ProcessLookupError):  # dead since it was looked up
                signal.pidfd_send_signal(process, signal.SIGKILL)
    finally:
        os.close(process)
