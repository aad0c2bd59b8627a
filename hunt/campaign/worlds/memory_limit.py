"""A group of processes whose memory can be made scarce, by a program that is none of theirs.

Memory cgroups of version 1 or 2, whichever this machine lets us make.
"""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

_ROOM_BYTES = 192 << 20
_HOG = """
import sys, time
held = []
while True:
    held.append(bytearray(16 << 20))
    time.sleep(0.02)
"""
_CGROUPS = Path("/sys/fs/cgroup")
_NO_LIMIT = {"memory.max": "max", "memory.limit_in_bytes": "-1"}
_END_S = 5.0


class NoMemoryGroup(Exception):
    """Memory cgroups cannot be made here; the text says why."""


class MemoryGroup:
    """Processes, with those that they start, as one group of memory."""

    def __init__(self, name: str) -> None:
        self._folder = _parent() / name
        try:
            self._folder.mkdir()
        except OSError as error:
            raise NoMemoryGroup(f"{self._folder}: {error}") from error
        v2 = (self._folder / "memory.current").exists()
        self._limit = self._folder / ("memory.max" if v2 else "memory.limit_in_bytes")
        self._usage = self._folder / ("memory.current" if v2 else "memory.usage_in_bytes")
        self._hog: subprocess.Popen[bytes] | None = None

    def add(self, pid: int) -> None:
        """This process, and those that it starts from now on, belong to it."""
        (self._folder / "cgroup.procs").write_text(str(pid))

    def press(self) -> None:
        """Leave little room, which another program takes; whom the kernel ends then is open."""
        room_bytes = int(self._usage.read_text()) + _ROOM_BYTES
        self._limit.write_text(str(room_bytes))
        self._hog = subprocess.Popen([sys.executable, "-c", _HOG])
        self.add(self._hog.pid)

    def release(self) -> None:
        """Have the other program gone, and all the memory there again."""
        if self._hog is not None:
            self._hog.kill()
            self._hog.wait()
            self._hog = None
        self._limit.write_text(_NO_LIMIT[self._limit.name])

    def end(self) -> None:
        """End the group, and all that is left in it."""
        self.release()
        deadline_s = time.monotonic() + _END_S
        while time.monotonic() < deadline_s:
            for pid in (self._folder / "cgroup.procs").read_text().split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            with suppress(OSError):
                self._folder.rmdir()
                return
            time.sleep(0.05)
        self._folder.rmdir()


def _parent() -> Path:
    """The group in which this process is."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return _CGROUPS / "memory" / path.lstrip("/")
    unified = Path("/proc/self/cgroup").read_text().rpartition("0::")[2].splitlines()[0]
    return _CGROUPS / unified.lstrip("/")
