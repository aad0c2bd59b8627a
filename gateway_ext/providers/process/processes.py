"""Finds, measures and kills the processes of instances, by way of /proc. Linux only."""

import logging
import os
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from gateway_ext.providers.process.launch import MARK

log = logging.getLogger(__name__)

_PROC = Path("/proc")
_SESSION, _UTIME, _STIME = 3, 11, 12  # positions in /proc/PID/stat after the name
_ZOMBIE = ("State:\tZ", "State:\tX")
_TICKS = os.sysconf("SC_CLK_TCK")


class ProcessUsage(NamedTuple):
    """Resources of processes; `own_bytes` excludes memory shared with other processes."""

    cpu_s: float
    resident_bytes: int
    own_bytes: int


def sessions() -> dict[int, list[int]]:
    """Process ids by the leader of their session."""
    by_leader: dict[int, list[int]] = {}
    for pid in _pids():
        if stat := _stat(pid):
            by_leader.setdefault(int(stat[_SESSION]), []).append(pid)
    return by_leader


def usage(pids: Iterable[int]) -> ProcessUsage:
    cpu_s, resident_bytes, own_bytes = 0.0, 0, 0
    for pid in pids:
        stat, status = _stat(pid), _status(pid)
        if not stat:
            continue
        cpu_s += (int(stat[_UTIME]) + int(stat[_STIME])) / _TICKS
        resident_bytes += status.get("VmRSS", 0)
        own_bytes += status.get("RssAnon", 0) + status.get("VmSwap", 0)
    return ProcessUsage(cpu_s, resident_bytes, own_bytes)


def end_marked(mark: str) -> int:
    """Kill all processes whose mark begins with this; returns their number."""
    wanted = f"{MARK}={mark}".encode()
    count = 0
    for pid in _pids():
        if pid != os.getpid() and any(part.startswith(wanted) for part in _environment(pid)):
            count += _kill(pid)
    return count


def by_user() -> dict[int, list[int]]:
    """Process ids by the user that they have; what has ended and waits for its parent has none."""
    by_uid: dict[int, list[int]] = {}
    for pid in _pids():
        for uid in _uids(pid):
            by_uid.setdefault(uid, []).append(pid)
    return by_uid


def users() -> set[int]:
    return set(by_user())


def kill(pids: Iterable[int]) -> None:
    """Kill these processes, as far as they are still there."""
    for pid in pids:
        _kill(pid)


def kill_session(leader: int) -> None:
    """Kill all processes of a session, as far as /proc can be read now."""
    try:
        members = sessions().get(leader, [])
    except OSError as error:  # such as too many open files
        log.warning("the processes of session %d were not found: %s", leader, error)
        return
    for pid in members:
        _kill(pid)


def _kill(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _pids() -> Iterator[int]:
    for path in _PROC.iterdir():
        if path.name.isdecimal():
            yield int(path.name)


def _stat(pid: int) -> list[str]:
    return _text(pid, "stat").rpartition(")")[2].split()


def _status(pid: int) -> dict[str, int]:
    lines = _text(pid, "status").splitlines()
    pairs = [line.split(":", 1) for line in lines if line.endswith(" kB")]
    return {name: int(value.split()[0]) << 10 for name, value in pairs}


def _uids(pid: int) -> set[int]:
    """Real, effective, saved and file system user; the owner of /proc/PID may be another one."""
    lines = _text(pid, "status").splitlines()
    if any(line.startswith(_ZOMBIE) for line in lines):
        return set()
    return {int(uid) for line in lines if line.startswith("Uid:") for uid in line.split()[1:]}


def _text(pid: int, name: str) -> str:
    try:
        # A process chooses its name, which need not be text.
        return (_PROC / str(pid) / name).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""  # the process has ended


def _environment(pid: int) -> list[bytes]:
    try:
        return (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return []  # it has ended, or may not be inspected
