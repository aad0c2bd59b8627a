"""A name for this process by which other processes on this machine can tell whether it lives."""

import os
from contextlib import suppress
from pathlib import Path

from common.numerals import natural

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACE = Path("/proc/self/ns/pid")


def name_of_this_process() -> str:
    """The machine's boot id, the namespace of process ids (a container's), and the process id."""
    return f"{_space()}/{os.getpid()}"


def has_ended(process: str) -> bool:
    """Whether the process of this name is known to have ended; False in any doubt."""
    space, _, number = process.rpartition("/")
    pid = natural(number)
    if not space or space != _space() or not pid:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):  # another user's process, or no process id
        return False
    return False


def _space() -> str:
    """Equal for all processes that see each other's process ids; "" if unknown."""
    with suppress(OSError):
        return f"{_BOOT.read_text().strip()}/{_NAMESPACE.readlink()}"
    return ""
