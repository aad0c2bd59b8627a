"""Turns on a GPU whose slot holds several leases: locks that its workers share.

The locks are those of POSIX on a few bytes of an empty memory file: the kernel keeps them by
process, so that a lock is released when its process is killed, and taking a lock costs
microseconds. A worker first takes the place next in line, and releases that place when it has the
turn: so a worker that has just had a turn, and needs another one, stands behind a waiting one.
"""

import contextlib
import fcntl
import os
import signal
import struct
from collections.abc import Iterator
from types import TracebackType

# The bytes that are locked.
_NEXT, _TURN, _BYTES = 0, 1, 2
_LOCK = struct.Struct(
    "hhqqi4x"
)  # as the kernel has it on 64 bits: kind, whence, start, length, pid
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


def make_turns() -> int:
    """The descriptor of a file for one GPU, which no process can write to."""
    descriptor = os.memfd_create("gpufaas-turns", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    return descriptor


def turn_holder(descriptor: int) -> int | None:
    """The process that has the turn, or is next in line; None where there is none."""
    wanted = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, _NEXT, _BYTES, 0)
    kind, _, _, _, pid = _LOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_GETLK, wanted))
    return None if kind == fcntl.F_UNLCK else int(pid)


def kill_turn_holder(descriptor: int, pid: int) -> None:
    """Kill this process, if it has the turn still: its number may be another's by now."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if turn_holder(descriptor) == pid:
            with contextlib.suppress(ProcessLookupError):  # dead since it was looked up
                signal.pidfd_send_signal(process, signal.SIGKILL)
    finally:
        os.close(process)


class GpuTurns:
    """One worker's way to its turns: `with turns:` waits for one and ends it.

    One thread of the process at a time. A process that closes the descriptor, or a copy of it,
    loses its turn.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def close(self) -> None:
        """Close the descriptor; no call may have its turn."""
        os.close(self._descriptor)

    def __enter__(self) -> None:
        descriptor = self._descriptor
        fcntl.lockf(descriptor, fcntl.LOCK_EX, 1, _NEXT)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX, 1, _TURN)
        finally:
            fcntl.lockf(descriptor, fcntl.LOCK_UN, 1, _NEXT)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, _TURN)

    @contextlib.contextmanager
    def yielded(self) -> Iterator[None]:
        """In a turn: wait for something else meanwhile, while others have theirs."""
        self.__exit__(None, None, None)
        try:
            yield
        finally:
            self.__enter__()


class NoTurns:
    """Where a GPU is one lease's at a time: nothing to wait for."""

    def close(self) -> None:
        """There is nothing to close."""

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass

    @contextlib.contextmanager
    def yielded(self) -> Iterator[None]:
        """There are none."""
        yield
