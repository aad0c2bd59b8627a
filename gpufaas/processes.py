"""Other programs: what they say of themselves, and children that never outlive us."""

import os
import subprocess
import sys
from collections.abc import Sequence

_ANSWER_S = 10.0
# Our process may be killed at any moment, and its children should go with it: the kernel sees to
# that, if the child asks for it itself. `exec` keeps the promise, and no code of ours runs after
# a fork.
_LAUNCH = """
import ctypes, os, signal, sys
ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
if os.getppid() != int(sys.argv[1]):  # it is gone already
    sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


def dies_with_us(command: Sequence[str]) -> tuple[str, ...]:
    """A command (with the path of its program) for a child that the kernel kills when we end."""
    return (sys.executable, "-I", "-S", "-c", _LAUNCH, str(os.getpid()), *command)


def said_by(*command: str) -> str:
    """What a program prints; nothing where there is none, it fails or takes too long."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_ANSWER_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
