"""The anonymous memory of this process, as the memory that one model takes of an emulated GPU."""

import ctypes
import os
import re
import resource
import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

_PAGE_BYTES = resource.getpagesize()
# Address space beyond the limit: thread stacks, arenas of malloc, code that torch generates.
_SLACK_BYTES = 1 << 30
_PEAK = re.compile(rb"VmHWM:\s+(\d+) kB")
_NOTHING = nullcontext()
_libc = ctypes.CDLL(None)


class ProcessMemory:
    """All of the process is one model's, but for what it had taken before this was made."""

    gives_back = False  # what a call took when it ends, so that another model's call may have it

    def __init__(self) -> None:
        # Opened ahead: a process that gave up its rights may not open them any more.
        self._sizes = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        self._status = os.open("/proc/self/status", os.O_RDONLY | os.O_CLOEXEC)
        self._peak = os.open("/proc/self/clear_refs", os.O_WRONLY | os.O_CLOEXEC)
        weakref.finalize(self, _close_all, (self._sizes, self._status, self._peak))
        self._base_bytes = self._anonymous_bytes()

    def used_bytes(self) -> int:
        """What the model takes now, weights and context aside."""
        return max(0, self._anonymous_bytes() - self._base_bytes)

    def limit(self, most_bytes: int) -> None:
        """Cap the address space, so that a call that asks for far too much fails at once."""
        mapped_bytes = int(os.pread(self._sizes, 256, 0).split()[0]) * _PAGE_BYTES
        room_bytes = max(0, most_bytes - self.used_bytes())
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        wanted_bytes = mapped_bytes + room_bytes + _SLACK_BYTES
        if hard != resource.RLIM_INFINITY:
            wanted_bytes = min(wanted_bytes, hard)
        resource.setrlimit(resource.RLIMIT_AS, (wanted_bytes, hard))

    def note_weights(self, weights_bytes: int) -> None:
        """Nothing: no other model is beside this one."""

    def lift(self) -> None:
        """Undo the limit."""
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))

    def watch(self) -> None:
        """Have the kernel forget the highest use so far."""
        os.write(self._peak, b"5")

    def peak_bytes(self) -> int:
        """The most that it took since `watch`.

        The peak of the resident set, less the pages of files, which only grew meanwhile.
        """
        found = _PEAK.search(os.pread(self._status, 4096, 0))
        if found is None:
            return self.used_bytes()
        shared_bytes = int(os.pread(self._sizes, 256, 0).split()[2]) * _PAGE_BYTES
        return max(0, int(found[1]) * 1024 - shared_bytes - self._base_bytes)

    def release(self) -> None:
        """Give back what is held only to be used again."""
        trim_malloc()

    def after_call(self) -> None:
        """Nothing: malloc gives large blocks back by itself."""

    def adopt_thread(self) -> None:
        """Nothing: all of the process is one model's."""

    def computing(self) -> AbstractContextManager[None]:
        """Nothing: no other model computes here."""
        return _NOTHING

    def _anonymous_bytes(self) -> int:
        _, resident, shared, *_ = os.pread(self._sizes, 256, 0).split()
        return (int(resident) - int(shared)) * _PAGE_BYTES


def trim_malloc() -> None:
    _libc.malloc_trim(0)


def _close_all(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
