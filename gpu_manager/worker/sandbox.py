"""What a worker gives up before it reads anything of a tenant's. Linux only.

Every step that the system does not allow is named in what these functions return, for the log:
a worker runs with less protection rather than not at all.
"""

import ctypes
import functools
import os
import resource
import signal
from collections.abc import Callable

from gpu_manager.worker.file_view import narrow, own_temporary_folders
from gpu_manager.worker.system_calls import refuse_system_calls

_SET_DEATH_SIGNAL, _SET_DUMPABLE, _SET_NO_NEW_PRIVILEGES = 1, 4, 38
_NEW_NETWORK, _NEW_USER = 0x40000000, 0x10000000
_CAPABILITY_VERSION = 0x20080522
_FILES = "no files but the system's"

_libc = ctypes.CDLL(None, use_errno=True)


def isolate() -> list[str]:
    """For this process and those it forks: no network, few files, no rights by executing a file."""
    missing: list[str] = []
    _attempt(missing, "no new privileges", lambda: _control(_SET_NO_NEW_PRIVILEGES, 1))
    _attempt(missing, _FILES, narrow)
    _attempt(missing, "no network", _leave_network)
    # A new user namespace makes the process undumpable, which closes its own /proc files to it.
    _control(_SET_DUMPABLE, 1)
    return missing


def separate(missing: list[str]) -> list[str]:
    """For one of the forked processes: temporary files that the others do not see.

    `missing` is what `isolate` returned. Without files of their own there is nothing to separate.
    """
    found: list[str] = []
    if not any(what.startswith(_FILES) for what in missing):
        _attempt(found, "temporary files of its own", own_temporary_folders)
    return found


def die_with(parent: int) -> None:
    """Be killed when the parent ends, even if it has ended already."""
    _control(_SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def give_up_rights(uid: int, descriptors: int, processes: int, parent: int) -> list[str]:
    """Become an unprivileged user (unless `uid` is 0) within limits, closed to inspection.

    From then on the system refuses what a worker never asks for.
    """
    missing: list[str] = []
    limits = (
        ("no core file", resource.RLIMIT_CORE, 0),
        ("few open files", resource.RLIMIT_NOFILE, descriptors),
        ("few processes", resource.RLIMIT_NPROC, processes),
    )
    for what, limit, value in limits:
        _attempt(missing, what, functools.partial(_lower, limit, value))
    if uid:
        _attempt(missing, "a user of its own", lambda: _become(uid))
    else:
        missing.append("a user of its own")
    _attempt(missing, "not dumpable", lambda: _control(_SET_DUMPABLE, 0))
    die_with(parent)  # a change of user forgets it
    _attempt(missing, "few system calls", refuse_system_calls)
    return missing


def _leave_network() -> None:
    """Without the right to do so it takes a new user namespace, whose rights are then dropped."""
    if not _libc.unshare(_NEW_NETWORK):
        return
    if _libc.unshare(_NEW_USER | _NEW_NETWORK):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    if _libc.capset(header, (ctypes.c_uint32 * 6)()):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _become(uid: int) -> None:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def _lower(limit: int, value: int) -> None:
    _, hard = resource.getrlimit(limit)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(limit, (value, value))


def _control(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _attempt(missing: list[str], what: str, step: Callable[[], None]) -> None:
    try:
        step()
    except (OSError, ValueError) as error:
        missing.append(f"{what} ({error})")
