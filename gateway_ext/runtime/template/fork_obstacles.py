"""What keeps a process from being forked: whatever a copy would lack, or share with the others.

A fork has one thread, and shares with its parent every connection, pipe, lock and shared mapping,
which a process that is started anew has for itself. Regular files are no obstacle: each fork opens
its own.
"""

import fcntl
import os
import signal
import stat
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

_SELF = Path("/proc/self")
_ENDING_S, _LOOK_S = 2.0, 0.005
_HARMLESS_DEVICES = {"/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"}
# Weights and large tensors laid out by the shim: before a fork it makes their memory private.
_PRIVATE_BEFORE_FORK = ("/memfd:gpufaas-weights", "/memfd:gpufaas-block")
_ONLY_AT_OPEN = os.O_CREAT | os.O_EXCL | os.O_TRUNC | os.O_NOCTTY
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)


def obstacle(own: Collection[int]) -> str:
    """Why this process cannot be forked; empty if it can. `own` are the runtime's descriptors."""
    threads = _threads_that_stay()
    if threads:
        return f"it has started threads ({', '.join(sorted(set(threads))[:5])})"
    if _has_children():
        return "it has started a process"
    if any(signal.getitimer(timer)[0] for timer in _TIMERS):
        return "it has set a timer"
    for number, target in _descriptors(own):
        if why := _why_not_copied(number, target):
            return f"it holds {why}"
    shared = next(_shared_mappings(), "")
    return f"it shares memory with other processes ({shared})" if shared else ""


def reopen_files(own: Collection[int]) -> None:
    """Give this fork its own open files: copies would share their positions with the template."""
    for number, target in _descriptors(own):
        if not stat.S_ISREG(os.fstat(number).st_mode):
            continue
        flags = fcntl.fcntl(number, fcntl.F_GETFL) & ~_ONLY_AT_OPEN
        inheritable, position = os.get_inheritable(number), os.lseek(number, 0, os.SEEK_CUR)
        try:
            fresh = os.open(f"/proc/self/fd/{number}", flags)
        except OSError as error:
            raise OSError(error.errno, f"{target} cannot be opened again") from error
        os.lseek(fresh, position, os.SEEK_SET)
        os.dup2(fresh, number, inheritable)
        os.close(fresh)


def _threads_that_stay() -> list[str]:
    """The names of all other threads, once those that are about to end have ended."""
    for _ in range(round(_ENDING_S / _LOOK_S)):  # a process that is held up looks as often
        if not _other_threads():
            break
        time.sleep(_LOOK_S)
    return _other_threads()


def _other_threads() -> list[str]:
    names = []
    for folder in (_SELF / "task").iterdir():
        if folder.name != str(os.getpid()):
            with suppress(OSError):  # it has ended
                names.append((folder / "comm").read_text().strip())
    return names


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _descriptors(own: Collection[int]) -> Iterator[tuple[int, str]]:
    for name in os.listdir(_SELF / "fd"):  # noqa: PTH208 - the numbers, of one look
        if int(name) not in own:
            with suppress(FileNotFoundError):  # that of the look itself
                yield int(name), str((_SELF / "fd" / name).readlink())


def _why_not_copied(number: int, target: str) -> str:
    mode = os.fstat(number).st_mode
    if stat.S_ISDIR(mode) or target in _HARMLESS_DEVICES:
        return ""
    if stat.S_ISREG(mode):
        locked = "\nlock:" in (_SELF / "fdinfo" / str(number)).read_text()
        return f"a lock on {target}" if locked else ""
    return f"a connection ({target})" if stat.S_ISSOCK(mode) else target


def _shared_mappings() -> Iterator[str]:
    for line in (_SELF / "maps").read_text().splitlines():
        _, rights, _, _, _, *path = line.split(maxsplit=5)
        name = path[0] if path else "no file"
        if rights.endswith("s") and "w" in rights and not name.startswith(_PRIVATE_BEFORE_FORK):
            yield name
