"""Whole programs under `gpufaas exec` on one emulated GPU."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

# Every process that the manager has started, which is all but the program itself.
KILL_WORKERS = """
import os, pathlib, signal

def children(pid):
    listed = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in listed]

def kill_workers():
    servers = [child for child in children(os.getppid()) if child != os.getpid()]
    workers = [worker for server in servers for worker in children(server)]
    for worker in workers:
        os.kill(worker, signal.SIGKILL)
    return len(workers)
"""
_MOST_S = 270  # less than pytest waits for a test; only a hang takes that long
_LAST_LINE = "the program has ended"


def execute(
    program: str, folder: Path, *options: str
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """Run a program with these options of `exec`; what came out, and its statistics."""
    script = folder / "program.py"
    script.write_text(program)
    command = [sys.executable, "-m", "gpufaas.cli", "exec", "--devices", "cpu:1", "--stats"]
    done = subprocess.run(
        [*command, *options, "--", sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=_MOST_S,
        check=False,
    )
    lines = [line for line in done.stderr.splitlines() if line.startswith('{"')]
    assert lines, done.stderr
    return done, json.loads(lines[-1])


def counts_of(program: str, folder: Path, *options: str) -> dict[str, Any]:
    """The statistics of a program that has checked itself, printed nothing and run to its end."""
    done, counts = execute(f"{program}\nprint({_LAST_LINE!r})\n", folder, *options)
    assert (done.returncode, done.stdout) == (0, f"{_LAST_LINE}\n"), done.stdout + done.stderr
    return counts
