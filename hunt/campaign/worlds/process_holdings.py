"""What the kernel says of a system's processes: who they are, and what they hold."""

import contextlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from hunt.campaign.judging.leftovers import WORKER, PartHoldings

# The first that a process's command has; instances and templates of functions are `runtime`.
_ROLES = {
    "-m gpufaas gateway": "gateway",
    "-m gpufaas scheduler": "scheduler",
    "-m gpufaas gpu-manager": "gpu-manager",
    "-m gpufaas up": "up",
    "etcd": "etcd",
    "gpu_manager.worker": WORKER,
    "gateway_ext/runtime": "runtime",
}
_KINDS = {"socket:": "sockets", "/memfd:": "memfds", "pipe:": "pipes", "anon_inode:": "kernel"}


class _Status(NamedTuple):
    parent: int
    state: str
    command: str


def marked(words: Iterable[bytes]) -> dict[int, str]:
    """Every process in whose command or environment one of these words is, with its command."""
    wanted, found = [*words], {}
    for pid in _pids():
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            known = command + Path(f"/proc/{pid}/environ").read_bytes()
            if pid != os.getpid() and any(word in known for word in wanted):
                found[pid] = command.replace(b"\0", b" ").decode(errors="replace")
    return found


def role(command: str) -> str:
    """What this process is for the system."""
    names = (name for words, name in _ROLES.items() if words in command)
    return next(names, "other")


def roles(processes: Mapping[int, str]) -> Mapping[str, int]:
    """How many processes of each role there are."""
    return dict(Counter(map(role, processes.values())))


def part_holdings(pid: int) -> PartHoldings:
    """Descriptors and threads of a process; nothing where it has ended."""
    kinds: Counter[str] = Counter()
    threads = 0
    with contextlib.suppress(OSError):
        threads = len([*Path(f"/proc/{pid}/task").iterdir()])
        for _, target in _descriptors(pid):
            kinds[next((kind for word, kind in _KINDS.items() if word in target), "files")] += 1
    return PartHoldings(dict(kinds), threads)


def memfds(pids: Iterable[int]) -> int:
    """How many pieces of shared memory these processes have open together."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for path, target in _descriptors(pid):
                if "/memfd:" in target:
                    with contextlib.suppress(OSError):
                        known = path.stat()
                        found.add((known.st_dev, known.st_ino))
    return len(found)


def strays(processes: Mapping[int, str], roots: Iterable[int]) -> tuple[str, ...]:
    """Processes of the system that none of its roots has started, directly or not."""
    known = {pid: status.parent for pid, status in _statuses()}
    ours = set(roots)

    def is_ours(pid: int) -> bool:
        while pid > 1:
            if pid in ours:
                return True
            pid = known.get(pid, 0)
        return False

    return tuple(
        f"{pid} {command[:200]}"
        for pid, command in sorted(processes.items())
        if pid in known and not is_ours(pid)
    )


def zombies(processes: Mapping[int, str]) -> tuple[str, ...]:
    """Children of these processes that have ended, and that nobody has asked how."""
    return tuple(
        f"{pid} ({status.command}) of {processes[status.parent][:100]}"
        for pid, status in _statuses()
        if status.state == "Z" and status.parent in processes
    )


def _descriptors(pid: int) -> Iterator[tuple[Path, str]]:
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            yield path, str(path.readlink())


def _statuses() -> Iterator[tuple[int, _Status]]:
    for pid in _pids():
        with contextlib.suppress(OSError):
            head, _, rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
            fields = rest.split()
            yield pid, _Status(int(fields[1]), fields[0], head.partition("(")[2])


def _pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]
