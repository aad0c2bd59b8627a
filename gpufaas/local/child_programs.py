"""Child processes: their output, their end with a block, and a start that ends them with us."""

import os
import subprocess
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

_TIMEOUT_S = 10.0
# The child asks the kernel to kill it when its parent ends, which holds across `exec`. This needs
# no code of ours between fork and exec.
_LAUNCH = """
import ctypes, os, signal, sys
ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
if os.getppid() != int(sys.argv[1]):  # the parent has ended already
    sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


def dies_with_us(command: Sequence[str]) -> tuple[str, ...]:
    """A command line whose process the kernel kills when this process ends."""
    return (sys.executable, "-I", "-S", "-c", _LAUNCH, str(os.getpid()), *command)


@asynccontextmanager
async def killed_at_end(child: Process) -> AsyncIterator[Process]:
    """Kill the child at the end of the block if it still runs, and wait for its end."""
    try:
        yield child
    finally:
        with suppress(ProcessLookupError):
            child.kill()
        await child.wait()


def output_of(*command: str) -> str:
    """A program's output; empty if the program is missing, fails or takes too long."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
