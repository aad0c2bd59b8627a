"""`python -m bench.idle`: what `gpufaas up` costs while nothing is asked of it."""

import argparse
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from bench.gateway_up import up
from bench.report import Report

_DEVICES = "cpu:2"
_SETTLE_S = 20.0
_MOST_BYTES, _MOST_CORE = 600e6, 0.03
_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
_PARTS = ("scheduler", "gpu-manager", "gateway", "up")


@dataclass(frozen=True, slots=True)
class Process:
    """One process: what it is for, its share of memory, its processor time so far."""

    name: str
    pss_bytes: int
    cpu_s: float


def main() -> None:
    """Measure, and keep it when asked to."""
    parser = argparse.ArgumentParser(prog="bench.idle", description=__doc__)
    parser.add_argument("--seconds", type=float, default=30.0, help="of which the time is taken")
    parser.add_argument("--keep", action="store_true", help="write it to bench/results/")
    options = parser.parse_args()
    report = Report("The idle stack", f"python -m bench.idle --seconds {options.seconds:g}")
    measure(report, options.seconds)
    if options.keep:
        print(report.keep("idle"))


def measure(report: Report, seconds: float) -> None:
    """Memory and processor time of all processes of a stack without functions."""
    with tempfile.TemporaryDirectory(prefix="idle") as name:
        root = Path(name)
        root.chmod(0o755)
        with up(root, ["--devices", _DEVICES]) as stack:
            time.sleep(_SETTLE_S)
            before, began_s = tree(stack.pid), time.monotonic()
            time.sleep(seconds)
            after, took_s = tree(stack.pid), time.monotonic() - began_s
    _show(report, before, after, took_s)


def tree(first: int) -> dict[int, Process]:
    """A process and all that descend from it, by pid."""
    children = defaultdict(list)
    for pid, parent in _parents():
        children[parent].append(pid)
    found: dict[int, Process] = {}
    left = [(first, "")]
    while left:
        pid, inherited = left.pop()
        with suppress(OSError):  # it ended meanwhile
            name = _name(pid) or f"{inherited}'s workers".replace("'s workers's", "'s")
            found[pid] = Process(name, _pss_bytes(pid), cpu_s(pid))
            left += [(child, name) for child in children[pid]]
    return found


def cpu_s(pid: int) -> float:
    """Processor time of one process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * _TICK_S


def machine_cpu_s() -> float:
    """Processor time that everything on this machine has taken so far."""
    words = Path("/proc/stat").read_text(encoding="utf-8").splitlines()[0].split()[1:]
    user, nice, system, _, _, irq, softirq = (int(word) for word in words[:7])
    return (user + nice + system + irq + softirq) * _TICK_S


def by_name(processes: Mapping[int, Process]) -> dict[str, Process]:
    """The sums of those that are for the same."""
    found: dict[str, Process] = {}
    for each in processes.values():
        old = found.get(each.name, Process(each.name, 0, 0.0))
        found[each.name] = Process(
            each.name, old.pss_bytes + each.pss_bytes, old.cpu_s + each.cpu_s
        )
    return found


def _show(
    report: Report, before: Mapping[int, Process], after: Mapping[int, Process], took_s: float
) -> None:
    report.say("\n## The idle stack\n")
    report.say(
        f"`gpufaas up --devices {_DEVICES}` without functions; {len(after)} processes, after "
        f"{_SETTLE_S:g} s of rest; time over {took_s:.0f} s. PSS: shared pages are divided among "
        f"those who share them. Load average: {os.getloadavg()[0]:.1f}.\n"
    )
    report.say("| part | PSS MB | % of a core |\n| --- | ---: | ---: |")
    earlier, later = by_name(before), by_name(after)
    all_bytes, all_core = 0.0, 0.0
    for name, now in sorted(later.items()):
        old_s = earlier[name].cpu_s if name in earlier else 0.0
        core = (now.cpu_s - old_s) / took_s
        all_bytes, all_core = all_bytes + now.pss_bytes, all_core + core
        report.say(f"| {name} | {now.pss_bytes / 1e6:.0f} | {100 * core:.2f} |")
    report.say(f"| all | {all_bytes / 1e6:.0f} | {100 * all_core:.2f} |")
    good = all_bytes <= _MOST_BYTES and all_core <= _MOST_CORE
    report.say(
        f"\nWanted: at most {_MOST_BYTES / 1e6:.0f} MB and {100 * _MOST_CORE:g} % of a core: "
        f"{'reached' if good else 'NOT reached'}."
    )


def _parents() -> Iterator[tuple[int, int]]:
    for path in Path("/proc").iterdir():
        if path.name.isdecimal():
            with suppress(OSError):
                fields = (path / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
                yield int(path.name), int(fields[1])


def _name(pid: int) -> str:
    """What a process is for; nothing where its parent knows."""
    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    if words[0].endswith("etcd"):
        return "etcd"
    if any(word.endswith("gateway_ext/runtime") for word in words):
        return "functions"
    if "gpufaas.cli" in words:
        command = words[words.index("gpufaas.cli") + 1]
        return command if command in _PARTS else ""
    return ""


def _pss_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))


if __name__ == "__main__":
    main()
