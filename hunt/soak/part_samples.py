"""What the processes of each part of a stack hold at one moment, by the system's own numbers."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from bench.measure.process_usage import parts_in_tree

_KIB, _BLOCK_BYTES = 1024, 512


class PartSample(NamedTuple):
    """All processes of a part together; private memory is shared with nobody."""

    processes: int = 0
    threads: int = 0
    descriptors: int = 0
    memfds: int = 0
    rss_bytes: int = 0
    pss_bytes: int = 0
    private_bytes: int = 0


class TreeSample(NamedTuple):
    """The parts of a stack by name; `memfds` are files in memory that any of them holds."""

    parts: Mapping[str, PartSample]
    memfds: int
    memfd_bytes: int


def sample_tree(first: int) -> TreeSample:
    """Everything that descends from this process; as root, processes of all users."""
    parts: dict[str, PartSample] = {}
    files: dict[tuple[int, int], int] = {}
    for pid, name in parts_in_tree(first).items():
        with suppress(OSError):  # the process has ended meanwhile
            found = _sample(Path(f"/proc/{pid}"), files)
            old = parts.get(name, PartSample())
            parts[name] = PartSample(*map(sum, zip(old, found, strict=True)))
    return TreeSample(parts, len(files), sum(files.values()))


def _sample(process: Path, files: dict[tuple[int, int], int]) -> PartSample:
    """One process; its files in memory are added to `files`, by device and inode."""
    memory = _memory_bytes((process / "smaps_rollup").read_text(encoding="utf-8"))
    threads = sum(1 for _ in (process / "task").iterdir())
    descriptors = memfds = 0
    for entry in (process / "fd").iterdir():
        with suppress(OSError):  # it was closed meanwhile
            descriptors += 1
            if str(entry.readlink()).startswith("/memfd:"):
                memfds += 1
                status = entry.stat()
                files[status.st_dev, status.st_ino] = status.st_blocks * _BLOCK_BYTES
    private = memory["Private_Clean"] + memory["Private_Dirty"]
    return PartSample(1, threads, descriptors, memfds, memory["Rss"], memory["Pss"], private)


def _memory_bytes(rollup: str) -> Mapping[str, int]:
    """The lines of `smaps_rollup` that have a size, by their names."""
    rows = (line.split() for line in rollup.splitlines()[1:])
    return {words[0].rstrip(":"): int(words[1]) * _KIB for words in rows}
