"""Whole programs under `gpufaas exec` on one emulated GPU."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gpufaas.shim_counts import summed_counts
from scheduler.api import DecisionCounts
from tests.kit.programs.warm_process import Order, WarmProcess, warm_process, written

# Every process that may have a model, or get one. The manager is the program's parent, or that of
# the process whose fork the program is.
KILL_WORKERS = """
import contextlib, os, pathlib, signal

def children(pid):
    listed = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in listed]

def parent(pid):
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[1])

def fork_servers(pid):
    commands = {child: pathlib.Path(f"/proc/{child}/cmdline") for child in children(pid)}
    return [child for child in commands if b"gpu_manager.worker" in commands[child].read_bytes()]

def kill_workers():
    manager = os.getppid()
    while not fork_servers(manager):
        manager = parent(manager)
    workers = [worker for server in fork_servers(manager) for worker in children(server)]
    for worker in workers:
        with contextlib.suppress(ProcessLookupError):  # a spare one that was not needed any more
            os.kill(worker, signal.SIGKILL)
    return len(workers)
"""
_MOST_S = 600  # less than pytest waits for a test of the second ring; only a hang takes that long
_LAST_LINE = "the program has ended"
_OF_THE_NODE = ("loads", "hits", "evictions")  # of all programs of a node together

Done = subprocess.CompletedProcess[str]


def execute(program: str, folder: Path, *options: str) -> tuple[Done, dict[str, Any]]:
    """Run a program with these options of `exec`; what came out, and its statistics."""
    script = _script(program, folder)
    done = subprocess.run(
        [*_under_exec(*options), sys.executable, str(script)],
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
    return _checked(*execute(_with_last_line(program), folder, *options))


class ForkedPrograms:
    """Programs of one `gpufaas exec`, in forks of a process with torch and Dynamo imported.

    A program has its own process and session, and finds on the node what earlier ones have left.
    """

    def __init__(self, process: WarmProcess) -> None:
        self._process = process

    def execute(self, program: str, folder: Path) -> tuple[Done, dict[str, Any]]:
        """Run a program; what came out, and the statistics of its processes."""
        script = _script(program, folder)
        output, errors = script.with_suffix(".out"), script.with_suffix(".err")
        answer = self._process.run(Order(str(script), (), str(output), str(errors), _MOST_S))
        done = Done(str(script), answer.status, written(output), written(errors))
        counts = summed_counts([json.loads(line) for line in answer.counts], DecisionCounts())
        return done, {name: counts[name] for name in counts if name not in _OF_THE_NODE}

    def counts_of(self, program: str, folder: Path) -> dict[str, Any]:
        """As the function of that name."""
        return _checked(*self.execute(_with_last_line(program), folder))


@contextmanager
def forked_programs() -> Iterator[ForkedPrograms]:
    """A node for such programs."""
    with warm_process(("torch._dynamo",), _under_exec()) as process:
        yield ForkedPrograms(process)


def _under_exec(*options: str) -> list[str]:
    ours = [sys.executable, "-m", "gpufaas", "exec", "--devices", "cpu:1", "--stats"]
    return [*ours, *options, "--"]


def _script(program: str, folder: Path) -> Path:
    script = folder / "program.py"
    script.write_text(program)
    return script


def _with_last_line(program: str) -> str:
    return f"{program}\nprint({_LAST_LINE!r})\n"


def _checked(done: Done, counts: dict[str, Any]) -> dict[str, Any]:
    assert (done.returncode, done.stdout) == (0, f"{_LAST_LINE}\n"), done.stdout + done.stderr
    return counts
