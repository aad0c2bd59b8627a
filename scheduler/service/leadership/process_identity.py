"""A name for this process by which others on this machine can tell whether it still lives."""

import os
from contextlib import suppress
from pathlib import Path

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACE = Path("/proc/self/ns/pid")


def name_of_this_process() -> str:
    """This start of the machine, the name space of process ids (a container's), and the id."""
    return f"{_space()}/{os.getpid()}"


def has_ended(process: str) -> bool:
    """Whether the process of this name is known to have ended; False in any doubt."""
    space, _, number = process.rpartition("/")
    if not space or space != _space() or not number.isdecimal() or int(number) == 0:
        return False
    try:
        os.kill(int(number), 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):  # somebody else's, or no number of a process
        return False
    return False


def _space() -> str:
    """The same for all who see each other's process ids; "" where that cannot be known."""
    with suppress(OSError):
        return f"{_BOOT.read_text().strip()}/{_NAMESPACE.readlink()}"
    return ""
