"""Stops a process for good: the kernel's signal alone returns while its threads still run."""

import os
import signal
from pathlib import Path

from tests.kit.waiting import wait_until


def stop(pid: int) -> None:
    """Return once no thread of the process runs any more, or somebody has killed it."""
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: _is_stopped(pid), f"all threads of process {pid} are stopped")


def _is_stopped(pid: int) -> bool:
    try:
        states = [
            (task / "stat").read_text().rpartition(")")[2].split()[0]
            for task in Path(f"/proc/{pid}/task").iterdir()
        ]
    except (FileNotFoundError, ProcessLookupError):  # a thread or all of them have ended
        return not Path(f"/proc/{pid}").exists()
    return all(state in "TZX" for state in states)
