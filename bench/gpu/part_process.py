"""One part of `make gpu` in a process of its own, under a time limit; its rows as they come."""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from bench.gpu.results_file import Row

ROOT = Path(__file__).parents[2]
# How a part marks a line of its standard output as a row.
ROW = "row "
_LAST_LINES, _LINE_CHARACTERS = 12, 300
_TERMINATED_S, _PIPE_S, _POLL_S = 20.0, 3.0, 0.5


def run_part(
    command: Sequence[str],
    environment: Mapping[str, str],
    limit_s: float,
    add: Callable[[Row], None],
) -> str:
    """Run it; what failed, empty if nothing did. All its processes have ended on return."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        text=True,
        errors="replace",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdout is not None
    last: deque[str] = deque(maxlen=_LAST_LINES)
    lines = _read_ahead(process.stdout)
    in_time = True
    try:
        for line in _until(lines, process, time.monotonic() + limit_s):
            if line.startswith(ROW):
                add(json.loads(line.removeprefix(ROW)))
            else:
                last.append(line[:_LINE_CHARACTERS])
            print(f"    {line}", flush=True)
        in_time = process.poll() is not None
    finally:
        _end(process)
    if not in_time:
        return f"stopped after {limit_s:.0f} s; its last lines: {' / '.join(last)}"
    if process.returncode:
        return f"ended with {process.returncode}: {' / '.join(last)}"
    return ""


def say(row: Row) -> None:
    """In a part: give one row."""
    sys.stdout.write(f"{ROW}{json.dumps(row)}\n")
    sys.stdout.flush()


def _read_ahead(output: IO[str]) -> "queue.Queue[str | None]":
    """The lines of a pipe; None at its end."""
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        with output:
            for line in output:
                lines.put(line.rstrip("\n"))
        lines.put(None)

    threading.Thread(target=read, name="part-output", daemon=True).start()
    return lines


def _until(
    lines: "queue.Queue[str | None]", process: "subprocess.Popen[str]", deadline_s: float
) -> Iterator[str]:
    """Its lines until it has ended, or the time is over.

    The pipe alone says nothing: a process that the part left behind may hold it open.
    """
    ended_s: float | None = None
    while time.monotonic() < deadline_s:
        try:
            line = lines.get(timeout=_POLL_S)
        except queue.Empty:
            if process.poll() is not None:
                ended_s = ended_s or time.monotonic()
                if time.monotonic() > ended_s + _PIPE_S:
                    return
            continue
        if line is None:
            break
        yield line
    while process.poll() is None and time.monotonic() < deadline_s:
        time.sleep(_POLL_S / 10)


def _end(process: "subprocess.Popen[str]") -> None:
    """End it and the processes of its session; first so that it can clean up."""
    for number, wait_s in ((signal.SIGTERM, _TERMINATED_S), (signal.SIGKILL, None)):
        if process.poll() is None:
            os.killpg(process.pid, number)
            try:
                process.wait(wait_s)
            except subprocess.TimeoutExpired:
                continue
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # nobody is left in the session
