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
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_SET_DEATH_SIGNAL, _SET_ADOPTING, _SET_NO_NEW_PRIVILEGES = 1, 36, 38
_NEW_MOUNTS, _NEW_IPC, _NEW_USER, _NEW_NETWORK = 0x00020000, 0x08000000, 0x10000000, 0x40000000
_NO_SET_UID, _NO_DEVICES = 2, 4
_BIND, _RECURSIVE, _PRIVATE = 4096, 16384, 1 << 18
_SECRETS = Path("/var/openfaas/secrets")
# Folders in which everybody may make files, and the one that is memory.
_SHARED_FOLDERS = (Path("/tmp"), Path("/var/tmp"))
_SHARED_MEMORY = Path("/dev/shm")
# NVIDIA's driver opens its devices to everybody; a function has no GPU but the shim's.
_DEVICES, _OF_GPUS = Path("/dev"), "nvidia*"

_libc = ctypes.CDLL(None, use_errno=True)
_missing: list[str] = []
_NICE = 10
# A function that makes orphans without end keeps neither the keeper nor the gateway busy.
_BETWEEN_REPORTS_S = 0.001


def main() -> None:
    """Carry out the orders; never returns."""
    orders: dict[str, Any] = json.loads(sys.stdin.buffer.read())
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if orders["reports"] >= 0:
        orders["parent"] = _leave_keeper(orders["parent"], orders["reports"])
    os.umask(0o022)
    uid: int | None = orders["uid"]
    if not orders["network"]:
        _leave_network(as_root=uid is not None)  # must succeed: a setting says so
    if uid is not None:
        _attempt("a file system of its own", lambda: _leave_mounts(orders))
    _attempt("limits", lambda: _limit(orders["limits"]))
    if orders["background"]:
        os.nice(_NICE)
    if uid is not None:
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


def _leave_keeper(parent: int, reports: int) -> int:
    """Return in a process of its own session, whose parent is this one; the parent's id.

    This process keeps its rights, becomes the parent of every process below it whose own parent has
    ended, and writes how each of them ended to `reports`: first the new process's id, then pairs of
    an id and a wait status. It ends when none is left, and all of them end with it.
    """
    _die_with(parent)
    _control(_SET_ADOPTING, 1)
    keeper = os.getpid()
    kept = os.fork()
    if not kept:
        os.setsid()
        os.close(reports)
        return keeper
    os.dup2(reports, 3)
    os.closerange(4, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    for number in (1, 2):
        os.dup2(0, number)
    os.write(3, struct.pack("=ii", kept, 0))
    try:
        while True:
            os.write(3, struct.pack("=ii", *os.waitpid(-1, 0)))
            time.sleep(_BETWEEN_REPORTS_S)
    except (ChildProcessError, BrokenPipeError):
        os._exit(0)


def _leave_network(*, as_root: bool) -> None:
    """Who is not root takes a new user namespace for it, in which it has the same user."""
    if not _libc.unshare(_NEW_NETWORK):
        return
    uid, gid = os.geteuid(), os.getegid()
    if as_root or _libc.unshare(_NEW_USER | _NEW_NETWORK):
        sys.exit("gpufaas: this system does not let a build run without the network")
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{uid} {uid} 1"),
        ("gid_map", f"{gid} {gid} 1"),
    ):
        Path("/proc/self", name).write_text(text, encoding="ascii")


def _leave_mounts(orders: dict[str, Any]) -> None:
    if _libc.unshare(_NEW_MOUNTS | _NEW_IPC):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    _mount("none", "/", "", _RECURSIVE | _PRIVATE)
    if orders["secrets"]:
        secrets = Path(orders["secrets"])
        _SECRETS.mkdir(parents=True, exist_ok=True)
        _mount(str(secrets), str(_SECRETS), "", _BIND)
    _show([Path(folder) for folder in orders["visible"]], orders["scratch"])
    for device in _DEVICES.glob(_OF_GPUS):  # each stays, as one, or a folder, that does nothing
        if device.is_dir():
            _mount("tmpfs", str(device), "tmpfs", 0, "mode=0755,size=4k")
        else:
            _mount(os.devnull, str(device), "", _BIND)


def _show(folders: list[Path], scratch: str) -> None:
    """Make these folders reachable, and nothing else of closed folders above them.

    With `scratch`, that folder takes the place of those which all users share.
    """
    present = [folder for folder in folders if folder.exists()]
    shared = _SHARED_FOLDERS if scratch else ()
    hidden = [
        folder
        for folder in present
        if _closed_above(folder) or any(folder.is_relative_to(one) for one in shared)
    ]
    handles = [os.open(folder, os.O_PATH) for folder in hidden]
    if scratch:
        _cover_shared_folders(scratch)
    for folder, handle in zip(hidden, handles, strict=True):
        closed = _closed_above(folder)
        if closed is not None:
            _mount("tmpfs", str(closed), "tmpfs", 0, "mode=0711,size=64k")
        _make(folder)
        _mount(f"/proc/self/fd/{handle}", str(folder), "", _BIND | _RECURSIVE)
        os.close(handle)


def _cover_shared_folders(scratch: str) -> None:
    handle = os.open(scratch, os.O_PATH)
    for folder in _SHARED_FOLDERS:
        if folder.is_dir():
            _mount(f"/proc/self/fd/{handle}", str(folder), "", _BIND)
    os.close(handle)
    if _SHARED_MEMORY.is_dir():
        flags = _NO_SET_UID | _NO_DEVICES
        _mount("tmpfs", str(_SHARED_MEMORY), "tmpfs", flags, "mode=1777,size=64m")


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


def _limit(limits: dict[str, int]) -> None:
    """Lower the limits of this process and those that it starts; names are those of `resource`."""
    for name, wanted in limits.items():
        limit = getattr(resource, name)
        _, hard = resource.getrlimit(limit)
        most = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
        resource.setrlimit(limit, (most, most))


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
