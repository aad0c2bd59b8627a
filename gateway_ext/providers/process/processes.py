"""What /proc says of the processes that an instance consists of, and their end. Linux only."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from gateway_ext.providers.process.launching import MARK

_PROC = Path("/proc")
_SESSION, _UTIME, _STIME = 3, 11, 12  # of /proc/PID/stat, behind the name
_TICKS = os.sysconf("SC_CLK_TCK")


class Taken(NamedTuple):
    """What processes take: `own_bytes` is without what they share with others."""

    cpu_s: float
    resident_bytes: int
    own_bytes: int


def sessions() -> dict[int, list[int]]:
    """All processes, by the leader of their session."""
    found: dict[int, list[int]] = {}
    for pid in _pids():
        stat = _stat(pid)
        if stat is not None:
            found.setdefault(int(stat[_SESSION]), []).append(pid)
    return found


def taken(pids: list[int]) -> Taken:
    """What these processes take together."""
    cpu_s, resident_bytes, own_bytes = 0.0, 0, 0
    for pid in pids:
        stat, status = _stat(pid), _status(pid)
        if stat is None:
            continue
        cpu_s += (int(stat[_UTIME]) + int(stat[_STIME])) / _TICKS
        resident_bytes += status.get("VmRSS", 0)
        own_bytes += status.get("RssAnon", 0) + status.get("VmSwap", 0)
    return Taken(cpu_s, resident_bytes, own_bytes)


def end_marked(mark: str) -> int:
    """Kills every process that descends from an instance (or several: a prefix); how many."""
    wanted = f"{MARK}={mark}".encode()
    count = 0
    for pid in _pids():
        if pid != os.getpid() and any(part.startswith(wanted) for part in _environment(pid)):
            count += _kill(pid)
    return count


def users() -> set[int]:
    """Everybody who has a process."""
    return {uid for pid in _pids() for uid in _uids(pid)}


def end_user(uid: int, mark: str) -> int:
    """Kills what a function's user still has; how many.

    That is what left both its session and its mark behind. It stays in the file system that its
    instance was given: who is in ours is no function, but somebody who has the same number.
    """
    another, ours = f"{MARK}=".encode(), f"{MARK}={mark}/".encode()
    count = 0
    for pid in _pids():
        if uid in _uids(pid) and _mounts(pid) not in ("", _mounts(os.getpid())):
            marks = [part for part in _environment(pid) if part.startswith(another)]
            if all(one.startswith(ours) for one in marks):
                count += _kill(pid)
    return count


def kill_session(leader: int, number: int = signal.SIGKILL) -> None:
    """Signals the whole session."""
    for pid in sessions().get(leader, []):
        _kill(pid, number)


def _kill(pid: int, number: int = signal.SIGKILL) -> bool:
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _pids() -> Iterator[int]:
    for path in _PROC.iterdir():
        if path.name.isdecimal():
            yield int(path.name)


def _stat(pid: int) -> list[str] | None:
    try:
        text = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return None  # it has ended meanwhile
    return text.rpartition(")")[2].split()


def _status(pid: int) -> dict[str, int]:
    try:
        lines = (_PROC / str(pid) / "status").read_text().splitlines()
    except OSError:
        return {}
    pairs = [line.split(":", 1) for line in lines if line.endswith(" kB")]
    return {name: int(value.split()[0]) << 10 for name, value in pairs}


def _uids(pid: int) -> set[int]:
    """The real one, the effective one, ...: the owner of its folder in /proc can be hidden."""
    try:
        lines = (_PROC / str(pid) / "status").read_text().splitlines()
    except OSError:
        return set()
    return {int(uid) for line in lines if line.startswith("Uid:") for uid in line.split()[1:]}


def _mounts(pid: int) -> str:
    """Which file system it sees; empty where it has ended, or is none of ours."""
    try:
        return str((_PROC / str(pid) / "ns" / "mnt").readlink())
    except OSError:
        return ""


def _environment(pid: int) -> list[bytes]:
    try:
        return (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return []  # it has ended, or is none of ours
