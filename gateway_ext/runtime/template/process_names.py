"""The name of a fork: its variables as the system shows them to others."""

import ctypes
from pathlib import Path

_ENVIRONMENT_START, _ENVIRONMENT_END = 47, 48  # positions in /proc/self/stat after the name


def rename(before: str, after: str) -> None:
    """Replace this process's name in the variables that /proc/PID/environ shows.

    A fork has its parent's. By them the gateway finds what an instance has left behind. The names
    have the same length, so that nothing else moves.
    """
    if len(before) != len(after):
        raise ValueError(f"{after!r} is not as long as {before!r}")
    _overwrite(before.encode(), after.encode())


def hide(variable: str) -> None:
    """Take a variable out of those that /proc/PID/environ shows."""
    shown = variable.encode()
    _overwrite(shown, bytes(len(shown)))


def _overwrite(old: bytes, new: bytes) -> None:
    if old == new:
        return
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    start, end = int(fields[_ENVIRONMENT_START]), int(fields[_ENVIRONMENT_END])
    shown = ctypes.string_at(start, end - start)
    position = shown.find(old)
    while position >= 0:
        ctypes.memmove(start + position, new, len(new))
        position = shown.find(old, position + len(old))
