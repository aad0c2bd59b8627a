"""What name spaces of a test leave on this machine: found by their name, and removed.

    python -m tests.kit.engines.space_traces NAME PROGRAM...

waits for its standard input to end, and then removes everything: it is started beside a test that
may be killed. A byte on the standard input says that nothing is left to do.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_TABLES = ("nat", "filter")
_ROUNDS, _ROUND_S = 200, 0.05


class SpacesFailed(Exception):
    """They could not be made, or something in them does not end."""


def folder_of(name: str) -> Path:
    """The folder of the name spaces of this name."""
    return Path(tempfile.gettempdir()) / name


def hierarchies() -> Iterator[Path]:
    """Where cgroups are: in one place, or in one for each controller of the older kind."""
    if (_CGROUPS / "cgroup.controllers").exists():
        yield _CGROUPS
        return
    yield from (each for each in _CGROUPS.iterdir() if each.is_dir() and not each.is_symlink())


def traces(name: str, programs: Sequence[str]) -> list[str]:
    """What is left of the name spaces of this name, each in a line."""
    mounts = Path("/proc/mounts").read_text().splitlines()
    found = [f"process {pid}" for pid in _processes(name, programs)]
    found += [line for line in mounts if name in line]
    found += [rule for table in _TABLES for rule in _rules(table, name)]
    places = [*(each / name for each in hierarchies()), folder_of(name)]
    return found + [str(path) for path in places if path.exists()]


def remove(name: str, programs: Sequence[str]) -> None:
    """End all processes and remove the rest; the name spaces go with their last process.

    Two may do so at once. SpacesFailed if something stays.
    """
    for _ in range(_ROUNDS):
        if not (living := list(_processes(name, programs))):
            break
        for pid in living:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_ROUND_S)
    for _ in range(_ROUNDS):
        _remove_rules(name)
        _remove_cgroups(name)
        shutil.rmtree(folder_of(name), ignore_errors=True)
        if not traces(name, programs):
            return
        time.sleep(_ROUND_S)  # a cgroup is busy for a moment after its last process
    raise SpacesFailed(f"{name} leaves {traces(name, programs)}")


def run(*words: str) -> str:
    """What a command prints; SpacesFailed with what it said where it fails."""
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SpacesFailed(f"{' '.join(words)}: {done.stderr}")
    return done.stdout


def _processes(name: str, programs: Sequence[str]) -> Iterator[int]:
    """Those of these programs with the folder among their words, and all in its cgroups."""
    for path in Path("/proc").iterdir():
        if path.name.isdecimal() and int(path.name) != os.getpid():
            with suppress(OSError):
                command, cgroup = (path / "cmdline").read_bytes(), (path / "cgroup").read_text()
                program = command.partition(b"\0")[0].rpartition(b"/")[2].decode(errors="replace")
                ours = f"/{name}/".encode() in command and program.startswith(tuple(programs))
                if ours or f"/{name}/" in cgroup:
                    yield int(path.name)


def _rules(table: str, name: str) -> list[str]:
    """Rules of the firewall, as iptables lists them, without quotation marks."""
    listed = run("iptables", "--wait", "--table", table, "--list-rules").replace('"', "")
    return [rule for rule in listed.splitlines() if f" {name} " in f"{rule} "]


def _remove_rules(name: str) -> None:
    for table in _TABLES:
        for rule in _rules(table, name):
            with suppress(SpacesFailed):  # somebody else was faster
                run("iptables", "--wait", "--table", table, "--delete", *rule.split()[1:])


def _remove_cgroups(name: str) -> None:
    for top in (each / name for each in hierarchies()):
        below = sorted((path for path in top.rglob("*") if path.is_dir()), reverse=True)
        for path in (*below, top):
            with suppress(OSError):  # it is busy, or gone
                path.rmdir()


def _guard(name: str, programs: Sequence[str]) -> None:
    if not os.read(sys.stdin.fileno(), 1):
        remove(name, programs)


if __name__ == "__main__":
    _guard(sys.argv[1], sys.argv[2:])
