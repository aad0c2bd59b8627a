"""How much of the machine's memory is there to be used."""

from pathlib import Path

_KIB = 1024

# Of a control group: its limit, its use, the file that says how much of that is page cache which
# can be dropped, and under which name. Version 2 first, then version 1.
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
    """Memory that processes could take now: the machine's, within this control group's limit."""
    free = _entry(root / "proc/meminfo", "MemAvailable:") * _KIB
    for limit_file, used_file, statistics_file, cache in _GROUPS:
        group = root / "sys/fs/cgroup"
        limit = _number(group / limit_file)
        if limit is not None:
            used = (_number(group / used_file) or 0) - _entry(group / statistics_file, cache)
            free = min(free, limit - used)
    return max(0, free)


def _number(file: Path) -> int | None:
    """None for no limit (`max`), and where there is no such control group."""
    text = _read(file).strip()
    return int(text) if text.isdigit() else None


def _entry(file: Path, name: str) -> int:
    """The number behind a name in a file of such lines; 0 if there is none."""
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
