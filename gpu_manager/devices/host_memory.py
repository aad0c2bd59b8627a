"""Measures how much of the machine's memory is available."""

from pathlib import Path

_KIB = 1024

# Files of a control group: its limit, its use, its statistics, and the name of the droppable page
# cache in the statistics. Version 2 first, then version 1.
_GROUPS = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        "total_inactive_file",
    ),
)


def available_bytes(root: Path = Path("/")) -> int:
    """Return the memory that processes could take now, within this control group's limit."""
    free = _entry(root / "proc/meminfo", "MemAvailable:") * _KIB
    for limit_file, used_file, statistics_file, cache in _GROUPS:
        group = root / "sys/fs/cgroup"
        limit = _number(group / limit_file)
        if limit is not None:
            used = (_number(group / used_file) or 0) - _entry(group / statistics_file, cache)
            free = min(free, limit - used)
    return max(0, free)


def _number(file: Path) -> int | None:
    """Read a number; None for no limit (`max`) or a missing control group."""
    text = _read(file).strip()
    return int(text) if text.isdigit() else None


def _entry(file: Path, name: str) -> int:
    """Return the number after a name in a file of such lines; 0 if the name is missing."""
    for line in _read(file).splitlines():
        words = line.split()
        if words and words[0] == name:
            return int(words[1])
    return 0


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii")
    except OSError:
        return ""
