"""The program that kills every process of some users: `end_program.py OWN_ID ID [ID ...]`.

It is started by its path as root, and imports nothing of ours. For each user it forks a process
with that user's rights and no others, which signals all processes that those rights reach: the
kernel does so in one step, in which no process can escape by forking. The forked process's real
user is `OWN_ID`, which no other process has, so that the user's processes cannot signal it first.
"""

import contextlib
import os
import signal
import sys
from pathlib import Path

_LEAST_UID = 1000  # below it are users of the system


def main() -> None:
    own, *uids = map(int, sys.argv[1:])
    sys.exit(sum(_end(uid, own) for uid in uids))


def _end(uid: int, own: int) -> bool:
    """Whether the forked process failed."""
    child = os.fork()
    if not child:
        _kill_all_of(uid, own)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0


def _kill_all_of(uid: int, own: int) -> None:
    """Never returns; it signals nobody while it has more rights than the user."""
    try:
        os.setgroups([])
        os.setresgid(own, own, own)
        os.setresuid(own, uid, own)
        _check_confined(uid, own)
        with contextlib.suppress(ProcessLookupError):  # the user has no process
            os.kill(-1, signal.SIGKILL)
    except (OSError, ValueError) as error:
        os.write(2, f"{error}\n".encode())
        os._exit(1)
    os._exit(0)


def _check_confined(uid: int, own: int) -> None:
    """ValueError unless this process reaches the user's processes alone: not even its parent."""
    if os.getresuid() != (own, uid, own) or min(uid, own) < _LEAST_UID:
        raise ValueError(f"{uid} and {own} are not users whose processes may be ended")
    status = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    rights = next(line.split()[1] for line in status if line.startswith("CapEff:"))
    if int(rights, 16):
        raise ValueError("the process that ends others has rights of root")
    try:
        os.kill(os.getppid(), 0)
    except PermissionError:
        return
    raise ValueError("the process that ends others may signal its parent, which is root")


if __name__ == "__main__":
    main()
