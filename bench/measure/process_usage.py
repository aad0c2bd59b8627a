"""Processor time and memory that processes use, by the part of gpufaas that they belong to."""

import os
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
_PARTS = ("scheduler", "gpu-manager", "gateway", "up")


@dataclass(frozen=True, slots=True)
class PartUsage:
    """One process, or all of a part: its name, its share of memory, its processor time so far.

    `torch_bytes` is the memory of those processes that have loaded torch.
    """

    name: str
    pss_bytes: int
    processor_s: float
    torch_bytes: int = 0


def parts_in_tree(first: int) -> dict[int, str]:
    """The part that a process, and each of its descendants, belongs to, by pid."""
    children = defaultdict(list)
    for pid, parent in _parents():
        children[parent].append(pid)
    found: dict[int, str] = {}
    left = [(first, "")]
    while left:
        pid, inherited = left.pop()
        with suppress(OSError):  # the process has ended meanwhile
            name = _part(pid) or f"{inherited}'s workers".replace("'s workers's", "'s")
            found[pid] = name
            left += [(child, name) for child in children[pid]]
    return found


def process_tree(first: int) -> dict[int, PartUsage]:
    """What a process and all its descendants use, by pid."""
    found: dict[int, PartUsage] = {}
    for pid, name in parts_in_tree(first).items():
        with suppress(OSError):  # the process has ended meanwhile
            pss_bytes = _pss_bytes(pid)
            torch_bytes = pss_bytes if _has_torch(pid) else 0
            found[pid] = PartUsage(name, pss_bytes, processor_s(pid), torch_bytes)
    return found


def usage_by_part(processes: Mapping[int, PartUsage]) -> dict[str, PartUsage]:
    """The sums over the processes that belong to the same part."""
    found: dict[str, PartUsage] = {}
    for each in processes.values():
        old = found.get(each.name, PartUsage(each.name, 0, 0.0))
        found[each.name] = PartUsage(
            each.name,
            old.pss_bytes + each.pss_bytes,
            old.processor_s + each.processor_s,
            old.torch_bytes + each.torch_bytes,
        )
    return found


def processor_s(pid: int) -> float:
    """Processor time of all threads of a process so far; OSError if there is no such process."""
    # The clock of another process, which clock_getcpuclockid(3) computes like this on Linux.
    return time.clock_gettime(~pid << 3 | 2)


def machine_processor_s() -> float:
    """Processor time of everything on this machine so far."""
    words = Path("/proc/stat").read_text(encoding="utf-8").splitlines()[0].split()[1:]
    user, nice, system, _, _, irq, softirq = (int(word) for word in words[:7])
    return (user + nice + system + irq + softirq) * _TICK_S


def _parents() -> Iterator[tuple[int, int]]:
    for path in Path("/proc").iterdir():
        if path.name.isdecimal():
            with suppress(OSError):
                fields = (path / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
                yield int(path.name), int(fields[1])


def _part(pid: int) -> str:
    """The part that a process belongs to; empty where only the process's parent shows it."""
    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    if words[0].endswith("etcd"):
        return "etcd"
    if any(word.endswith("gateway_ext/runtime") for word in words):
        return "functions"
    if "gpufaas" in words:
        command = words[words.index("gpufaas") + 1]
        return command if command in _PARTS else ""
    return ""


def _pss_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def _has_torch(pid: int) -> bool:
    return "/libtorch_cpu.so" in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8")
