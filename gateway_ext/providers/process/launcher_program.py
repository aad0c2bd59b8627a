"""The program that the gateway starts: it gives up rights, then becomes the function.

It is started by its path, with orders as JSON on standard input, and imports nothing of ours. Steps
that the system does not allow are reported on standard error: a function runs with less protection
rather than not at all.
"""

import ctypes
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_SET_DEATH_SIGNAL, _SET_NO_NEW_PRIVILEGES = 1, 38
_NEW_MOUNTS = 0x00020000
_BIND, _RECURSIVE, _PRIVATE = 4096, 16384, 1 << 18
_SECRETS = Path("/var/openfaas/secrets")
_MOST_PROCESSES = 4096

_libc = ctypes.CDLL(None, use_errno=True)
_missing: list[str] = []


def main() -> None:
    """Carry out the orders; never returns."""
    orders: dict[str, Any] = json.loads(sys.stdin.buffer.read())
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.umask(0o022)
    uid: int | None = orders["uid"]
    if uid is not None:
        _attempt("a file system of its own", lambda: _leave_mounts(orders))
        _attempt("limits", _limit)
        _become(uid)  # must succeed: else the function would run as root
    _attempt("no new privileges", lambda: _control(_SET_NO_NEW_PRIVILEGES, 1))
    if orders["cpus"]:
        _attempt("its processors", lambda: os.sched_setaffinity(0, orders["cpus"]))
    _die_with(orders["parent"])  # after the change of user, which resets it
    if _missing:
        sys.stderr.write(f"gpufaas: this system does not allow {', '.join(_missing)}\n")
        sys.stderr.flush()
    os.umask(0o077)
    os.chdir(orders["cwd"])
    os.execve(orders["command"][0], orders["command"], orders["environment"])


def _leave_mounts(orders: dict[str, Any]) -> None:
    if _libc.unshare(_NEW_MOUNTS):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    _mount("none", "/", "", _RECURSIVE | _PRIVATE)
    if orders["secrets"]:
        secrets = Path(orders["secrets"])
        _SECRETS.mkdir(parents=True, exist_ok=True)
        _mount(str(secrets), str(_SECRETS), "", _BIND)
    _open_up([Path(folder) for folder in orders["visible"]])


def _open_up(folders: list[Path]) -> None:
    """Make these folders reachable, and nothing else of the closed folders above them."""
    wanted = [folder for folder in folders if folder.exists() and _closed_above(folder)]
    handles = [os.open(folder, os.O_PATH) for folder in wanted]
    for folder, handle in zip(wanted, handles, strict=True):
        closed = _closed_above(folder)
        if closed is not None:
            _mount("tmpfs", str(closed), "tmpfs", 0, "mode=0711,size=64k")
        _make(folder)
        _mount(f"/proc/self/fd/{handle}", str(folder), "", _BIND | _RECURSIVE)
        os.close(handle)


def _make(folder: Path) -> None:
    for above in reversed([folder, *folder.parents]):
        if not above.exists():
            above.mkdir()
            above.chmod(0o711)


def _closed_above(folder: Path) -> Path | None:
    for above in reversed(folder.parents):
        if above.exists() and not above.stat().st_mode & 0o001:
            return above
    return None


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    most = _MOST_PROCESSES if hard == resource.RLIM_INFINITY else min(hard, _MOST_PROCESSES)
    resource.setrlimit(resource.RLIMIT_NPROC, (most, most))


def _become(uid: int) -> None:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def _die_with(parent: int) -> None:
    _control(_SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    words = [word.encode() for word in (source, target, kind)]
    if _libc.mount(*words, ctypes.c_ulong(flags), options.encode()):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error), target)


def _control(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _attempt(what: str, step: Callable[[], object]) -> None:
    try:
        step()
    except (OSError, ValueError) as error:
        _missing.append(f"{what} ({error})")


if __name__ == "__main__":
    main()
